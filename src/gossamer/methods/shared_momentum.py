"""Momentum that all replicas share, around any method that averages parameters: see ``optim/momentum.py``. ada-auto asks for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from gossamer.graphs import Graph
from gossamer.methods.around import Around
from gossamer.methods.step import Step
from gossamer.optim import momentum


@dataclass(frozen=True)
class SharedMomentum(Around):
    """Right after a mean, whether that is mixed in before the update or after it."""

    name, by_name, shares_momentum, own = "shared-momentum", False, True, ("after_update",)

    def does(self, moment: str) -> bool:
        early = moment == "before_update" and self.around.does("before_forward")
        return early or super().does(moment)

    def before_update(self, s: Step) -> None:
        self.around.before_update(s)
        s.share_momentum()

    def after_update(self, s: Step) -> None:
        self.around.after_update(s)
        s.share_momentum()

    def check(self, graph: Graph, optimizers: Sequence[torch.optim.Optimizer] = ()) -> str | None:
        return self.around.check(graph, optimizers) or next(filter(None, map(momentum.refusal, optimizers)), None)

    def describe(self) -> str:
        return self.around.describe()
