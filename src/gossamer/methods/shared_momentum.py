"""Momentum that all replicas share, around any method that averages parameters: see ``optim/momentum.py``. ada-auto asks for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from gossamer.graphs import Graph
from gossamer.methods.base import Method
from gossamer.methods.gossip import AdaptThenCombine
from gossamer.methods.step import Step
from gossamer.optim import momentum
from gossamer.rows.vector import Vector


@dataclass(frozen=True)
class SharedMomentum(Method):
    name, by_name, shares_momentum = "shared-momentum", False, True
    around: Method = field(default_factory=AdaptThenCombine)

    def does(self, moment: str) -> bool:
        """Momentum is shared right after a mean."""
        early = moment == "before_update" and self.around.does("before_forward")
        return self.around.does(moment) or early or moment == "after_update"

    def state(self, like: Vector) -> dict[str, Vector]:
        return self.around.state(like)

    def before_forward(self, s: Step) -> None:
        self.around.before_forward(s)

    def after_backward(self, s: Step) -> None:
        self.around.after_backward(s)

    def before_update(self, s: Step) -> None:
        self.around.before_update(s)
        s.share_momentum()

    def after_update(self, s: Step) -> None:
        self.around.after_update(s)
        s.share_momentum()

    def members_changed(self, s: Step) -> None:
        self.around.members_changed(s)

    def check(self, graph: Graph, optimizers: Sequence[torch.optim.Optimizer] = ()) -> str | None:
        return self.around.check(graph, optimizers) or next(filter(None, map(momentum.refusal, optimizers)), None)

    def describe(self) -> str:
        return self.around.describe()
