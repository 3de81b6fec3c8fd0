"""Ways to average all, from every step to hardly ever: how far apart they let replicas drift, and what they cost.

A team of replicas that each take noisy steps drifts apart. Counting one step's drift as 1 (a mean square; steps add up, as independent
ones do), a Graph keeps them apart by some ``spread`` where they take their gradients. Of all ways that cost the same, only the one with
the least spread is worth anything: those make the frontier.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from gossamer import graphs
from gossamer.graphs import Graph
from gossamer.rounds import Mean, Round

_EVERY = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)  # steps between two means of all
_GAPS = (0, 1, 2, 4, 8)  # steps between two exchanges with one peer; 0: none


@dataclass(frozen=True)
class Level:
    """``cost``: per step, in rows or whatever :func:`frontier` was given."""

    graph: Graph
    spread: float
    cost: float

    @classmethod
    def of(cls, graph: Graph, cost: Callable[[Graph], float] | None = None) -> Level:
        return cls(graph, _spread(graph), cost(graph) if cost is not None else graph.cost(1 << 20) / (1 << 20))

    def apart(self, mean: int, steps: int) -> float:
        """How far apart replicas are ``steps`` after the mean in step ``mean``, before they are averaged again."""
        apart = 1.0
        for t in range(mean + 1, mean + steps):
            apart = _mixed(apart, self.graph.round(t)) + 1
        return apart


def frontier(n: int, cost: Callable[[Graph], float] | None = None) -> tuple[Level, ...]:
    """From the mean of all in every step to one in every 64, whatever no other way beats in both spread and cost. All of them
    have means of all: that is where all workers see the same. ``cost``: by default the rows that each worker receives per step."""
    if n == 1:
        return (Level(graphs.complete(1), 0.0, 0.0),)
    ways = [graphs.periodic(n, every=every, **({"gap": gap} if gap else {})) for every in _EVERY for gap in _GAPS if gap < every]
    kept: list[Level] = []
    for level in sorted((Level.of(way, cost) for way in ways), key=lambda level: (level.spread, level.cost)):
        if not kept or level.cost < kept[-1].cost * (1 - 1e-9):
            kept.append(level)
    return tuple(kept)


def _spread(graph: Graph) -> float:
    """In the long run; the last Round of a period is a mean, so one period is the long run."""
    apart, total = 0.0, 0.0
    for round_ in graph.rounds:
        apart = _mixed(apart + 1, round_)
        total += apart
    return total / graph.period


def _mixed(apart: float, round_: Round) -> float:
    """What a Round leaves of it: nothing, all, or, of two who are half and half, one half."""
    return 0.0 if isinstance(round_, Mean) else apart / 2 if round_.degree else apart
