"""A Link is a process group of our own: who we are, who the others are, and messages between two of them.

Not the user's default group: their barriers live there, and one timeout would poison it. Point-to-point only, so a process that
dies takes its own pairs with it and no others. Every message carries the membership epoch and the step in its tag.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from gossamer.errors import GossamerError
from gossamer.transport.store_client import Answer, Silent, StoreClient

_FOREVER = timedelta(days=7)  # gloo's own timeouts close all pairs of a group; we keep our own time (see exchange.py)
_NEVER = 0x7FFFFFFF  # a tag that is never sent: the last part of the last collective
_BUILD = 10.0  # seconds for connecting, once all are there
_BUILD_FIRST = 60.0  # seconds for the same, when the job starts
_READ = 5.0  # seconds that rank 0 waits for the others to read why they fail, before it ends
_STATUS = 0.5  # seconds that it may take to say, or to hear, what a worker waits for
_opened = itertools.count()  # links are opened in the same order everywhere, so this number names one


def next_name() -> str:
    return f"gossamer/{next(_opened)}"


@functools.cache
def _devices() -> list[Any]:
    """Where gloo listens, for all our groups. Connected at once: the default group may have been told to be lazy (``launch.py``)."""
    make = dist.ProcessGroupGloo
    interfaces = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
    if not interfaces:
        return [make.create_default_device(lazy_init=False)]
    return [make.create_device(interface=name, lazy_init=False) for name in interfaces]


class Lost(RuntimeError):
    """A peer's connection was closed before a message to or from it could be posted."""

    def __init__(self, peer: int, reason: str) -> None:
        super().__init__(reason)
        self.peer = peer


class Message(NamedTuple):
    peer: int
    tag: int
    tensor: Tensor


Works = list[tuple[int, Any]]  # (peer, what there is to wait for)


@dataclass(frozen=True)
class Tag:
    """31 bits, as gloo takes them: 4 of the epoch, 1 for a collective, 10 of the step (or 7 of the collective's number and 3 of its
    kind, so that ``save()`` on one worker does not pair with ``average_()`` on another), 16 for the part."""

    epoch: int
    collective: bool
    number: int
    kind: int = 0

    PARTS = 1 << 16

    def part(self, k: int) -> int:
        if k >= self.PARTS:
            raise GossamerError(f"a step of more than {self.PARTS} messages between two workers; use a larger chunk")
        number = self.number % 128 << 3 | self.kind if self.collective else self.number % 1024
        return (self.epoch % 16) << 27 | int(self.collective) << 26 | number << 16 | k


class Start(Protocol):
    """The time before training, when all workers need all others: see ``members/store.py``."""

    def end(self) -> str:
        """The first rank that has ended, and how. Empty if all run."""

    def failed(self, why: str, final: bool) -> None:
        """Training can't begin."""


class Link:
    """Between processes on CPUs: gloo, started from the store that the default group was started with, or the launcher's.

    ``name`` is the same everywhere. ``abandoned``: asked while the others are waited for; True ends the wait with an error.
    ``start``: under ``gossamer launch``, what is known about the other processes.
    """

    alone = False

    def __init__(
        self,
        store: Any,
        rank: int,
        size: int,
        timeout: float = 300.0,
        epoch: int = 0,
        name: str | None = None,
        abandoned: Callable[[], bool] | None = None,
        start: Start | None = None,
    ) -> None:
        self.rank, self.size, self.timeout, self.epoch = rank, size, timeout, epoch
        self.names: Sequence[int] = range(size)  # what the ranks are called in messages
        self.name = name or next_name()
        self.store: Any = dist.PrefixStore(f"{self.name}/{epoch}", store)
        self._agreements = 0
        self._abandoned, self._start = abandoned, start
        self.closed = False
        self._status = StoreClient(self._connected)
        self._meet("here", "did not arrive")
        self._group = self._open()
        if abandoned is None:  # a mistake found right after this must not close connections that others still make
            self._meet("open", "did not connect to the others")

    def _open(self) -> Any:
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = _devices()
        options._timeout = timedelta(seconds=min(self.timeout, _BUILD_FIRST if self._abandoned is None else _BUILD))
        try:
            return dist.ProcessGroupGloo(dist.PrefixStore("gloo", self.store), self.rank, self.size, options)
        except RuntimeError as error:
            if self._abandoned is not None:
                raise
            end = self._start.end() if self._start is not None else ""
            why = f"{end} before training began" if end else f"can't connect to the other {self.size - 1} workers: {error}"
            raise self._failure("open", why, []) from None

    @property
    def streams(self) -> bool:
        """Whether waiting is done by the device's streams, not by the host."""
        return False

    def post(self, outgoing: Sequence[Message], incoming: Sequence[Message], lost: set[int] | None = None) -> Works:
        """Start to send and to receive. The tensors must stay as they are.
        ``lost``: peers to leave out; who turns out to be gone is added to it, and is no error then."""
        works = []
        for verb, messages in ((self._group.recv, incoming), (self._group.send, outgoing)):
            for peer, tag, tensor in messages:
                if lost is not None and peer in lost:
                    continue
                try:
                    works.append((peer, verb([tensor], peer, tag)))
                except RuntimeError as error:
                    if lost is None:
                        raise Lost(peer, str(error)) from None
                    lost.add(peer)
        return works

    def wait(self, work: Any) -> None:
        work.wait(_FOREVER)

    def close(self) -> None:
        """Close all connections; a worker that waits on one of them gets an error. gloo does that when a wait of its own expires: on a
        connection that is still there, so each is tried."""
        self.closed = True
        for peer in (q for q in range(self.size) if q != self.rank):
            with contextlib.suppress(RuntimeError):
                self._group.recv([torch.empty(1)], peer, _NEVER).wait(timedelta(milliseconds=1))

    # --- Before anything is sent -----------------------------------------------------------------------------------------

    def _meet(self, where: str, failed: str) -> None:
        self.store.set(f"{where}/{self.rank}", "1")
        everyone = [f"{where}/{q}" for q in range(self.size)]
        if self._abandoned is None:
            self._wait(where, everyone, failed)
            return
        while not self.store.check(everyone):
            if self._abandoned():
                raise RuntimeError("this group is not wanted any more")
            time.sleep(0.01)

    def agree(self, signature: dict[str, str]) -> None:
        """All processes have the same signature, or all of them get an error that says what differs and where."""
        self._agreements += 1
        at = f"agreement/{self._agreements}"
        if self.rank == 0:
            self.store.set(f"{at}/signature", json.dumps(signature))
        self._wait(at, [f"{at}/signature"], "did not say how it is set up")
        first: dict[str, str] = json.loads(self.store.get(f"{at}/signature"))
        keys = dict.fromkeys([*first, *signature])
        differ = next((key for key in keys if first.get(key) != signature.get(key)), None)
        mine = {} if differ is None else {"key": differ, "value": signature.get(differ, "missing")}
        self.store.set(f"{at}/difference/{self.rank}", json.dumps(mine))
        if self.rank == 0:
            names = [f"{at}/difference/{q}" for q in range(self.size)]
            self._wait(at, names, "did not compare its set-up with rank 0's")
            self.store.set(f"{at}/verdict", _verdict(first, [json.loads(self.store.get(name)) for name in names]))
        self._wait(at, [f"{at}/verdict"], "did not say whether all are set up alike")
        verdict = self.store.get(f"{at}/verdict").decode()
        if verdict:
            raise self._failure(at, verdict, list(range(self.size)), final=True)

    def _wait(self, at: str, keys: list[str], what: str) -> None:
        """Wait for keys; the k-th is rank k's to set. If they can't come, every rank that waits raises the same error: one that has
        waited for too long, or sees that another has ended, tells the others."""
        deadline, pause = time.monotonic() + self.timeout, 0.002
        try:
            while not self.store.check(keys):
                end = self._start.end() if self._start is not None else ""
                if self._has(f"{at}/failed"):
                    raise self._failure(at, "", self._arrived(keys))
                if end and not self.store.check(keys):  # it may have ended because all was said
                    raise self._failure(at, f"{end} before training began", self._arrived(keys))
                if time.monotonic() > deadline and not self.store.check(keys):
                    missing = [q for q in range(len(keys)) if q not in self._arrived(keys)]
                    raise self._failure(
                        at,
                        f"rank {', '.join(map(str, missing))} of {self.size} {what} within {self.timeout:g} s; "
                        "is it running, and does it make the same models in the same order?",
                        self._arrived(keys),
                    )
                time.sleep(pause)
                pause = min(2 * pause, 0.1)
        except RuntimeError as error:
            raise GossamerError(f"rank {self.rank}: the store that joins the workers is gone: {error}") from None

    def _arrived(self, keys: list[str]) -> list[int]:
        return [q for q, key in enumerate(keys) if self._has(key)]

    def _failure(self, at: str, why: str, waiting: list[int], final: bool = False) -> GossamerError:
        """The error to raise, with the same reason on all ranks: the first that was given. Rank 0's process may hold the store, so it
        leaves after the ranks that are ``waiting`` have read it."""
        with contextlib.suppress(RuntimeError):
            why = self.store.compare_set(f"{at}/failed", "", why).decode() or why
            self.store.set(f"{at}/read/{self.rank}", "1")
            if self._start is not None:
                self._start.failed(why, final)
            elif self.rank == 0:
                deadline = time.monotonic() + _READ
                while time.monotonic() < deadline and not all(self._has(f"{at}/read/{q}") for q in waiting):
                    time.sleep(0.01)
        return GossamerError(f"rank {self.rank}: {why}")

    def _has(self, key: str) -> bool:
        try:
            return bool(self.store.check([key]))
        except RuntimeError:
            return False

    # --- What one is waiting for, for the others to see -------------------------------------------------------------------

    def say(self, status: dict[str, Any]) -> None:
        with contextlib.suppress(RuntimeError, Silent):  # only ever used to make a message better
            self._status.ask(lambda store: store.set(f"status/{self.rank}", json.dumps(status)), _STATUS)

    def heard(self, rank: int) -> dict[str, Any]:
        key = f"status/{rank}"
        try:
            said = self._status.ask(lambda store: store.get(key) if store.check([key]) else b"", _STATUS)
        except (RuntimeError, Silent):
            return {}
        return json.loads(said) if said else {}

    def ask(self, question: Callable[[Any], Answer], timeout: float) -> Answer:
        """``question(store)``, by a thread: see :class:`StoreClient`."""
        self._connected()
        return self._status.ask(question, timeout)

    def _connected(self) -> Any:
        if self.store is None:
            raise Silent("the connections to the store were given back")
        return self.store

    def discard(self) -> None:
        """Give back its threads and descriptors. No operation is under way."""
        self._status.close()
        self.closed, self._group, self.store, self._start = True, None, None, None


class Alone(Link):
    """Of one who has not joined yet."""

    alone = True

    def _meet(self, where: str, failed: str) -> None:
        pass

    def _open(self) -> Any:
        return None

    def post(self, outgoing: Sequence[Message], incoming: Sequence[Message], lost: set[int] | None = None) -> Works:
        assert not outgoing
        assert not incoming
        return []


class BatchLink(Link):
    """Between GPUs: a group of torch.distributed with batched sends and receives, on NCCL's streams.

    Tags do not exist there; sends and receives between two ranks match in order. Written to the documentation and tried over
    gloo only: we have no GPU to test on.
    """

    def _open(self) -> Any:
        # What is small (checkpoints' steps, profiles) is on the CPU there as well.
        group = dist.new_group(backend="cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
        if self.streams:  # the first call on an NCCL group must have all ranks in it
            dist.all_reduce(torch.zeros(1, device=torch.device("cuda", torch.cuda.current_device())), group=group)
        return group

    @property
    def streams(self) -> bool:
        return torch.cuda.is_available()

    def wait(self, work: Any) -> None:
        work.wait()

    def post(self, outgoing: Sequence[Message], incoming: Sequence[Message], lost: set[int] | None = None) -> Works:
        ops = [dist.P2POp(dist.irecv, m.tensor, m.peer, self._group) for m in incoming]
        ops += [dist.P2POp(dist.isend, m.tensor, m.peer, self._group) for m in outgoing]
        peer = (incoming or outgoing)[0].peer if ops else -1
        return [(peer, work) for work in dist.batch_isend_irecv(ops)] if ops else []


def _verdict(first: dict[str, str], differences: list[dict[str, str]]) -> str:
    """Empty, or what differs first from rank 0, and on which ranks."""
    key = next((d["key"] for d in differences if d), None)
    if key is None:
        return ""
    who: dict[str, list[int]] = {first.get(key, "missing"): []}
    for rank, d in enumerate(differences):
        if not d or d["key"] == key:
            who.setdefault(d["value"] if d else first.get(key, "missing"), []).append(rank)
    shown = "; ".join(f"{value} on rank{'s' * (len(ranks) > 1)} {_ranks(ranks)}" for value, ranks in who.items())
    return f"{key} differs between ranks: {shown}"


def _ranks(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
