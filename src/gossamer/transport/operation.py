"""Rows on their way, and the thread that waits for them.

gloo's own ``wait(timeout)`` closes all pairs of the process when it expires. So a thread does the waiting without a timeout, and the
process that needs the rows waits for the thread, with a clock of its own: it can say who is late, see what the other one is doing,
and give up.

With a :class:`Guard` (see ``members/survivors.py``) a peer that is lost ends nothing: ``lost`` says whose rows did not come whole.
"""

from __future__ import annotations

import contextlib
import math
import queue
import re
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol

import torch

from gossamer.errors import GossamerError
from gossamer.transport import waiting
from gossamer.transport.link import Link, Message, Tag, Works
from gossamer.transport.spans import span
from gossamer.transport.waiting import Losses

if TYPE_CHECKING:
    from gossamer.transport.exchange import Exchange

_LOOK = 2.0  # seconds of waiting after which we say so, and look what the other one is doing
_WARN = 30.0  # seconds of waiting after which the user is told
_GUARDED = 0.05  # seconds between two looks whether a peer was lost, while a worker waits
_GRACE = 0.2  # seconds for what may still come when a peer was lost of those that all need each other

Stage = Callable[[], Works]


class Guard(Protocol):
    """Knows who is lost. Ranks are those of the link."""

    def losses(self, link: Link) -> Losses:
        """Which of its ranks, and which connections."""

    def lose(self, link: Link, rank: int, why: str) -> None:
        """The connection to one of them broke."""

    def complete(
        self, what: str, timeout: float, fly: Callable[[Link, tuple[int, ...]], Any], acknowledged: bool = False
    ) -> bool:
        """A collective. ``fly(link, places)`` does one try, and says what came: 0, not all of it; 1, all of it here; 2, all of it
        everywhere. False if the store is gone: then no worker can say who lives."""

    def close(self, orderly: bool) -> None:
        """This worker leaves: it has finished, or ends with an error."""

    def hand_out(self) -> None:
        """While a collective is waited for, in which parameters do not change: a newcomer may want a copy of them, and the connections
        on which the collective is done again may wait for that."""

    def shut_out(self, timeout: float) -> bool:
        """After a operation: whether the others may have gone on without this worker before its rows had come. It asks the store if it was
        silent for so long that it can't know."""


@dataclass
class Traffic:
    """Counted since the start: bytes, and seconds. ``exposed``: the process stood still for it; ``transfer``: from the start
    of each operation to its last byte."""

    sent: int = 0
    received: int = 0
    exposed: float = 0.0
    transfer: float = 0.0
    flights: int = 0

    @property
    def hidden(self) -> float:
        """The share of the transfer time during which the process computed. On a GPU it is not known: only the stream sees the end."""
        if not self.transfer:
            return math.nan if self.flights else 1.0
        return 1 - self.exposed / self.transfer


class Operation:
    """Rows on their way. ``wait()`` before what was sent is changed, and before what was received is read.

    ``essential``: the peers without which all of it is in vain (slices: all members).
    """

    def __init__(self, exchange: Exchange, what: str, tag: Tag, essential: frozenset[int] = frozenset()) -> None:
        self.exchange, self.what, self.tag, self.essential = exchange, what, tag, essential
        self.link = exchange.link
        self.waiter: Waiter | None = None
        self.done = threading.Event()
        self.error: BaseException | None = None
        self.lost: set[int] = set()  # with a guard: whose rows did not come, or not whole
        self.dirty = False  # given up: what was received may still be written to
        self.peer = -1  # the one that is waited for
        self.work: Any = None  # and for what
        self.began = time.perf_counter()
        self.ended = 0.0
        self.event: Any = None  # on a GPU: what the stream waits for
        self.stages: deque[Stage] = deque()
        self.works: deque[tuple[int, Any]] = deque()  # of the stage that is under way
        self.skipped: Works = []  # of peers that are lost: kept, because gloo may still write to their tensors
        self.kept: list[Message] = []  # tensors that must live until all is done
        self.submitted = False
        self.counted = False
        self.loads: dict[str, dict[int, int]] = {}  # for a trace: bytes to and from each peer
        self.blocked: list[tuple[int, float, float]] = []  # and when the thread waited for which peer

    def load(self, sent: list[Message], received: list[Message]) -> None:
        for way, messages in (("to", sent), ("from", received)):
            sizes = self.loads.setdefault(way, {})
            for message in messages:
                sizes[message.peer] = sizes.get(message.peer, 0) + message.tensor.nbytes

    def run(self, lock: threading.Lock, mine: Callable[[], bool]) -> None:
        """In the communication thread, as long as it is the one: see :meth:`Waiter.replace`. It only waits without the lock, and does
        nothing more once another thread has taken its place."""
        guard = self.exchange.guard
        while True:
            work: tuple[int, Any] | None = None
            with lock:
                if not mine() or self.done.is_set():
                    return
                if not self.works and (self.in_vain or not self.stages):
                    self.land()
                    return
                if self.works:
                    work = self.works.pop()  # the last one first: the others are there by then, one wake-up for all
                    if work[0] in self.lost:
                        self.skipped.append(work)
                        continue
                    self.peer, self.work = work
                else:
                    stage = self.stages.popleft()
            try:
                if work is None:
                    posted = stage()
                    with lock:
                        self.works.extend(posted)
                else:
                    since = time.perf_counter()
                    self.link.wait(work[1])
                    if self.exchange.trace is not None:
                        self.blocked.append((work[0], since, time.perf_counter()))
            except Exception as error:
                with lock:
                    if not mine():
                        return
                    if work is None or guard is None or not isinstance(error, RuntimeError):
                        self.peer, self.error = getattr(error, "peer", self.peer), error
                        self.land()
                        return
                    self.lost.add(work[0])
                guard.lose(self.link, work[0], first_line(error))

    @property
    def in_vain(self) -> bool:
        """Whether a peer is lost without which all of it is worth nothing. Others may be lost too: of another group of the same Round."""
        return not self.lost.isdisjoint(self.essential)

    @property
    def peers(self) -> frozenset[int]:
        return frozenset(message.peer for message in self.kept)

    def land(self) -> None:
        self.work = None
        self.ended = time.perf_counter()
        self.done.set()

    def wait(self) -> None:
        began = time.perf_counter()
        if not self.submitted:
            self.exchange.submit(self)
        if self.event is not None:
            torch.cuda.current_stream().wait_event(self.event)
        elif not self.done.is_set():
            with span("gossamer::wait", f"{self.what} {self.tag.number}"):
                self._wait(began)
        if self.error is not None:
            raise self.failure(first_line(self.error)) from None
        guard = self.exchange.guard
        if guard is not None and guard.shut_out(self.link.timeout):
            self.lost |= self.peers  # what came may be torn
            if not self.link.closed:
                self.link.close()  # what is still being sent would be torn as well, once parameters change: no peer shall take it
        if not self.counted:
            self.counted = True
            traffic = self.exchange.traffic
            traffic.exposed += time.perf_counter() - began
            traffic.transfer += self.ended - self.began if self.ended else 0.0
            traffic.flights += 1
            if self.exchange.trace is not None:
                self.exchange.trace.add(self, began)

    def _wait(self, began: float) -> None:
        link, guard, said, warned = self.link, self.exchange.guard, False, False
        look, now = began + _LOOK, began
        while not self.done.wait(_GUARDED if guard is not None else max(0.0, look - now)):
            if guard is not None:
                self._give_up(guard)
                if self.tag.collective and not self.done.is_set():
                    guard.hand_out()
            now = time.perf_counter()
            if now < look:
                continue
            look, waited = now + 1.0, now - began
            if self.peer < 0 and self.waiter and (ahead := self.waiter.current) is not None:
                self.peer = ahead.peer  # not begun: it waits for what was started before it, and so for that one's peer
            link.say({"in": self.what, "number": self.tag.number, "for": self.peer})
            said = True
            other = link.heard(self.peer)
            if other.get("for") == link.rank and other.get("in") != self.what:
                raise self.failure(
                    f"they wait for each other: rank {self._name} is {_where(other)}. "
                    "Everything that all workers take part in (step, consensus, mean) must be called by all, in the same order. "
                    "A step() that one worker skips (a NaN check of its own, a GradScaler without gossip(scaler=…)) ends like this too: "
                    "decide with model.mean(…)"
                )
            doing = (
                f"it is {_where(other)} and waits for rank {link.names[other['for']]}" if other else "nothing is known of it"
            )
            if waited >= link.timeout:
                raise self.failure(f"nothing came within {link.timeout:g} s; {doing}")
            if waited >= _WARN and not warned:
                warned = True
                warnings.warn(
                    f"rank {link.names[link.rank]} has waited {waited:.0f} s for rank {self._name} {self._where()}; {doing}"
                    f"{self._circumstances()}",
                    stacklevel=3,
                )
        if said:
            link.say({})

    def _give_up(self, guard: Guard) -> None:
        """Stop waiting for peers that are lost."""
        waiter = self.waiter
        if waiter is None:
            return
        operation = waiter.current or self  # perhaps one before us
        losses = guard.losses(operation.link)
        overdue = operation.tag.collective and time.perf_counter() - operation.began > waiting.OVERDUE_SECONDS
        given_up = waiting.while_waiting(
            operation.essential, operation.peers, frozenset(operation.lost), operation.peer, losses, overdue
        )
        if given_up is None:
            return
        lost, in_vain = given_up
        if in_vain and operation.done.wait(_GRACE):
            return
        with waiter.lock:
            stuck = waiter.current is operation
            if operation.done.is_set() or not (in_vain or (stuck and operation.peer in lost)):
                return  # it has woken up by itself meanwhile
            operation.lost |= lost
            operation.dirty = True
            if in_vain:
                operation.land()
            self.exchange.limbo.append(operation)
            if stuck:
                waiter.replace()

    def failure(self, reason: str) -> GossamerError:
        self.exchange.failed = True
        reason = re.sub(r"^\[\S+\] |\. This is typically.*", "", reason)  # gloo's source line and its advice
        return GossamerError(f"rank {self.link.names[self.link.rank]} lost rank {self._name} {self._where()}: {reason}")

    def _circumstances(self) -> str:
        """For a report of a wait that should have ended."""
        guard, link, names = self.exchange.guard, self.link, self.link.names
        if guard is None:
            return ""
        gone = sorted(guard.losses(link).gone)
        ahead = self.waiter.current if self.waiter is not None else None
        behind = f", behind one {ahead._where()}" if ahead is not None and ahead is not self else ""
        return (
            f" (epoch {link.epoch}, workers {', '.join(str(names[q]) for q in self.exchange.living)}, "
            f"lost: {', '.join(str(names[q]) for q in gone) or 'none'}{behind})"
        )

    @property
    def _name(self) -> int:
        return self.link.names[self.peer] if self.peer >= 0 else -1

    def _where(self) -> str:
        return _where({"in": self.what, "number": self.tag.number})


def first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0]


def _where(status: dict[str, Any]) -> str:
    return f"at step {status['number']}" if status["in"] == "step" else f"in {status['in']} (collective {status['number']})"


class Waiter:
    """A thread that waits for operations, in the order in which they were started, and posts their later stages.

    ``lock``: which thread is the one, which operation it has, and what is left of that operation.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.lock = threading.Lock()
        self.current: Operation | None = None
        self._queue: queue.SimpleQueue[Operation | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._replaced: list[threading.Thread] = []

    def take(self, operation: Operation) -> None:
        self._queue.put(operation)
        if self._thread is None:
            self._begin(None)

    def _begin(self, first: Operation | None) -> None:
        # A daemon: a process must be able to end while it still waits for one that hangs.
        self._thread = threading.Thread(target=self._wait, args=(first,), name=f"gossamer-{self.name}", daemon=True)
        self._thread.start()

    def replace(self) -> None:
        """With the lock held, and only while the thread has a operation: it waits for one that is lost and does not wake up. Leave it
        to it, and go on with another. (A thread that waits for its next operation would take that, and do nothing with it.)"""
        assert self.current is not None
        if self._thread is not None:
            self._replaced.append(self._thread)
        self._begin(self.current)

    def _wait(self, operation: Operation | None) -> None:
        me = threading.current_thread()

        def mine() -> bool:
            return self._thread is me

        while True:
            if operation is None:
                operation = self._queue.get()
                if operation is None:
                    return
                with self.lock:
                    self.current = operation
            operation.run(self.lock, mine)
            with self.lock:
                if not mine():
                    return
                self.current = None
            operation = None  # and with it the tensors that it kept

    def end(self) -> None:
        if self._thread is None:
            return
        self._queue.put(None)
        deadline = time.monotonic() + 5
        while self._thread.is_alive() and time.monotonic() < deadline:
            current = self.current
            work = current.work if current else None
            if work is not None:
                with contextlib.suppress(RuntimeError):
                    work.wait(timedelta(milliseconds=1))  # expires, which closes all pairs and so wakes the thread
            self._thread.join(0.01)
        for thread in self._replaced:  # their links have been closed
            thread.join(max(0.5, deadline - time.monotonic()))
        self._thread = None
