"""Workers that are away for a while in one process's simulation: which takes part in which step, and which gives its state to which.

The rules are those between real workers (``roster.py``). Who is away takes no part at all; the graph is that of the living, in the order
of their numbers; who comes back takes over the state of a living one. What real workers need a few steps to agree on happens at once here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from gossamer.errors import GossamerError
from gossamer.members.roster import Proposal, Roster


@dataclass(frozen=True)
class Outage:
    """``worker`` is away from ``at`` until ``back``, in epochs since the beginning. None: it never comes back."""

    worker: int
    at: float
    back: float | None = None


class Attendance:
    """Who takes part in which step. Outages are rounded to whole steps, and last one step at least."""

    def __init__(self, n: int, outages: Sequence[Outage], steps_per_epoch: int) -> None:
        self.n = n
        self._worker = np.array([o.worker for o in outages], dtype=np.int64)
        self._start = np.array([round(o.at * steps_per_epoch) for o in outages], dtype=np.float64)
        backs = [np.inf if o.back is None else round(o.back * steps_per_epoch) for o in outages]
        self._end = np.maximum(np.array(backs, dtype=np.float64), self._start + 1)
        if any(not 0 <= o.worker < n for o in outages):
            raise GossamerError(f"there is no worker {max(o.worker for o in outages)} to fail; n={n}, so they are 0 to {n - 1}")
        edges = {*self._start, *self._end} - {np.inf}
        self.turns = frozenset(int(step) for step in edges)  # before these steps a worker leaves or comes back
        for step in sorted(self.turns):
            if not (self._there(step - 1) & self._there(step)).any():
                raise GossamerError(
                    f"failures: at step {step} ({steps_per_epoch} steps are an epoch) no worker of n={n} is left that could go on; "
                    "let at least one live"
                )

    def members(self, step: int) -> tuple[int, ...]:
        return tuple(int(worker) for worker in self._there(step).nonzero()[0])

    def _there(self, step: int) -> np.ndarray:
        there = np.ones(self.n, dtype=bool)
        there[self._worker[(self._start <= step) & (step < self._end)]] = False
        return there


def donors(before: tuple[int, ...], after: tuple[int, ...]) -> dict[int, int]:
    """Of each who comes back, the one whose state it takes over: by the same rule as between real workers."""
    roster = Roster({}, before, proposal=Proposal(1, after))
    return {newcomer: roster.donor(newcomer) for newcomer in roster.newcomers()}
