"""``gossamer launch``: workers on this host, and the store that outlives each of them.

Every process gets RANK, WORLD_SIZE, MASTER_ADDR … as from torchrun, so a script runs unchanged. What is different: the store lives here
and not in rank 0; when a worker dies the others go on (``survival.py``) and hear of it from here at once; ``restart`` brings it back, to
join them. No process outlives the launcher: the kernel kills them with it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import IO, Any

import torch.distributed as dist

from gossamer.errors import GossamerError
from gossamer.seats import ENDS, LAUNCHERS, TICKETS, ended_key, successor_key

_LONGEST_LINE = 1 << 16
_BEAT, _SILENT = 1.0, 15.0  # seconds between two signs of life to other launchers; without one, it is gone
_DONE = "done"
_GRACE = 5.0  # seconds between being asked to end and being killed
_YOUNG, _BACKOFF = 10.0, 1.0  # seconds: whoever lived less than the one is started again after the other, longer each time


@dataclass(frozen=True)
class Job:
    """``restart``: how many times each worker may be started again. ``address``: where the store listens (this host's, for several
    hosts); ``nodes`` and ``node``: how many hosts, and which this is. ``join``: these are new workers of a job that runs there."""

    command: tuple[str, ...]
    workers: int
    restart: int = 0
    evict_after: float = 10.0
    address: str = "127.0.0.1:0"
    nodes: int = 1
    node: int = 0
    join: bool = False

    def __post_init__(self) -> None:
        if self.workers < 1:
            raise GossamerError(f"-n {self.workers}: at least one worker")
        if not 0 <= self.node < self.nodes:
            raise GossamerError(f"--node {self.node} is out of range for --nodes {self.nodes}; hosts count from 0")
        if self.evict_after < 3:
            raise GossamerError(f"--evict-after {self.evict_after:g}: hearts beat once a second, so it is at least 3")
        if (self.nodes > 1 or self.join) and self.address.endswith(":0"):
            raise GossamerError("several hosts need the address of the store: --address HOST:PORT, of the first host")


@dataclass
class _Worker:
    rank: int
    ticket: int
    process: subprocess.Popen[bytes]
    pipe: int
    text: bytes = b""
    tries: int = 0
    code: int | None = None
    began: float = field(default_factory=time.monotonic)


@dataclass
class Outcome:
    """``happened``: (seconds since the start, what). ``exit_code``: 0 if those who were left finished."""

    exit_code: int = 0
    happened: list[tuple[float, str]] = field(default_factory=list)
    finished: list[int] = field(default_factory=list)
    lost: list[int] = field(default_factory=list)


class Launcher:
    """One thread and one loop: output and ends of the workers, signals, and who is due to be started again."""

    def __init__(self, job: Job, out: IO[str] | None = None) -> None:
        self.job, self.out = job, out or sys.stdout
        self.workers: list[_Worker] = []
        self.outcome = Outcome()
        self.began = time.monotonic()
        self._due: list[tuple[float, Callable[[], object]]] = []
        self._stopping = 0
        self._selector = selectors.DefaultSelector()
        self._store, self._where = self._open_store()
        self._number = self._store.add(LAUNCHERS, 1) if job.node or job.join else 0  # 0 has the store
        self._beaten = 0.0
        self._others: dict[int, tuple[str, float]] = {}  # launchers: their last sign of life, and when it came

    # --- The store ------------------------------------------------------------------------------------------------------

    def _open_store(self) -> tuple[Any, str]:
        host, _, port = self.job.address.rpartition(":")
        if not host or not port.isdigit():
            raise GossamerError(f"--address {self.job.address!r} is not HOST:PORT")
        if self.job.node or self.job.join:
            try:
                return dist.TCPStore(host, int(port), is_master=False, wait_for_workers=False, timeout=timedelta(seconds=60)), (
                    f"{host}:{port}"
                )
            except RuntimeError as error:
                raise GossamerError(f"there is no job at {host}:{port}: {str(error).splitlines()[0]}") from None
        listener = socket.socket()
        try:
            # Bound by us: left to itself the store listens on all interfaces.
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((host, int(port)))
            listener.listen(1024)
        except OSError as error:
            raise GossamerError(f"the store can't listen on {host}:{port}: {error.strerror}") from None
        port = str(listener.getsockname()[1])
        store = dist.TCPStore(
            host,
            int(port),
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=60),
            master_listen_fd=listener.detach(),
        )
        store.add(TICKETS, self.job.workers * self.job.nodes)
        return store, f"{host}:{port}"

    def _beat(self, value: str) -> None:
        with contextlib.suppress(RuntimeError):  # the store is on another host, and gone
            if value == _DONE or time.monotonic() - self._beaten >= _BEAT:
                self._beaten = time.monotonic()
                self._store.set(f"{LAUNCHERS}/{self._number}", value)

    def _needed(self) -> bool:
        """Whether workers that others have started still need the store, which is here."""
        if self._stopping or self.job.node or self.job.join:
            return False
        now = time.monotonic()
        for number in range(1, self._store.add(LAUNCHERS, 0) + 1):
            key = f"{LAUNCHERS}/{number}"
            value = self._store.get(key).decode() if self._store.check([key]) else ""
            if number not in self._others or self._others[number][0] != value:
                self._others[number] = (value, now)
            if value != _DONE and now - self._others[number][1] < _SILENT:
                return True
        return False

    # --- Workers ----------------------------------------------------------------------------------------------------------

    def run(self) -> Outcome:
        wake, waker = socket.socketpair()
        wake.setblocking(False)
        waker.setblocking(False)
        self._selector.register(wake, selectors.EVENT_READ, lambda: wake.recv(4096))
        before = {which: signal.signal(which, self._signalled) for which in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
        before[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, lambda *_: None)
        old = signal.set_wakeup_fd(waker.fileno(), warn_on_full_buffer=False)
        try:
            for k in range(self.job.workers):
                if self.job.join:
                    ticket = self._store.add(TICKETS, 1) - 1
                    self._start(ticket, ticket, 0)
                else:
                    rank = self.job.node * self.job.workers + k
                    self._start(rank, rank, 0)
            while any(worker.code is None for worker in self.workers) or self._due or self._needed():
                self._beat(str(time.monotonic()))
                patience = min([_BEAT, *(when - time.monotonic() for when, _ in self._due)])
                for key, _ in self._selector.select(max(0.0, patience)):
                    key.data()
                self._reap()
                self._do_what_is_due()
        finally:
            for worker in self.workers:
                if worker.code is None:
                    worker.process.kill()
                    worker.process.wait()
            self._beat(_DONE)
            signal.set_wakeup_fd(old)
            for which, handler in before.items():
                signal.signal(which, handler)
        return self._summed_up()

    def _start(self, rank: int, ticket: int, tries: int) -> None:
        host, _, port = self._where.rpartition(":")
        everyone = self.job.workers * self.job.nodes
        env = os.environ | {
            "RANK": str(rank),
            "WORLD_SIZE": str(max(everyone, rank + 1)),
            "LOCAL_RANK": str(rank - self.job.node * self.job.workers if rank < everyone else 0),
            "LOCAL_WORLD_SIZE": str(self.job.workers),
            "MASTER_ADDR": host,
            "MASTER_PORT": port,
            "TORCHELASTIC_USE_AGENT_STORE": "True",  # the store is here, so rank 0 must not open one
            "TORCH_GLOO_LAZY_INIT": "1",  # the default group can be made again by a worker that comes back, alone
            "GOSSAMER_STORE": self._where,
            "GOSSAMER_TICKET": str(ticket),
            "GOSSAMER_WORKERS": self._at_the_start("workers", everyone),
            "GOSSAMER_WORKERS_PER_HOST": self._at_the_start("workers-per-host", self.job.workers),
            "GOSSAMER_EVICT_AFTER": str(self.job.evict_after),
            "PYTHONUNBUFFERED": "1",
        }
        env.setdefault("OMP_NUM_THREADS", "1")
        launcher = os.getpid()

        def die_with_launcher() -> None:
            ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
            if os.getppid() != launcher:
                os._exit(1)

        try:
            process = subprocess.Popen(
                self.job.command,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C comes from us, once
                preexec_fn=die_with_launcher,
            )
        except OSError as error:
            raise GossamerError(f"{self.job.command[0]} can't be started: {error.strerror}") from None
        assert process.stdout is not None
        pipe = process.stdout.fileno()
        os.set_blocking(pipe, False)
        worker = _Worker(rank, ticket, process, pipe, tries=tries)
        self.workers.append(worker)
        self._selector.register(pipe, selectors.EVENT_READ, lambda: self._read(worker))

    def _at_the_start(self, what: str, mine: int) -> str:
        """What it was for those who began the job, which those who join must know as well."""
        key = f"gossamer/{what}"
        if not self.job.join:
            self._store.set(key, str(mine))
            return str(mine)
        return self._store.get(key).decode()

    def _read(self, worker: _Worker, last: bool = False) -> None:
        while True:
            try:
                data = os.read(worker.pipe, 1 << 16)
            except BlockingIOError:
                break
            if not data:
                with contextlib.suppress(KeyError):
                    self._selector.unregister(worker.pipe)
                break
            worker.text += data
            if not last:
                break  # the others shall have their turn
        *lines, worker.text = worker.text.split(b"\n")
        if worker.text and (last or len(worker.text) > _LONGEST_LINE):
            lines.append(worker.text)
            worker.text = b""
        for line in lines:
            print(f"[{worker.rank}] {line.decode(errors='replace')}", file=self.out, flush=True)

    def _reap(self) -> None:
        for worker in self.workers:
            if worker.code is None and worker.process.poll() is not None:
                worker.code = worker.process.returncode
                self._tell(worker)
                self._read(worker, last=True)
                self._ended(worker)

    def _tell(self, worker: _Worker) -> None:
        """The others hear of it here first."""
        ticket, why = worker.ticket, _why(worker.code or 0)
        with contextlib.suppress(RuntimeError):  # the store is on another host, and gone
            while self._store.check([successor_key(ticket)]):
                ticket = int(self._store.get(successor_key(ticket)))
            self._store.set(ended_key(ticket), why)
            self._store.add(ENDS, 1)

    def _ended(self, worker: _Worker) -> None:
        if not worker.code:
            self.outcome.finished.append(worker.rank)
            return
        self._note(f"rank {worker.rank} {_why(worker.code)}")
        others = any(w.code is None for w in self.workers)
        if self._stopping or worker.tries >= self.job.restart or not (others or self.job.nodes > 1) or self.outcome.finished:
            return
        # One that dies young, again and again, is not started over and over at once.
        pause = min(_BACKOFF * 2**worker.tries, 30.0) if time.monotonic() - worker.began < _YOUNG and worker.tries else 0.0
        self._due.append((time.monotonic() + pause, lambda: self._again(worker)))

    def _again(self, worker: _Worker) -> None:
        if self._stopping or self.outcome.finished or not any(w.code is None for w in self.workers):
            return
        ticket = self._store.add(TICKETS, 1) - 1
        self._note(f"rank {worker.rank} is started again")
        self._start(worker.rank, ticket, worker.tries + 1)

    def _note(self, what: str) -> None:
        at = time.monotonic() - self.began
        self.outcome.happened.append((at, what))
        print(f"gossamer: {at:.1f} s: {what}", file=self.out, flush=True)

    # --- Signals ------------------------------------------------------------------------------------------------------------

    def _signalled(self, which: int, _: Any) -> None:
        """Passed on; Ctrl-C and the like end the job, at the second time at once."""
        self._stopping += 1
        for worker in self.workers:
            if worker.code is None:
                worker.process.send_signal(which if self._stopping == 1 else signal.SIGKILL)
        self._due.append((time.monotonic() + _GRACE, self._kill_all))
        self.outcome.exit_code = 128 + which

    def _kill_all(self) -> None:
        for worker in self.workers:
            if worker.code is None:
                worker.process.kill()

    def _do_what_is_due(self) -> None:
        now = time.monotonic()
        due = [act for when, act in self._due if when <= now]
        self._due = [(when, act) for when, act in self._due if when > now]
        if self._stopping and all(worker.code is not None for worker in self.workers):
            self._due = []
        for act in due:
            act()

    # --- The end ------------------------------------------------------------------------------------------------------------

    def _summed_up(self) -> Outcome:
        outcome = self.outcome
        last = {worker.rank: worker for worker in self.workers}
        outcome.lost = sorted(rank for rank, worker in last.items() if worker.code)
        if not outcome.exit_code and not outcome.finished:
            outcome.exit_code = next((abs(w.code) for w in self.workers if w.code), 1)
        if outcome.happened:
            print("gossamer: what happened:", file=self.out)
            for at, what in outcome.happened:
                print(f"  {at:8.1f} s  {what}", file=self.out)
        if outcome.exit_code:
            said = f"ended with exit code {outcome.exit_code}"
        else:
            said = f"finished: rank {', '.join(map(str, sorted(set(outcome.finished))))}"
        lost = f"; lost: rank {', '.join(map(str, outcome.lost))}" if outcome.lost else ""
        if outcome.happened or outcome.exit_code:
            print(f"gossamer: {said}{lost}", file=self.out, flush=True)
        return outcome


def _why(code: int) -> str:
    if code == 0:
        return "has finished"
    if code > 0:
        return f"ended with exit code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"


def command_for(script: str, arguments: Sequence[str]) -> tuple[str, ...]:
    """A .py file is run by this Python; anything else is a program."""
    if script.endswith(".py"):
        if not os.path.isfile(script):
            raise GossamerError(f"there is no script {script}")
        return (sys.executable, script, *arguments)
    if script == "-m":
        return (sys.executable, "-m", *arguments)
    return (script, *arguments)
