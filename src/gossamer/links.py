"""A Link is a process group of our own: who we are, who the others are, and messages between two of them.

Not the user's default group: their barriers live there, and one timeout would poison it. Point-to-point only, so a process that
dies takes its own pairs with it and no others. Every message carries the membership epoch and the step in its tag.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from gossamer.errors import GossamerError

_FOREVER = timedelta(days=7)  # gloo's own timeouts close all pairs of a process; we keep our own time (see exchange.py)
_opened = itertools.count()  # links are opened in the same order everywhere, so this number names one


class Lost(RuntimeError):
    """A peer's connection was closed before a message to or from it could be posted."""

    def __init__(self, peer: int, reason: str) -> None:
        super().__init__(reason)
        self.peer = peer


class Message(NamedTuple):
    peer: int
    tag: int
    tensor: Tensor


@dataclass(frozen=True)
class Tag:
    """31 bits, as gloo takes them: 4 of the epoch, 1 for the kind, 10 of the step or number of the collective, 16 for the part."""

    epoch: int
    collective: bool
    number: int

    PARTS = 1 << 16

    def part(self, k: int) -> int:
        if k >= self.PARTS:
            raise GossamerError(f"a step of more than {self.PARTS} messages between two workers; use a larger chunk")
        return (self.epoch % 16) << 27 | int(self.collective) << 26 | (self.number % 1024) << 16 | k


class Link:
    """Between processes on CPUs: gloo, started from the store that the default group was started with."""

    def __init__(self, store: Any, rank: int, size: int, timeout: float = 300.0, epoch: int = 0) -> None:
        self.rank, self.size, self.timeout, self.epoch = rank, size, timeout, epoch
        self.store = dist.PrefixStore(f"gossamer/{next(_opened)}/{epoch}", store)
        self._agreements = 0
        self._arrive()
        self._group = self._open()

    def _open(self) -> Any:
        return dist.ProcessGroupGloo(dist.PrefixStore("gloo", self.store), self.rank, self.size, _FOREVER)

    @property
    def streams(self) -> bool:
        """Whether waiting is done by the device's streams, not by the host."""
        return False

    def post(self, outgoing: Sequence[Message], incoming: Sequence[Message]) -> list[tuple[int, Any]]:
        """Start to send and to receive; returns ``(peer, work)`` pairs to wait for. The tensors must stay as they are."""
        works = []
        for verb, messages in ((self._group.recv, incoming), (self._group.send, outgoing)):
            for peer, tag, tensor in messages:
                try:
                    works.append((peer, verb([tensor], peer, tag)))
                except RuntimeError as error:
                    raise Lost(peer, str(error)) from None
        return works

    # --- Before anything is sent -----------------------------------------------------------------------------------------

    def _arrive(self) -> None:
        self.store.set(f"here/{self.rank}", "1")
        self._wait([f"here/{q}" for q in range(self.size)], "did not arrive")

    def agree(self, signature: dict[str, str]) -> None:
        """All processes have the same signature, or all of them get an error that says what differs and where."""
        self._agreements += 1
        at = f"agreement/{self._agreements}"
        if self.rank == 0:
            self.store.set(f"{at}/signature", json.dumps(signature))
        self._wait([f"{at}/signature"], "did not say how it is set up")
        first: dict[str, str] = json.loads(self.store.get(f"{at}/signature"))
        keys = dict.fromkeys([*first, *signature])
        differ = next((key for key in keys if first.get(key) != signature.get(key)), None)
        mine = {} if differ is None else {"key": differ, "value": signature.get(differ, "missing")}
        self.store.set(f"{at}/difference/{self.rank}", json.dumps(mine))
        if self.rank == 0:
            names = [f"{at}/difference/{q}" for q in range(self.size)]
            self._wait(names, "did not compare its set-up with rank 0's")
            self.store.set(f"{at}/verdict", _verdict(first, [json.loads(self.store.get(name)) for name in names]))
        self._wait([f"{at}/verdict"], "did not say whether all are set up alike")
        verdict = self.store.get(f"{at}/verdict").decode()
        if verdict:
            raise GossamerError(f"rank {self.rank}: {verdict}")

    def _wait(self, keys: list[str], what: str) -> None:
        """Wait for keys; the k-th is rank k's to set."""
        deadline = time.monotonic() + self.timeout
        try:
            self.store.wait(keys, timedelta(seconds=self.timeout))
        except RuntimeError as error:
            missing = [q for q, key in enumerate(keys) if not self._has(key)]
            if time.monotonic() < deadline - 0.5 or not missing:
                raise GossamerError(f"rank {self.rank}: the store that joins the workers is gone: {error}") from None
            raise GossamerError(
                f"rank {self.rank}: rank {', '.join(map(str, missing))} of {self.size} {what} within {self.timeout:g} s; "
                "is it running, and does it make the same models in the same order?"
            ) from None

    def _has(self, key: str) -> bool:
        try:
            return bool(self.store.check([key]))
        except RuntimeError:
            return False

    # --- What one is waiting for, for the others to see -------------------------------------------------------------------

    def say(self, status: dict[str, Any]) -> None:
        with contextlib.suppress(RuntimeError):  # only ever used to make a message better
            self.store.set(f"status/{self.rank}", json.dumps(status))

    def heard(self, rank: int) -> dict[str, Any]:
        try:
            return json.loads(self.store.get(f"status/{rank}")) if self._has(f"status/{rank}") else {}
        except RuntimeError:
            return {}


class BatchLink(Link):
    """Between GPUs: a group of torch.distributed with batched sends and receives, on NCCL's streams.

    Tags do not exist there; sends and receives between two ranks match in order. Written to the documentation and tried over
    gloo only: we have no GPU to test on.
    """

    def _open(self) -> Any:
        group = dist.new_group(backend="nccl" if torch.cuda.is_available() else "gloo")
        if self.streams:  # the first call on an NCCL group must have everyone in it
            dist.all_reduce(torch.zeros(1, device=torch.device("cuda", torch.cuda.current_device())), group=group)
        return group

    @property
    def streams(self) -> bool:
        return torch.cuda.is_available()

    def post(self, outgoing: Sequence[Message], incoming: Sequence[Message]) -> list[tuple[int, Any]]:
        ops = [dist.P2POp(dist.irecv, m.tensor, m.peer, self._group) for m in incoming]
        ops += [dist.P2POp(dist.isend, m.tensor, m.peer, self._group) for m in outgoing]
        peer = (incoming or outgoing)[0].peer if ops else -1
        return [(peer, work) for work in dist.batch_isend_irecv(ops)] if ops else []


def open_link(device: torch.device, timeout: float = 300.0) -> Link | None:
    """The link of this process, or None if it is alone. ``torch.distributed`` must have been started, as for DDP."""
    if not dist.is_available() or not dist.is_initialized():
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            raise GossamerError(
                f"WORLD_SIZE is {os.environ['WORLD_SIZE']}, but torch.distributed is not started; "
                "call torch.distributed.init_process_group() first, as for DistributedDataParallel"
            )
        return None
    if dist.get_world_size() == 1:
        return None
    kind = BatchLink if device.type == "cuda" else Link
    store = dist.distributed_c10d._get_default_store()
    return kind(store, dist.get_rank(), dist.get_world_size(), timeout)


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
