"""``gossamer launch``: workers on this host, and the store that outlives each of them.

Every process gets RANK, WORLD_SIZE, MASTER_ADDR … as from torchrun, so a script runs unchanged. What is different: the store lives here
and not in rank 0; when a worker dies the others go on (``survivors.py``) and hear of it from here at once; ``restart`` brings it back, to
join them. No process outlives the launcher: the kernel kills them with it.

What is started again after a worker has failed: see ``LauncherStore.plan``. A job is *lost before it began* if a worker has waited for the
others in vain (it says so, ``START_FAILED``) and no worker has begun to train: then the launcher ends the workers that still run.
Programs that never wrap a model never wait so, and a failed one of them leaves the others alone.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import IO, Any

from gossamer.errors import GossamerError
from gossamer.members.launch.process import WorkerProcess
from gossamer.members.launch.store import LauncherStore, News, Place, Plan

_BEAT_SECONDS = 1.0  # between two looks at the store, which are signs of life as well
_GRACE_SECONDS = 5.0  # between being asked to end and being killed
_OWN_END_SECONDS = 3.0  # for workers to end by themselves, if the job is lost before it began
_LAST_WORDS_SECONDS = 2.0  # for what is to be said to a store that is silent
_YOUNG_SECONDS, _BACKOFF_SECONDS, _MOST_BACKOFF_SECONDS = 10.0, 1.0, 30.0


@dataclass(frozen=True)
class Job:
    """``restart``: how many times each worker may be started again. ``address``: where the store listens (this host's, for several
    hosts); ``nodes`` and ``node``: how many hosts, and which this is. ``join``: these are new workers of a job that runs there.
    ``min_workers``: how many workers of this launcher must finish; half of them by default, rounded up."""

    command: tuple[str, ...]
    workers: int
    restart: int = 0
    evict_after: float = 10.0
    address: str = "127.0.0.1:0"
    nodes: int = 1
    node: int = 0
    join: bool = False
    min_workers: int | None = None

    def __post_init__(self) -> None:
        if sys.platform == "win32":
            raise GossamerError(
                "launch: needs Linux or macOS, whose signals and process groups it uses; on Windows use torchrun"
            )
        if self.workers < 1:
            raise GossamerError(f"-n {self.workers}: at least one worker")
        if not 0 <= self.node < self.nodes:
            raise GossamerError(f"--node {self.node} is out of range for --nodes {self.nodes}; hosts count from 0")
        if self.restart < 0:
            raise GossamerError(f"--restart {self.restart}: how many times a worker may be started again, so at least 0")
        if not self.evict_after >= 3:  # or it is not a number
            raise GossamerError(f"--evict-after {self.evict_after:g}: hearts beat once a second, so it is at least 3")
        if not 1 <= self.enough <= self.workers:
            raise GossamerError(
                f"--min-workers {self.enough} is out of range: from 1 to {self.workers}, the workers of this host"
            )
        host, _, port = self.address.rpartition(":")
        if not host or not (port.isascii() and port.isdigit()):
            raise GossamerError(f"--address {self.address!r} is not HOST:PORT")
        if int(port) > 65535:
            raise GossamerError(f"--address {self.address}: a port is at most 65535")
        if (self.nodes > 1 or self.join) and not int(port):
            raise GossamerError("several hosts need the address of the store: --address HOST:PORT, of the first host")

    @property
    def enough(self) -> int:
        return (self.workers + 1) // 2 if self.min_workers is None else self.min_workers


@dataclass
class Outcome:
    """``happened``: (seconds since the start, what). ``exit_code``: 0 if enough workers finished."""

    exit_code: int = 0
    happened: list[tuple[float, str]] = field(default_factory=list)
    finished: list[int] = field(default_factory=list)
    lost: list[int] = field(default_factory=list)


class Launcher:
    """One loop: output and ends of the workers, signals, restarts. What it asks the store is answered later (``store.py``)."""

    def __init__(self, job: Job, out: IO[str] | None = None) -> None:
        self.job, self.out = job, out or sys.stdout
        self.outcome = Outcome()
        self.began = time.monotonic()
        self._workers: dict[int, WorkerProcess] = {}  # by place: the last process of each
        self._tries = dict.fromkeys(range(job.workers), 0)
        self._due: list[tuple[float, Callable[[], object]]] = []  # restarts
        self._end_at = self._kill_at = float("inf")  # when the workers that run are asked to end, and killed
        self._ending = False
        self._stopping = 0  # signals to end that have come
        self._failure: int | None = None  # the exit code of the first worker that failed
        self._undecided = 0  # workers that have failed; the store has not answered what to do about them
        self._next: int | None = None  # the generation to be started when all workers have ended
        self._entering = False
        self._start_failed = False
        self._looking, self._looked, self._last_end = False, -_BEAT_SECONDS, self.began
        self._news: News | None = None
        self._selector = selectors.DefaultSelector()
        self._wake, self._waker = socket.socketpair()
        for end in (self._wake, self._waker):
            end.setblocking(False)
        self._store = LauncherStore(job.address, not (job.node or job.join), job.nodes, self._wake_up)
        self._place = self._store.ask(self._enter)
        if self._place is None:
            raise GossamerError(f"the store at {self._store.address} is gone")

    def _enter(self) -> Place:
        return self._store.enter(None if self.job.join else self.job.node, self.job.workers)

    def _wake_up(self) -> None:
        with contextlib.suppress(OSError):  # it is full, so the loop wakes up anyway; or over
            self._waker.send(b"\0")

    # --- The loop -----------------------------------------------------------------------------------------------------------

    def run(self) -> Outcome:
        self._selector.register(self._wake, selectors.EVENT_READ, lambda: self._wake.recv(4096))
        before = {which: signal.signal(which, self._signalled) for which in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
        before[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, lambda *_: None)
        old = signal.set_wakeup_fd(self._waker.fileno(), warn_on_full_buffer=False)
        try:
            self._start_all()
            while self._running or self._due or self._store_is_awaited() or self._store_is_needed():
                self._look()
                due = min([self._end_at, self._kill_at, *(when for when, _ in self._due)]) - time.monotonic()
                for key, _ in self._selector.select(max(0.0, min(_BEAT_SECONDS, due))):
                    key.data()
                self._store.deliver()
                self._reap()
                self._do_what_is_due()
        finally:
            for worker in self._running:
                worker.kill()
            self._store.close(_LAST_WORDS_SECONDS if not self._stopping else _LAST_WORDS_SECONDS / 2)
            signal.set_wakeup_fd(old)
            for which, handler in before.items():
                signal.signal(which, handler)
        return self._summed_up()

    @property
    def _running(self) -> list[WorkerProcess]:
        return [worker for worker in self._workers.values() if worker.runs]

    @property
    def _training(self) -> list[WorkerProcess]:
        """Those that can be joined: not the ones that wait to join."""
        return [worker for worker in self._running if worker.trains]

    def _store_is_awaited(self) -> bool:
        return not self._stopping and bool(self._undecided or self._next is not None) and not self._store.silent()

    def _store_is_needed(self) -> bool:
        """Whether other launchers need the store, which is here. Looked up after the last worker of this one has ended."""
        if self._stopping or not self._store.first:
            return False
        return self._news is None or self._news.asked <= self._last_end or self._news.launchers_run

    def _look(self) -> None:
        if self._looking or time.monotonic() - self._looked < _BEAT_SECONDS:
            return
        self._looking, self._looked = True, time.monotonic()
        training = len(self._training)
        joining = [worker.ticket for worker in self._workers.values() if not worker.trains]
        self._store.do(lambda: self._store.look(training, joining), self._heard)

    def _heard(self, news: News | None) -> None:
        self._looking = False
        if news is None:
            return
        before, self._news = self._news, news
        if news.alone and (before is None or news.alone != before.alone):
            self._note(news.alone)
        for worker in self._workers.values():
            if not worker.trains and worker.ticket in news.joined:
                worker.trains = True
                self._note(f"rank {worker.rank} has joined the others")
        if news.generation > self._place.generation:
            self._follow(news.generation)
        elif news.start_failed and not self._start_failed and self._next is None and not self._stopping:
            self._start_failed = True
            if self._may_start_all() and not news.start_refused:
                self._note(f"training could not begin: {news.start_failed}")
                self._store.do(self._store.start_all)
                self._follow(self._place.generation + 1)
            else:
                self._end_at = time.monotonic() + _OWN_END_SECONDS

    def _do_what_is_due(self) -> None:
        now = time.monotonic()
        due = [act for when, act in self._due if when <= now]
        self._due = [(when, act) for when, act in self._due if when > now]
        for act in due:
            act()
        if now >= self._end_at:
            if self._running and self._start_failed and self._next is None:
                ranks = ", ".join(str(worker.rank) for worker in self._running)
                self._note(f"training never began, and rank {ranks} still runs; it is ended")
            self._end_running(signal.SIGTERM)
        if now >= self._kill_at:
            self._kill_at = float("inf")
            for worker in self._running:
                worker.send(signal.SIGKILL)
        if self._next is not None and not (self._running or self._entering or self._stopping):
            self._entering = True
            self._due.append((now + self._pause(0, self._place_began), lambda: self._store.do(self._enter, self._entered)))

    def _end_running(self, which: int) -> None:
        """None of them is started again, unless all are."""
        self._ending, self._due = True, []
        self._end_at, self._kill_at = float("inf"), time.monotonic() + _GRACE_SECONDS
        for worker in self._running:
            worker.send(which)

    # --- Starts and ends ------------------------------------------------------------------------------------------------------

    def _start_all(self) -> None:
        self._place_began = time.monotonic()
        for place, (rank, ticket) in enumerate(self._place.seats):
            self._start(place, rank, ticket)

    def _start(self, place: int, rank: int, ticket: int) -> None:
        host, _, port = self._place.address.rpartition(":")
        everyone = self.job.workers * self.job.nodes
        env = os.environ | {
            "RANK": str(rank),
            "WORLD_SIZE": str(max(everyone, rank + 1)),
            "LOCAL_RANK": str(place),
            "LOCAL_WORLD_SIZE": str(self.job.workers),
            "MASTER_ADDR": host,
            "MASTER_PORT": port,
            "TORCHELASTIC_USE_AGENT_STORE": "True",  # the store is here, so rank 0 must not open one
            "TORCHELASTIC_RESTART_COUNT": str(self._place.generation),
            "TORCH_GLOO_LAZY_INIT": "1",  # the default group can be made again by a worker that comes back, alone
            "GOSSAMER_STORE": self._place.address,
            "GOSSAMER_GENERATION": str(self._place.generation),
            "GOSSAMER_TICKET": str(ticket),
            "GOSSAMER_WORKERS": str(self._place.workers),
            "GOSSAMER_WORKERS_PER_HOST": str(self._place.workers_per_host),
            "GOSSAMER_EVICT_AFTER": str(self.job.evict_after),
            "PYTHONUNBUFFERED": "1",
        }
        env.setdefault("OMP_NUM_THREADS", "1")
        worker = WorkerProcess(self.job.command, env, place, rank, ticket, trains=ticket < self._place.workers)
        self._workers[place] = worker
        self._selector.register(worker.pipe, selectors.EVENT_READ, lambda: self._read(worker))

    def _read(self, worker: WorkerProcess, last: bool = False) -> None:
        lines, more = worker.read(last)
        if (last or not more) and worker.pipe in self._selector.get_map():
            self._selector.unregister(worker.pipe)
        for line in lines:
            print(f"[{worker.rank}] {line}", file=self.out, flush=True)

    def _reap(self) -> None:
        for worker in self._running:
            if worker.ended():
                if self._ending:
                    worker.kill_children()
                self._read(worker, last=True)
                self._ended(worker)
                self._last_end, self._looked = time.monotonic(), -_BEAT_SECONDS  # look again at once

    def _ended(self, worker: WorkerProcess) -> None:
        why = worker.describe_end()
        if self._next is not None:
            return  # as all do, to start again
        if worker.code:
            self._note(f"rank {worker.rank} {why}")
            self._failure = self._failure or abs(worker.code)
        if not worker.code or self._ending or self._tries[worker.place] >= self.job.restart:
            self._store.do(lambda: self._store.tell(worker.ticket, why))
            return
        self._undecided += 1
        others, may = bool(self._training), self._may_start_all()
        self._store.do(
            lambda: self._store.plan(worker.ticket, why, others, may), lambda plan: self._decided(worker, plan or Plan("none"))
        )

    def _decided(self, worker: WorkerProcess, plan: Plan) -> None:
        self._undecided -= 1
        if plan.kind == "all":
            self._follow(self._place.generation + 1)
        elif plan.kind == "alone" and not self._ending:
            pause = self._pause(worker.place, worker.began)
            if pause:
                self._due.append((time.monotonic() + pause, lambda: self._start_late(worker, plan.ticket)))
            else:
                self._start_again(worker, plan.ticket)

    def _pause(self, place: int, began: float) -> float:
        """Seconds. What dies young, again and again, is not started over and over at once."""
        tries = self._tries[place]
        young = time.monotonic() - began < _YOUNG_SECONDS and tries
        return min(_BACKOFF_SECONDS * 2**tries, _MOST_BACKOFF_SECONDS) if young else 0.0

    def _start_late(self, worker: WorkerProcess, ticket: int) -> None:
        """After a pause: the other workers may have ended."""
        if self._training or (self._news is not None and self._news.workers_run):
            self._start_again(worker, ticket)
        elif ticket == worker.ticket:  # no worker has heard of its end
            self._store.do(lambda: self._store.tell(ticket, worker.describe_end()))

    def _start_again(self, worker: WorkerProcess, ticket: int) -> None:
        self._tries[worker.place] += 1
        self._note(f"rank {worker.rank} is started again")
        self._start(worker.place, worker.rank, ticket)

    # --- The whole job, again ---------------------------------------------------------------------------------------------------

    def _may_start_all(self) -> bool:
        return all(tries < self.job.restart for tries in self._tries.values())

    def _follow(self, generation: int) -> None:
        """All workers of the job start again. Here they end first."""
        if self._next is not None or self._stopping or generation <= self._place.generation:
            return
        if not self._may_start_all():
            self._note("the job starts again on other hosts; the restarts of this one are used up, so its workers end")
            self._place = replace(self._place, generation=generation)
        else:
            self._next = generation
            self._note("all workers are started again: there is no training that one of them could join")
        self._end_running(signal.SIGTERM)

    def _entered(self, place: Place | None) -> None:
        self._next, self._entering = None, False
        if place is None:
            self._note("the store is gone, so the workers can't be started again")
            return
        self._place, self._failure, self._start_failed = place, None, False
        self._ending, self._kill_at = False, float("inf")
        for k in self._tries:
            self._tries[k] += 1
        self._start_all()

    # --- Signals ------------------------------------------------------------------------------------------------------------

    def _signalled(self, which: int, _: Any) -> None:
        """Passed on; Ctrl-C and the like end the job, at the second time at once."""
        self._stopping += 1
        self._end_running(which if self._stopping == 1 else signal.SIGKILL)
        self.outcome.exit_code = 128 + which

    # --- The end ------------------------------------------------------------------------------------------------------------

    def _note(self, what: str) -> None:
        at = time.monotonic() - self.began
        self.outcome.happened.append((at, what))
        print(f"gossamer: {at:.1f} s: {what}", file=self.out, flush=True)

    def _summed_up(self) -> Outcome:
        outcome, job = self.outcome, self.job
        outcome.finished = sorted(worker.rank for worker in self._workers.values() if worker.code == 0)
        outcome.lost = sorted(worker.rank for worker in self._workers.values() if worker.code)
        said = f"finished: rank {', '.join(map(str, outcome.finished))}"
        if outcome.exit_code:
            said = f"ended with exit code {outcome.exit_code}"
        elif len(outcome.finished) < job.enough:
            outcome.exit_code = self._failure or 1
            said = (
                f"ended with exit code {outcome.exit_code}: {len(outcome.finished)} of {job.workers} workers finished, "
                f"and --min-workers is {job.enough}"
            )
        if outcome.happened:
            print("gossamer: what happened:", file=self.out)
            for at, what in outcome.happened:
                print(f"  {at:8.1f} s  {what}", file=self.out)
        lost = f"; lost: rank {', '.join(map(str, outcome.lost))}" if outcome.lost else ""
        if outcome.happened or outcome.exit_code:
            print(f"gossamer: {said}{lost}", file=self.out, flush=True)
        return outcome


def command_for(script: str, arguments: Sequence[str]) -> tuple[str, ...]:
    """A .py file is run by this Python; anything else is a program."""
    if script.endswith(".py"):
        if not os.path.isfile(script):
            raise GossamerError(f"there is no script {script}")
        return (sys.executable, script, *arguments)
    if script == "-m":
        return (sys.executable, "-m", *arguments)
    return (script, *arguments)
