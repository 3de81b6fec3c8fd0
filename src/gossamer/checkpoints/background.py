"""Checkpoints that a thread writes from a copy, while training goes on. What the workers tell each other about them is in the store, where
the thread looks for it: so no step waits for another worker."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from gossamer.errors import GossamerError
from gossamer.transport.exchange import Exchange
from gossamer.transport.store_client import Silent

_IDLE_PRIORITY = 19  # as nice has it
_SHORTEST_SECONDS, _LONGEST_SECONDS = 0.01, 1.0  # between two looks for what the others have said
_ANSWER_SECONDS = 10.0  # after which the store is gone, for this purpose


class Writer:
    """One file at a time. Its thread is no daemon: a process that ends, or is interrupted by Ctrl-C, finishes its file."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._problem: GossamerError | None = None
        self._copies: dict[str, Tensor] = {}  # kept from one save to the next: fresh memory would take longer than copying
        self._last: tuple[object, int, int, int] = (None, -1, 0, 0)  # of the last save: see key()
        self._awaited = threading.Event()
        self._deadline: float | None = None  # once it is awaited; None: it does not wait for others

    def copy(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """In the memory of the copy before, if nothing is being written."""
        assert self._thread is None
        for key, tensor in tensors.items():
            before = self._copies.get(key)
            if before is None or before.shape != tensor.shape or before.dtype != tensor.dtype:
                self._copies[key] = torch.empty(tensor.shape, dtype=tensor.dtype)
            self._copies[key].copy_(tensor.detach())
        self._copies = {key: self._copies[key] for key in tensors}
        return self._copies

    def key(self, link: object, step: int) -> str:
        """Of the save that comes: new for each on these connections, and the same on all workers, newcomers included. A job may go back to
        an earlier step, and a step may be saved twice."""
        of, last, again, back = self._last
        if link is not of:
            last, again, back = -1, 0, 0
        again, back = again + 1 if step == last else 0, back + (step < last)
        self._last = link, step, again, back
        return f"{back}/{step}/{again}"

    def start(self, write: Callable[[], object]) -> None:
        def work() -> None:
            if sys.platform == "linux":  # there a thread has a priority of its own
                with contextlib.suppress(OSError):
                    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _IDLE_PRIORITY)
            try:
                write()
            except GossamerError as error:
                self._problem = error
            except Exception as error:
                self._problem = GossamerError(f"a checkpoint in the background can't be written: {error}")
            if self._problem is not None:
                print(f"gossamer: {self._problem}", flush=True)

        self._awaited.clear()
        self._thread = threading.Thread(target=work, name="gossamer checkpoint")
        self._thread.start()

    def pause(self, seconds: float) -> bool:
        """In the thread: that long, or until it is awaited. Whether to go on waiting for others; TimeoutError if they are too late."""
        if not self._awaited.wait(seconds):
            return threading.main_thread().is_alive()  # otherwise the process ends
        if self._deadline is not None and time.monotonic() > self._deadline:
            raise TimeoutError
        time.sleep(_SHORTEST_SECONDS)
        return self._deadline is not None

    def finish(self, timeout: float | None = None) -> GossamerError | None:
        """As :meth:`wait`. Returns what went wrong, once."""
        self.wait(timeout)
        problem, self._problem = self._problem, None
        return problem

    def wait(self, timeout: float | None = None) -> None:
        """For what is being written, and up to ``timeout`` seconds for what the others say (None: don't)."""
        if self._thread is not None and self._thread is not threading.current_thread():
            self._deadline = None if timeout is None else time.monotonic() + timeout
            self._awaited.set()
            self._thread.join()
            self._thread = None


def release(writer: Writer, exchange: Exchange) -> None:
    """Of a model that is gone: its writer still needs the connections. (The writer's own thread may be the one that frees the model.)"""
    writer.wait()
    exchange.drop()


class Commit:
    """Of one save: each worker says in the store whether it has written its file. ``key``: the same on all workers, new for each save."""

    def __init__(self, exchange: Exchange, key: str) -> None:
        self._link, self._guard, self._workers = exchange.link, exchange.guard, exchange.living
        self._key = f"saved/{key}"

    def say(self, written: bool) -> None:
        key, said = self._at(self._link.rank), "written" if written else "failed"
        with contextlib.suppress(RuntimeError, Silent):
            self._link.ask(lambda store: store.set(key, said), _ANSWER_SECONDS)

    def heard(self, pause: Callable[[float], bool]) -> bool:
        """Wait for the others; ``pause`` waits, and says whether to go on. Returns whether all have written, as far as can be known: of
        workers that are gone, or if the store is, that is not known. A worker that could not write is an error on all, unless the others
        go on without it."""
        seconds = _SHORTEST_SECONDS
        while True:
            losses = self._guard.losses(self._link) if self._guard is not None else None
            if losses is not None and losses.evicted:
                return False
            awaited = [q for q in self._workers if losses is None or q not in losses.gone]
            keys = [self._at(q) for q in awaited]
            try:
                said = self._link.ask(functools.partial(_values, keys=keys), _ANSWER_SECONDS)
            except (RuntimeError, Silent):
                return self._link.store is not None  # otherwise its model is gone: the others may go on
            if said is not None:
                break
            try:
                if not pause(seconds):
                    return False
            except TimeoutError:
                if late := self._late(awaited):
                    raise GossamerError(late) from None
            seconds = min(2 * seconds, _LONGEST_SECONDS)
        failed = [self._link.names[q] for q, word in zip(awaited, said, strict=True) if word != b"written"]
        if failed and self._guard is None:
            raise not_written(failed)
        return not failed and len(awaited) == len(self._workers)

    def _late(self, awaited: Iterable[int]) -> str:
        """Empty if the last word has just come."""
        silent = []
        with contextlib.suppress(RuntimeError, Silent):
            silent = [q for q in awaited if not self._link.ask(functools.partial(_values, keys=[self._at(q)]), _ANSWER_SECONDS)]
        ranks = ", ".join(str(self._link.names[q]) for q in silent)
        said = f"rank {ranks} did not say within {self._link.timeout:g} s that it has saved; save() is called by all workers"
        return said if silent else ""

    def _at(self, place: int) -> str:
        return f"{self._key}/{place}"


def _values(store: Any, keys: list[str]) -> list[bytes] | None:
    """Once all are there."""
    return store.multi_get(keys) if store.check(keys) else None


def not_written(ranks: Iterable[int]) -> GossamerError:
    shown = ", ".join(map(str, ranks))
    return GossamerError(f"what rank {shown} saves was not written (that worker says why); what was there before is kept")
