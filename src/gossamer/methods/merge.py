"""A final global merge, around any method that averages parameters: at the end all replicas become their mean."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from gossamer.graphs import Graph
from gossamer.methods.around import Around
from gossamer.methods.step import Step


@dataclass(frozen=True)
class FinalMerge(Around):
    """One mean of the parameters of all, after the last step. The averaged model stays what it was; single replicas become it."""

    name, by_name, own = "merge", True, ("merge",)

    def merge(self, s: Step) -> None:
        s.mean(s.x).into(s.x)

    def check(self, graph: Graph, optimizers: Sequence[torch.optim.Optimizer] = ()) -> str | None:
        if self.averages == "gradients":
            return f"method 'merge' makes one model of all replicas, and with {self.around.name!r} they are one already; leave it out"
        return self.around.check(graph, optimizers)
