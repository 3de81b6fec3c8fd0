"""auto, the library's default: gradients of all in each step, as DDP averages them; in 8 bits where the network is waited for.

A trial decides: some steps in float32, as many in 8 bits with error feedback. A mean takes as long as it takes the worker that waits least:
the others wait for it too. All workers know what each has measured, so all decide the same, for the same step.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from gossamer import graphs
from gossamer.graphs import Graph
from gossamer.methods.allreduce import AllReduce
from gossamer.methods.base import Method
from gossamer.methods.policies.base import Policy
from gossamer.schedules.base import SCHEDULES, Moment, Schedule

EXACT, COARSE = AllReduce(), AllReduce(wire="8bits", feedback=True)
_FIRST_STEP = 10  # of the first trial: before it, workers compile, connect and fill caches
_LATER = 10  # times as many steps are done when the next trial begins: a network may change
_STEPS = 8  # of a trial, on each wire
_WORTH = 0.05  # of a step: what 8 bits must save


class Auto(Policy):
    """Trains as DDP does: in float32 the same, in 8 bits up to noise that is 0 on the average, and made good in the next step."""

    alone = True

    def __init__(self, n: int) -> None:
        super().__init__(n)
        self.chosen: bool | None = None  # whether gradients travel in 8 bits, but for trials; None: no trial has decided yet
        self.coarse = False  # whether they do in this step
        self.trial = _FIRST_STEP  # the step in which the next one begins
        self.means: list[float] = []  # of a trial, step by step: seconds that this worker has spent on the mean
        self.steps: list[float] = []  # and on the whole step
        self._complete = graphs.complete(n)

    def methods(self, chosen: Method | None = None) -> tuple[Method, ...]:
        return EXACT, COARSE

    def method(self, chosen: Method | None = None) -> Method:
        return COARSE if self.coarse else EXACT

    def first(self) -> Graph:
        return self._complete

    def decide(self, now: Moment) -> tuple[Graph, str]:
        phase = now.step - self.trial
        self.coarse = phase >= _STEPS if self.n > 1 and 0 <= phase < 2 * _STEPS else bool(self.chosen)
        return self._complete, "gradients of all in each step, as DDP averages them"

    def times(self, step: int) -> bool:
        return self.n > 1 and step >= self.trial

    def timed(self, step: int, seconds: float, mean: float) -> Sequence[float]:
        phase = step - self.trial
        for seen, new in ((self.means, mean), (self.steps, seconds)):
            seen += [0.0] * (min(phase, 2 * _STEPS) - len(seen))  # of steps in which it was not there
            seen += [new] if phase < 2 * _STEPS else []
        return (*self.means, *self.steps) if phase >= 2 * _STEPS - 1 else ()

    def agree(self, step: int, everyone: Sequence[Sequence[float]]) -> str:
        columns = [[seconds for seconds in column if seconds] for column in zip(*everyone, strict=True)]
        exact, coarse = ([min(column) for column in columns[k : k + _STEPS] if column] for k in (0, _STEPS))
        steps = [statistics.median(column) for column in columns[2 * _STEPS : 3 * _STEPS] if column]
        measured, before = bool(exact and coarse and steps), self.chosen
        self.trial, self.means, self.steps = (_LATER if measured else 1) * (step + 1), [], []
        if not measured:
            return ""
        slow, fast, whole = (1e3 * statistics.median(seconds) for seconds in (exact, coarse, steps))
        self.chosen = slow - fast > _WORTH * whole
        if self.chosen == before:
            return ""
        wire = "in 8 bits, with error feedback," if self.chosen else "in float32, as with DDP,"
        said = (
            f"gradients of {self.n} workers travel {wire} from step {step + 1} on: of a step of {whole:.3g} ms their mean takes "
            f"{slow:.3g} ms in float32 and {fast:.3g} ms in 8 bits (graph='auto')"
        )
        self.note(step + 1, self._complete.name, said)
        return said

    def sized(self, n: int) -> Schedule:
        return Auto(n)

    def succeed(self, other: Schedule) -> None:
        if isinstance(other, Auto):
            for key in (*self._KEPT, "changes"):
                setattr(self, key, getattr(other, key))

    def describe(self) -> str:
        return "auto"

    _KEPT = ("chosen", "coarse", "trial", "means", "steps")


SCHEDULES.makers["auto"] = Auto
