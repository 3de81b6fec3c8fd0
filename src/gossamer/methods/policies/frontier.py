"""Ways to average all, from every step to hardly ever: how far apart they let replicas drift, and what they cost.

Replicas that each take noisy steps drift apart. Here each one drifts in a direction of its own, by 1 in each step: with momentum, steps
resemble each other, so that is nearer to the truth than a random walk, and it never promises too much. A Graph keeps them apart by some
``spread``, a mean square, where they take their gradients. Of all ways that cost the same, only the one with the least spread is
worth anything: those make the frontier.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from gossamer import graphs
from gossamer.graphs import Graph
from gossamer.graphs.rounds import Mean, Round

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

    @property
    def every(self) -> int:
        """Steps between two means of all."""
        return 1 + next(k for k, round_ in enumerate(self.graph.rounds) if isinstance(round_, Mean))

    def apart(self, mean: int, steps: int) -> float:
        """How far apart (a square) replicas are ``steps`` after the mean in step ``mean``, before they are averaged again."""
        drift = _Drift().moved()
        for t in range(mean + 1, mean + steps):
            drift = drift.mixed(self.graph.round(t)).moved()
        return drift.square


@dataclass(frozen=True)
class _Drift:
    """Of one replica since the last mean. ``along``: its product with the replica's own direction."""

    square: float = 0.0
    along: float = 0.0

    def moved(self) -> _Drift:
        return _Drift(self.square + 2 * self.along + 1, self.along + 1)

    def mixed(self, round_: Round) -> _Drift:
        """Nothing is left, or all, or, of two that have had no part in each other yet, one half."""
        if isinstance(round_, Mean):
            return _Drift()
        return _Drift(self.square / 2, self.along / 2) if round_.degree else self


def frontier(n: int, cost: Callable[[Graph], float] | None = None) -> tuple[Level, ...]:
    """From the mean of all in every step to one in every 64, whatever no other way beats in both spread and cost. All of them
    have means of all: that is where all workers see the same. They travel in 8 bits, which costs a quarter and, unlike everything else
    that makes averages cheaper, next to nothing in training. ``cost``: by default the rows that each worker receives per step."""
    if n == 1:
        return (Level(graphs.complete(1), 0.0, 0.0),)
    ways = [
        graphs.periodic(n, every=every, **({"gap": gap} if gap else {}), bits=8)
        for every in _EVERY
        for gap in _GAPS
        if gap < every
    ]
    kept: list[Level] = []
    for level in sorted((Level.of(way, cost) for way in ways), key=lambda level: (level.spread, level.cost)):
        if not kept or level.cost < kept[-1].cost * (1 - 1e-9):
            kept.append(level)
    return tuple(kept)


def _spread(graph: Graph) -> float:
    """In the long run; the last Round of a period is a mean, so one period is the long run."""
    drift, total = _Drift(), 0.0
    for round_ in graph.rounds:
        drift = drift.moved().mixed(round_)
        total += drift.square
    return total / graph.period
