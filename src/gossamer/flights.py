"""Rows on their way, and the thread that waits for them.

gloo's own ``wait(timeout)`` closes all pairs of the process when it expires. So a thread does the waiting without a timeout, and the
process that needs the rows waits for the thread, with a clock of its own: it can say who is late, see what the other one is doing,
and give up.
"""

from __future__ import annotations

import contextlib
import queue
import re
import threading
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch

from gossamer.errors import GossamerError
from gossamer.links import Message, Tag

if TYPE_CHECKING:
    from gossamer.exchange import Exchange

_LOOK = 2.0  # seconds of waiting after which we say so, and look what the other one is doing
_WARN = 30.0  # seconds of waiting after which the user is told

Works = list[tuple[int, Any]]
Stage = Callable[[], Works]


@dataclass
class Traffic:
    """Counted since the start: bytes, and seconds. ``exposed``: the process stood still for it; ``transfer``: from the start
    of each flight to its last byte."""

    sent: int = 0
    received: int = 0
    exposed: float = 0.0
    transfer: float = 0.0
    flights: int = 0

    @property
    def hidden(self) -> float:
        """The share of the transfer time during which the process computed."""
        return 1 - self.exposed / self.transfer if self.transfer else 1.0


class Flight:
    """Rows on their way. ``wait()`` before what was sent is changed, and before what was received is read."""

    def __init__(self, exchange: Exchange, what: str, tag: Tag) -> None:
        self.exchange, self.what, self.tag = exchange, what, tag
        self.waiter: Waiter | None = None
        self.done = threading.Event()
        self.error: BaseException | None = None
        self.peer = -1  # whom we are waiting for
        self.work: Any = None  # and for what
        self.began = time.perf_counter()
        self.ended = 0.0
        self.event: Any = None  # on a GPU: what the stream waits for
        self.stages: list[Stage] = []
        self.kept: list[Message] = []  # tensors that must live until all is done
        self.submitted = False
        self.counted = False

    def run(self) -> None:
        """In the communication thread."""
        try:
            for stage in self.stages:
                for peer, work in reversed(stage()):  # the last one first: the others are there by then, one wake-up for all
                    self.peer, self.work = peer, work
                    work.wait()
        except Exception as error:
            self.peer = getattr(error, "peer", self.peer)
            self.error = error
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
            self._wait(began)
        if self.error is not None:
            raise self.failure(str(self.error).strip().splitlines()[0]) from None
        if not self.counted:
            self.counted = True
            traffic = self.exchange.traffic
            traffic.exposed += time.perf_counter() - began
            traffic.transfer += self.ended - self.began
            traffic.flights += 1

    def _wait(self, began: float) -> None:
        link, said, warned = self.exchange.link, False, False
        while not self.done.wait(_LOOK if not said else 1.0):
            waited = time.perf_counter() - began
            if self.peer < 0 and self.waiter and (ahead := self.waiter.current) is not None:
                self.peer = ahead.peer  # not begun: it waits for what was started before it, and so for that one's peer
            link.say({"in": self.what, "number": self.tag.number, "for": self.peer})
            said = True
            other = link.heard(self.peer)
            if other.get("for") == link.rank and other.get("in") != self.what:
                raise self.failure(
                    f"they wait for each other: rank {self.peer} is {_where(other)}. "
                    "Everything that all workers take part in (step, consensus, mean) must be called by all, in the same order"
                )
            doing = f"it is {_where(other)} and waits for rank {other['for']}" if other else "nothing is known of it"
            if waited >= link.timeout:
                raise self.failure(f"nothing came within {link.timeout:g} s; {doing}")
            if waited >= _WARN and not warned:
                warned = True
                warnings.warn(
                    f"rank {link.rank} has waited {waited:.0f} s for rank {self.peer} {self._where()}; {doing}", stacklevel=3
                )
        if said:
            link.say({})

    def failure(self, reason: str) -> GossamerError:
        self.exchange.failed = True
        reason = re.sub(r"^\[\S+\] |\. This is typically.*", "", reason)  # gloo's source line and its advice
        return GossamerError(f"rank {self.exchange.link.rank} lost rank {self.peer} {self._where()}: {reason}")

    def _where(self) -> str:
        return _where({"in": self.what, "number": self.tag.number})


def _where(status: dict[str, Any]) -> str:
    return f"at step {status['number']}" if status["in"] == "step" else f"in {status['in']} (collective {status['number']})"


class Waiter:
    """A thread that waits for flights, in the order in which they were started, and posts their later stages."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.current: Flight | None = None
        self._flights: queue.SimpleQueue[Flight | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def take(self, flight: Flight) -> None:
        if self._thread is None:
            # A daemon: a process must be able to end while it still waits for one that hangs.
            self._thread = threading.Thread(target=self._wait, name=f"gossamer-{self.name}", daemon=True)
            self._thread.start()
        self._flights.put(flight)

    def _wait(self) -> None:
        while (flight := self._flights.get()) is not None:
            self.current = flight
            flight.run()
            self.current = None
            del flight  # and with it the tensors that it kept

    def end(self) -> None:
        if self._thread is None:
            return
        self._flights.put(None)
        deadline = time.monotonic() + 5
        while self._thread.is_alive() and time.monotonic() < deadline:
            current = self.current
            work = current.work if current else None
            if work is not None:
                with contextlib.suppress(RuntimeError):
                    work.wait(timedelta(milliseconds=1))  # expires, which closes all pairs and so wakes the thread
            self._thread.join(0.01)
        self._thread = None
