"""The store of a job, as a launcher sees it.

The store may be on another host, and that host may be silent: then a request does not return for minutes. So one thread makes all
requests, in order, and the launcher's own loop goes on: output, signals, ends of workers. Answers are called back in that loop.
"""

from __future__ import annotations

import queue
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

from gossamer.errors import GossamerError
from gossamer.members import store as keys

SILENT_SECONDS = 15.0  # without a sign of life, another launcher is gone
_CONNECT_SECONDS = 60.0
_DONE = "done"
_T = TypeVar("_T")


@dataclass(frozen=True)
class Place:
    """What the workers of a launcher get in one generation. ``seats``: rank and ticket of each of them."""

    generation: int
    address: str
    workers: int
    workers_per_host: int
    seats: list[tuple[int, int]]


@dataclass(frozen=True)
class News:
    """One look at the store. ``launchers_run``: other launchers need the store. ``workers_run``: other hosts have workers that train.
    ``alone``: which worker trains without others, if that has happened."""

    asked: float
    launchers_run: bool
    workers_run: bool
    generation: int
    start_failed: str
    start_refused: bool
    joined: frozenset[int]
    alone: str


@dataclass(frozen=True)
class Plan:
    """What is done about a worker that has failed.

    ``kind``: ``alone`` (start it again, with this ticket), ``all`` (start all workers of the job again), or ``none``.
    """

    kind: str
    ticket: int = -1


class LauncherStore:
    """``first``: this launcher opens the store, at ``address``; the others connect to it. ``nodes`` hosts begin the job. ``wake()`` is
    called from the thread when there is an answer."""

    def __init__(self, address: str, first: bool, nodes: int, wake: Callable[[], object]) -> None:
        self.host, _, port = address.rpartition(":")
        self.first, self._port, self._nodes, self._wake = first, int(port), nodes, wake
        self._generation = 0
        self._signs: dict[int, tuple[str, float]] = {}  # of each other launcher the last sign of life, and when it came
        self._signed = 0
        self._gone = False
        self._requests: queue.SimpleQueue[tuple[Callable[[], Any], Callable[[Any], object]] | None] = queue.SimpleQueue()
        self._answers: deque[tuple[Callable[[Any], object], Any]] = deque()
        self._asked: deque[float] = deque()  # when the requests that have no answer yet were made
        self._thread = threading.Thread(target=self._run, name="gossamer-launcher-store", daemon=True)
        self._thread.start()
        self.address: str = self.ask(self._open)

    # --- In the launcher's loop -------------------------------------------------------------------------------------------

    def do(self, request: Callable[[], _T], then: Callable[[_T | None], object] = lambda _: None) -> None:
        """``then`` gets the answer, or None if the store is gone."""
        self._asked.append(time.monotonic())
        self._requests.put((request, then))

    def ask(self, request: Callable[[], _T]) -> _T:
        """Wait for the answer, before the loop begins. Ctrl-C works meanwhile."""
        answers: list[Any] = []
        self.do(lambda: _result(request), answers.append)
        while not answers:
            self._thread.join(0.01)
            self.deliver()
        if isinstance(answers[0], GossamerError):
            raise answers[0]
        return answers[0]

    def deliver(self) -> None:
        while self._answers:
            then, answer = self._answers.popleft()
            self._asked.popleft()
            then(answer)

    def silent(self) -> bool:
        return bool(self._asked) and time.monotonic() - self._asked[0] > SILENT_SECONDS

    def close(self, seconds: float) -> None:
        """Say what is left to say; no longer than this."""
        self.do(lambda: self._job.set(f"{keys.LAUNCHERS}/{self._number}", _DONE))
        self._requests.put(None)
        self._thread.join(seconds)

    # --- In the thread: the stores ------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while (entry := self._requests.get()) is not None:
            request, then = entry
            answer = None
            try:
                answer = None if self._gone else request()
            except (RuntimeError, GossamerError):
                self._gone = True  # it is on another host
            self._answers.append((then, answer))
            self._wake()

    def _open(self) -> str:
        if not self.first:
            self._job = self._now = self._connect(self._port, "there is no job at")
            self._number = self._job.add(keys.LAUNCHERS, 1)
            return f"{self.host}:{self._port}"
        self._number = 0
        self._job, port = self._listen(self._port)
        self._now = self._job
        self._job.set(keys.GENERATION, "0")
        return f"{self.host}:{port}"

    def _connect(self, port: int, failed: str) -> Any:
        try:
            return dist.TCPStore(
                self.host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=_CONNECT_SECONDS)
            )
        except RuntimeError as error:
            raise GossamerError(f"{failed} {self.host}:{port}: {str(error).splitlines()[0]}") from None

    def _listen(self, port: int) -> tuple[Any, int]:
        listener = socket.socket()
        try:
            # Bound by us: left to itself the store listens on all interfaces.
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((self.host, port))
            listener.listen(1024)
        except OSError as error:
            raise GossamerError(f"the store can't listen on {self.host}:{port}: {error.strerror}") from None
        port = listener.getsockname()[1]
        store = dist.TCPStore(
            self.host,
            port,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=_CONNECT_SECONDS),
            master_listen_fd=listener.detach(),
        )
        return store, port

    def enter(self, node: int | None, workers: int) -> Place:
        """Seats in the generation that the job is in now. ``node``: which host this is, or None for workers that join."""
        generation = int(self._job.get(keys.GENERATION))
        address = self._later_store(generation) if generation else self.address
        if node is None:  # how many there were at the start follows from the store
            size, per_host = (int(self._now.get(f"gossamer/{what}")) for what in ("workers", "workers-per-host"))
            tickets = [self._now.add(keys.TICKETS, 1) - 1 for _ in range(workers)]
            return Place(generation, address, size, per_host, [(ticket, ticket) for ticket in tickets])
        if self.first:
            self._now.set("gossamer/workers", str(workers * self._nodes))
            self._now.set("gossamer/workers-per-host", str(workers))
            self._now.add(keys.TICKETS, workers * self._nodes)
        ranks = range(node * workers, (node + 1) * workers)
        return Place(generation, address, workers * self._nodes, workers, [(rank, rank) for rank in ranks])

    def _later_store(self, generation: int) -> str:
        key = f"{keys.STORES}/{generation}"
        if self.first:
            self._now, port = self._listen(0)
            self._job.set(key, str(port))
        else:
            self._job.wait([key], timedelta(seconds=_CONNECT_SECONDS))
            port = int(self._job.get(key))
            self._now = self._connect(port, "the store of the job, which was started again, is not at")
        self._generation = generation
        return f"{self.host}:{port}"

    # --- In the thread: requests ----------------------------------------------------------------------------------------------

    def look(self, training: int, joining: Iterable[int]) -> News:
        """Say how many workers train here, and see what there is to know. ``joining``: tickets of those that have not joined yet."""
        asked = time.monotonic()
        self._signed += 1
        self._job.set(f"{keys.LAUNCHERS}/{self._number}", f"{self._signed} {training}")
        launchers_run, workers_run = self._others()
        failed = self._now.check([keys.START_FAILED]) and not self._now.add(keys.BEGAN, 0)
        return News(
            asked,
            launchers_run,
            workers_run,
            int(self._job.get(keys.GENERATION)),
            self._now.get(keys.START_FAILED).decode() if failed else "",
            self._now.check([keys.START_REFUSED]),
            frozenset(ticket for ticket in joining if self._now.check([f"{keys.TRAINS}/{ticket}"])),
            self._now.get(keys.ALONE).decode() if self._now.check([keys.ALONE]) else "",
        )

    def _others(self) -> tuple[bool, bool]:
        """Whether other launchers run, and whether these have workers that train. A host that has not come yet may have some."""
        now, count = time.monotonic(), self._job.add(keys.LAUNCHERS, 0)
        launchers, workers = False, count + 1 < self._nodes
        for number in (k for k in range(count + 1) if k != self._number):
            key = f"{keys.LAUNCHERS}/{number}"
            value = self._job.get(key).decode() if self._job.check([key]) else ""
            if number not in self._signs or self._signs[number][0] != value:
                self._signs[number] = (value, now)
            if value != _DONE and now - self._signs[number][1] < SILENT_SECONDS:
                launchers = True
                workers = workers or not value.endswith(" 0")
        return launchers, workers

    def tell(self, ticket: int, why: str) -> None:
        """The other workers hear here first that a process has ended."""
        while self._now.check([f"{keys.SUCCESSOR}/{ticket}"]):
            ticket = int(self._now.get(f"{keys.SUCCESSOR}/{ticket}"))
        self._now.set(f"{keys.ENDED}/{ticket}", why)
        self._now.add(keys.ENDS, 1)

    def plan(self, ticket: int, why: str, others_train: bool, may_start_all: bool) -> Plan:
        """What to do about a worker that has failed and may be started again.

        - It had not wrapped a model: the others have not met it, and do not hear of its end. It gets the same seat again, as long as
          another worker runs.
        - It had wrapped one, and training has begun: it is started again to join, as long as another worker trains.
        - It had wrapped one, and no worker has begun to train: there is nothing to join, so all workers are started again. If the workers
          do not fit together (``START_REFUSED``), that would be in vain.
        - All workers have diverged (``DIVERGED``): there is nothing to join.
        """
        if self._now.check([keys.DIVERGED]):
            self.tell(ticket, why)
            return Plan("none")
        began = self._now.add(keys.BEGAN, 0) > 0
        others_train = others_train or self._others()[1]
        if not self._now.check([f"{keys.WRAPPED}/{ticket}"]) and (began or not self._now.check([keys.START_FAILED])):
            if others_train:
                return Plan("alone", ticket)
        elif not began and may_start_all and not self._now.check([keys.START_REFUSED]):
            self.start_all()
            return Plan("all")
        self.tell(ticket, why)
        return Plan("alone", self._now.add(keys.TICKETS, 1) - 1) if began and others_train else Plan("none")

    def start_all(self) -> None:
        """All launchers see the number rise, end their workers, and start them again."""
        self._job.compare_set(keys.GENERATION, str(self._generation), str(self._generation + 1))


def _result(request: Callable[[], _T]) -> _T | GossamerError:
    try:
        return request()
    except GossamerError as error:
        return error
