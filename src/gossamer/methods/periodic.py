"""Gossip-PGA (Chen et al., ICML 2021): the mean of all replicas now and then, around any method that averages with neighbours."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from gossamer.graphs import Graph
from gossamer.graphs.rounds import Mean
from gossamer.methods.around import Around
from gossamer.methods.step import Step


@dataclass(frozen=True)
class PeriodicMean(Around):
    """In every ``every``-th step W is the mean of all."""

    name, by_name, own = "pga", True, ("before_forward",)
    every: int = 8

    def __post_init__(self) -> None:
        self.within("every", "[1, inf)")

    def before_forward(self, s: Step) -> None:
        if (s.t + 1) % self.every == 0:
            s.round = Mean(s.round.n)
        self.around.before_forward(s)

    def check(self, graph: Graph, optimizers: Sequence[torch.optim.Optimizer] = ()) -> str | None:
        if self.around.static and graph.name != "complete":
            return f"method 'pga' changes W now and then, and {self.around.name!r} needs the same W in every step; use it without pga"
        if self.graphless or getattr(self.around, "p", 1) > 1:
            return f"method 'pga' chooses steps of its own, and {self.around.describe()!r} does not average parameters there; leave one out"
        return self.around.check(graph, optimizers)
