"""What is seen of training in a person's own loop: a profile every so many steps, and after each step its costs, for a logger."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from gossamer.errors import GossamerError
from gossamer.methods import Policy
from gossamer.rows import profile
from gossamer.rows.profile import Profile
from gossamer.transport.exchange import Exchange
from gossamer.transport.spans import Trace

if TYPE_CHECKING:
    from gossamer.parallel.driver import Driver

Log = Callable[[dict[str, float | str], int], object]
LOOKS_APART = 100  # steps between two profiles, if there is a logger and nothing else was said


class Journal:
    """``every``: steps between two profiles; 0: none. ``log``: called after each step on the worker that leads."""

    def __init__(self) -> None:
        self.every, self.on_profile, self.log = 0, None, None  # type: int, Callable[[Profile], object] | None, Log | None
        self.profiles: list[Profile] = []
        self._seen: dict[str, float] = {}  # at this step's look
        self._graph, self._method, self._began = "", "", (0.0, 0, 0)
        self._ended = time.perf_counter()

    def attend(self, every: int | None, on_profile: Callable[[Profile], object] | None, log: Log | None) -> None:
        self.log, self.on_profile, self.every = log, on_profile, every or 0
        if log is not None and every is None:
            self.every, self.on_profile = LOOKS_APART, on_profile or (lambda _: None)  # the logger has them; no list grows

    # --- The moments of a step --------------------------------------------------------------------------------------------

    def begin(self, driver: Driver) -> None:
        if self.log is not None:
            self._began = _traffic(driver)

    def look(self, driver: Driver) -> None:
        """Just before averaging."""
        if not self.every or driver.steps % self.every:
            return
        before = _traffic(driver)
        received = driver.mixer.exchange.traffic.received if driver.mixer.exchange is not None else 0
        seen = profile.take(driver.flat, driver.steps, driver.epoch, received, driver.mixer)
        self._seen = seen.signals()
        driver.signals |= self._seen
        self._began = _sum(self._began, _difference(_traffic(driver), before))  # what a look costs is not the method's
        if self.on_profile is not None:
            self.on_profile(seen)
        else:
            self.profiles.append(seen)

    def end(self, driver: Driver) -> None:
        """After the update. ``driver.steps`` is still this step's number."""
        if self.log is None:
            return
        now, seen, self._seen = time.perf_counter(), self._seen, {}
        seconds, self._ended = now - self._ended, now
        step, mixer = driver.now, driver.mixer
        if mixer.rows.start:
            return  # another worker leads
        waited, sent, received = _difference(_traffic(driver), self._began)
        numbers: dict[str, float | str] = {
            "step_ms": 1e3 * seconds,
            "exposed_wait_ms": 1e3 * waited,
            "bytes_sent": sent,
            "bytes_received": received,
            "members": mixer.n,
            "connections": step.round.degree,
            **seen,
            **step.notes,
        }
        if (level := getattr(driver.current_schedule, "level", None)) is not None:
            numbers["level"] = level
        if step.graph.name != self._graph:
            self._graph = numbers["graph"] = step.graph.name
        if isinstance(driver.current_schedule, Policy) and (method := driver.method.describe()) != self._method:
            self._method = numbers["method"] = method
        self.log({f"gossamer/{key}": value for key, value in numbers.items()}, driver.steps)


@contextlib.contextmanager
def traced(exchange: Exchange | None, rank: int, folder: Path) -> Iterator[None]:
    """In this block, what travels goes to ``folder/rank-K.json``."""
    if exchange is not None and exchange.link.streams:
        raise GossamerError("trace() sees transfers between CPUs; on a GPU they are in the stream: use torch.profiler")
    trace = Trace(rank)
    if exchange is not None:
        exchange.trace = trace
    try:
        yield
    finally:
        if exchange is not None:
            exchange.trace = None
        trace.write(folder)


def _traffic(driver: Driver) -> tuple[float, int, int]:
    exchange = driver.mixer.exchange
    return (0.0, 0, 0) if exchange is None else (exchange.traffic.exposed, exchange.traffic.sent, exchange.traffic.received)


def _difference(a: tuple[float, int, int], b: tuple[float, int, int]) -> tuple[float, int, int]:
    return a[0] - b[0], a[1] - b[1], a[2] - b[2]


def _sum(a: tuple[float, int, int], b: tuple[float, int, int]) -> tuple[float, int, int]:
    return a[0] + b[0], a[1] + b[1], a[2] + b[2]
