"""Global update tracking (Aketi, Hashemi, Roy, NeurIPS 2023): the bias of data that differ, for the bytes of plain averaging."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from gossamer.graphs import Graph
from gossamer.methods.base import Method
from gossamer.methods.decentlam import apart
from gossamer.methods.step import Step
from gossamer.rows.vector import Vector


@dataclass(frozen=True)
class GlobalUpdateTracking(Method):
    """The model holds z = W x, and gradients are taken there: y = g(z) + μ ((z_before - z) / η - g_before); x = z - η y; z <- W x.
    (z_before - z) / η is what the neighbours' updates were on the average, so the mean of y is that of g.

    - ``mu``: 0 is plain averaging. Of its bias, 1 - μ remains. By default 0.9, with momentum 0.01.
    - ``beta``: momentum, of x, as in the authors' code: x = z - η y + β (x - x_before), where y has β times the last change by averaging
      less. Then the mean of y is not that of g, and published values of ``mu`` are small (0.005 to 0.08): large ones diverge.

    After a step with a learning rate of 0 the next one is plain averaging.
    """

    name, sums, optimizer, one_rate = "gut", "both", "plain SGD", True
    mu: float | None = None
    beta: float = 0.0

    def __post_init__(self) -> None:
        self.within("mu", "[0, 1]")
        self.within("beta", "[0, 1)")

    @property
    def share(self) -> float:
        return self.mu if self.mu is not None else 0.01 if self.beta else 0.9

    def check(self, graph: Graph, optimizers: Sequence[torch.optim.Optimizer] = ()) -> str | None:
        return super().check(graph, optimizers) or apart(self.describe(), graph, self.beta, self.share)

    def state(self, like: Vector) -> dict[str, Vector]:
        own = {"bias": like.zeros(), "before": like.zeros()}
        return own | {"x": like.zeros(), "velocity": like.zeros()} if self.beta else own

    def before_update(self, s: Step) -> None:
        if s.t == 0:
            self.members_changed(s)
        s.grad.add_(s.state["bias"], alpha=self.share)
        s.state["before"].copy_(s.x)
        if self.beta:
            s.grad.add_(s.state["velocity"], alpha=self.beta)

    def after_update(self, s: Step) -> None:
        bias, before = s.state["bias"], s.state["before"]
        # The gradient as the optimizer took it, with its weight decay.
        g = (before - s.x).div_(s.lr or 1.0).sub_(bias, alpha=self.share)
        if self.beta and s.lr:
            x, velocity = s.state["x"], s.state["velocity"]
            g.sub_(velocity, alpha=self.beta)
            g.add_(before, alpha=self.beta / s.lr).sub_(x, alpha=self.beta / s.lr)  # averaging went from x to z
            velocity.copy_(x).sub_(s.x).div_(s.lr)
            x.copy_(s.x)
        mixed = s.mix(s.x)
        s.look()
        mixed.into(s.x)
        if s.lr:
            bias.copy_(before).sub_(s.x).div_(s.lr).sub_(g)
        else:
            self.members_changed(s)

    def members_changed(self, s: Step) -> None:
        """What the neighbours did is not known."""
        s.state["bias"].zero_()
        if self.beta:
            s.state["velocity"].zero_()
            s.state["x"].copy_(s.x)
