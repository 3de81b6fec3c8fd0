"""Who takes part. Today a worker can leave: it has no more data, while others have.

All who stay must change to the graph without it at the same step, and in a sparse graph they drift apart by several steps. So
they agree once per change, through the store, and nothing is asked per step:

1. Who has no more data says so, and soon afterwards writes down a decision: these leave, or, if all have said so, the end.
   The first decision of each number counts.
2. A thread of every worker looks for decisions. It reports the step s that its worker is in; the worker goes on, but begins no
   step beyond s + LEAD until it knows more. (A thread, because the worker may be waiting for a neighbour that is at its limit.)
3. When all have reported, the change happens before step max(s) + LEAD + 1, which nobody can have begun.

Those who leave take part in the exchange, without training, until then.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from gossamer.errors import GossamerError
from gossamer.transport.link import Link

LEAD = 8  # steps that a worker may go on without knowing when the change happens
_LOOK = 0.05  # seconds between two looks at the store
_GRACE = 0.3  # seconds (and two steps) that are given to the others to finish as well


@dataclass(frozen=True)
class Change:
    """Before ``step`` begins, ``living`` take over."""

    step: int
    living: tuple[int, ...]


class Leaving:
    """Of one stretch of training with uneven data. Every worker makes one at the same step."""

    def __init__(self, link: Link, stretch: int, step: int) -> None:
        self._link = link
        self._prefix = f"uneven/{stretch}"
        self.living = tuple(range(link.size))
        self._number = 0  # of the next decision
        self._step, self._step_began, self._step_seconds = step, time.monotonic(), 0.0
        self._limit: int | None = None  # the last step that may begin before the change is known
        self._change: Change | None = None
        self._lock = threading.Condition()
        self._ended = False
        self._error: Exception | None = None
        self._watcher = threading.Thread(target=self._watch, name="gossamer-membership", daemon=True)
        self._watcher.start()

    # --- In the training loop --------------------------------------------------------------------------------------------

    def before(self, step: int) -> Change | None:
        """To be called before a step begins. Returns the change that happens now, if one does."""
        with self._lock:
            now = time.monotonic()
            if step > self._step:
                self._step_seconds, self._step_began = now - self._step_began, now
            self._step = step
            if self._limit is not None and step > self._limit:
                self._wait_for_change(step)
            change = self._change
            if change is None or step < change.step:
                return None
            self.living, self._change, self._limit = change.living, None, None
            self._number += 1
            return change

    def _wait_for_change(self, step: int) -> None:
        """With the lock held."""
        deadline = time.monotonic() + self._link.timeout
        while self._change is None:
            if self._error is not None:
                raise GossamerError(f"rank {self._link.rank} lost the store while somebody left, at step {step}: {self._error}")
            if not self._lock.wait(1.0) and time.monotonic() > deadline:
                missing = [q for q in self.living if not self._has(f"{self._number}/at/{q}")]
                raise GossamerError(
                    f"rank {self._link.rank} at step {step}: rank {', '.join(map(str, missing))} did not answer within "
                    f"{self._link.timeout:g} s that somebody leaves; is it in model.uneven() too?"
                )

    def leave(self, step: int, exchange_only: Callable[[], int], changed: Callable[[Change], object]) -> None:
        """I have no more data; ``step`` would be my next. Returns when the others go on without me, or nobody goes on.
        ``exchange_only`` does one step without training and returns the number of the next."""
        me = self._link.rank
        self._set(f"done/{me}", True)
        while True:
            if self._decide() == "end":
                return
            with self._lock:
                self._wait_for_change(step)
            while (change := self.before(step)) is None:
                step = exchange_only()
            changed(change)
            if me not in self.living:
                return

    def _decide(self) -> Any:
        key = f"{self._prefix}/{self._number}/decision"
        patience = time.monotonic() + _GRACE + 2 * self._step_seconds
        while not self._store.check([key]):
            done = [q for q in self.living if self._has(f"done/{q}")]
            if len(done) == len(self.living):
                self._store.compare_set(key, "", json.dumps("end"))
            elif time.monotonic() > patience:
                self._store.compare_set(key, "", json.dumps(done))
            else:
                time.sleep(_LOOK)
        return json.loads(self._store.get(key))

    def wait_for_all(self, about: Any) -> list[Any]:
        """When nobody trains any more: what each worker said ``about`` itself. It takes as long as the others' data lasts."""
        self._set(f"gone/{self._link.rank}", about)
        everyone = [f"gone/{q}" for q in range(self._link.size)]
        while not all(self._has(key) for key in everyone):
            time.sleep(_LOOK)
        return [self._get(key) for key in everyone]

    def end(self) -> None:
        self._ended = True
        self._watcher.join()

    # --- In the thread that watches ---------------------------------------------------------------------------------------

    def _watch(self) -> None:
        try:
            while not self._ended:
                with self._lock:
                    number, idle = self._number, self._change is not None or self._link.rank not in self.living
                if not idle:
                    self._look(number)
                time.sleep(_LOOK)
        except RuntimeError as error:  # the store is gone
            with self._lock:
                self._error = error
                self._lock.notify_all()

    def _look(self, number: int) -> None:
        if not self._has(f"{number}/decision"):
            return
        leaving = self._get(f"{number}/decision")
        if leaving == "end":
            return
        if not self._has(f"{number}/at/{self._link.rank}"):
            with self._lock:
                step = self._step
                self._limit = step + LEAD
            self._set(f"{number}/at/{self._link.rank}", step)
        if all(self._has(f"{number}/at/{q}") for q in self.living):
            last = max(self._get(f"{number}/at/{q}") for q in self.living)
            with self._lock:  # only here is a change set, so it is still the same number
                self._change = Change(last + LEAD + 1, tuple(q for q in self.living if q not in leaving))
                self._lock.notify_all()

    @property
    def _store(self) -> Any:
        return self._link.store

    def _has(self, key: str) -> bool:
        return bool(self._store.check([f"{self._prefix}/{key}"]))

    def _get(self, key: str) -> Any:
        return json.loads(self._store.get(f"{self._prefix}/{key}"))

    def _set(self, key: str, value: Any) -> None:
        self._store.set(f"{self._prefix}/{key}", json.dumps(value))
