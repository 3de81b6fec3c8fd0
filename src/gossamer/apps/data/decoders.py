"""Processes that decode images for us: started when first needed, ended with their owner, left alone by Ctrl-C."""

from __future__ import annotations

import contextlib
import json
import queue
import subprocess
import sys
import threading
import weakref
from collections.abc import Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from gossamer.errors import GossamerError

_PROGRAM = Path(__file__).with_name("decoder.py")


@dataclass(frozen=True)
class Job:
    """One image: its file, and the seed of its random part (None: the centre)."""

    path: str
    seed: int | None


class Decoders:
    """``workers`` processes. Results depend on the jobs alone, not on who does them."""

    def __init__(self, workers: int) -> None:
        if workers < 1:
            raise GossamerError(f"workers={workers} is out of range; at least one process decodes images")
        if find_spec("PIL") is None:
            raise GossamerError(
                "reading images needs Pillow, which is not installed; get it with: pip install 'gossamer[images]'"
            )
        self.workers = workers
        self._started: _Pool | None = None
        self._lock = threading.Lock()

    def decode(self, jobs: Sequence[Job], size: int) -> np.ndarray:
        """uint8 ``[jobs, 3, size, size]``."""
        out = np.empty((len(jobs), 3, size, size), dtype=np.uint8)
        with self._lock:
            if self._started is None:
                self._started = _Pool(self.workers)
                self._end = weakref.finalize(self, _Pool.close, self._started)
            pool = self._started
        futures = [pool.threads.submit(pool.one, job, size, out[k]) for k, job in enumerate(jobs)]
        try:
            wait(futures, return_when=FIRST_EXCEPTION)
        finally:  # on Ctrl-C or an error: what has not begun never will, and what has is waited for, so that pipes stay in step
            for future in futures:
                future.cancel()
            wait(futures)
        for future in futures:
            if not future.cancelled():
                future.result()
        return out

    def close(self) -> None:
        """End the processes; the next call starts new ones."""
        with self._lock:
            if self._started is not None:
                self._started = None
                self._end()


class _Pool:
    """A thread per process, which does nothing but wait for its answers."""

    def __init__(self, workers: int) -> None:
        self.threads = ThreadPoolExecutor(workers, thread_name_prefix="gossamer-images")
        self.free: queue.SimpleQueue[subprocess.Popen[bytes]] = queue.SimpleQueue()
        for _ in range(workers):
            self.free.put(_start())

    def one(self, job: Job, size: int, out: np.ndarray) -> None:
        worker = self.free.get()
        try:
            good, answer = _ask(worker, {"path": job.path, "size": size, "seed": job.seed})
        except (OSError, EOFError):
            code = worker.wait()
            worker = _start()
            raise GossamerError(f"{job.path}: the process that was decoding it ended by itself (exit code {code})") from None
        finally:
            self.free.put(worker)
        if not good:
            raise GossamerError(f"{job.path} can't be decoded: {answer.decode(errors='replace')}; a whole JPEG was expected")
        out[:] = np.frombuffer(answer, dtype=np.uint8).reshape(size, size, 3).transpose(2, 0, 1)

    def close(self) -> None:
        self.threads.shutdown(wait=True, cancel_futures=True)
        with contextlib.suppress(queue.Empty):
            while True:
                worker = self.free.get_nowait()
                for pipe in (worker.stdin, worker.stdout):  # the end of its input is its end
                    assert pipe is not None
                    with contextlib.suppress(OSError):
                        pipe.close()
                worker.wait()


def _start() -> subprocess.Popen[bytes]:
    # -P: its folder, ours, must not be where it imports from.
    command = [sys.executable, "-P", str(_PROGRAM)]
    # A group of its own: Ctrl-C is for the owner, who ends it by closing its input.
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, process_group=0)


def _ask(worker: subprocess.Popen[bytes], request: dict[str, object]) -> tuple[bool, bytes]:
    from gossamer.apps.data.decoder import HEADER  # here, because it imports Pillow

    assert worker.stdin is not None
    worker.stdin.write(json.dumps(request).encode() + b"\n")
    worker.stdin.flush()
    good, length = HEADER.unpack(_exactly(worker, HEADER.size))
    return good, _exactly(worker, length)


def _exactly(worker: subprocess.Popen[bytes], count: int) -> bytes:
    assert worker.stdout is not None
    got = worker.stdout.read(count)
    if len(got) < count:
        raise EOFError
    return got
