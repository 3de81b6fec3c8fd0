"""Slurm as a ``concurrent.futures.Executor``, by submitit: calls that come together are one job array."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future, InvalidStateError
from pathlib import Path
from typing import Any

from gossamer.errors import GossamerError
from gossamer.integrations import needs

with needs("submitit", extra="slurm"):
    import submitit

_LOOK = 1.0  # seconds between two looks at all jobs
_TIMEOUTS = 1_000_000  # after which submitit does not queue a job again


class SlurmExecutor(Executor):
    """``folder``: for submitit's files, seen by all nodes. ``cluster``: ``"slurm"``, or ``"local"``, submitit's processes on this machine.
    ``options``: of submitit's ``update_parameters``. A job that is preempted, or out of time, is queued again: a call must know how to go
    on from what it has left behind."""

    def __init__(self, folder: Path, cluster: str = "slurm", **options: Any) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        folder.chmod(0o700)  # submitit unpickles what is in it
        self._slurm = submitit.AutoExecutor(folder, cluster=cluster, slurm_max_num_timeout=_TIMEOUTS)
        self._slurm.update_parameters(**options)
        self._calls: list[tuple[_Job, tuple[Any, ...]]] = []
        self._jobs: list[_Job] = []
        self._lock, self._end = threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def submit(self, call: Callable[..., Any], /, *arguments: Any, **more: Any) -> Future[Any]:
        job = _Job()
        with self._lock:
            self._calls.append((job, (_Again(call), *arguments)))
        return job

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Jobs that are still there are cancelled."""
        self._end.set()
        self._thread.join()
        for job in self._jobs:
            job.cancel()

    def _watch(self) -> None:
        while not self._end.wait(_LOOK):
            with self._lock:
                calls, self._calls = [c for c in self._calls if not c[0].cancelled()], []
            if calls:
                self._send(calls)
            for job in self._jobs:
                with contextlib.suppress(OSError):  # the folder, or Slurm's commands: the next look may see more
                    job.look()
            self._jobs = [job for job in self._jobs if not job.done()]

    def _send(self, calls: list[tuple[_Job, tuple[Any, ...]]]) -> None:
        try:
            with self._slurm.batch():
                sent = [self._slurm.submit(*arguments) for _, arguments in calls]
        except Exception as error:  # such as a partition that Slurm does not know
            line = (str(error).strip().splitlines() or [type(error).__name__])[0]
            for job, _ in calls:
                job.fail(GossamerError(f"Slurm takes no jobs: {line}"))
            return
        for (job, _), job.there in zip(calls, sent, strict=True):
            self._jobs.append(job)


class _Again:
    """A call that is made anew when Slurm takes its node away."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self.call = call

    def __call__(self, *arguments: Any) -> Any:
        return self.call(*arguments)

    def checkpoint(self, *arguments: Any) -> Any:
        return submitit.helpers.DelayedSubmission(self, *arguments)


class _Job(Future):
    there: Any = None  # submitit's job

    def look(self) -> None:
        if self.done() or not self.there.done():
            return
        try:
            answer = self.there.result()
        except Exception as error:
            self.fail(error)
        else:
            with contextlib.suppress(InvalidStateError):  # cancelled just now
                self.set_result(answer)

    def fail(self, error: Exception) -> None:
        with contextlib.suppress(InvalidStateError):
            self.set_exception(error)

    def cancel(self) -> bool:
        cancelled = super().cancel()
        if cancelled and self.there is not None:
            self.there.cancel(check=False)  # it may have ended just now
        return cancelled
