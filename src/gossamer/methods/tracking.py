"""Gradient tracking: each replica tracks the mean gradient of all, so data that differ between replicas leave no bias."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from gossamer.methods.base import Method
from gossamer.methods.step import Step
from gossamer.rows.vector import Vector


@dataclass(frozen=True)
class GradientTracking(Method):
    """y <- y + g - g_before; x <- W (x - η y); y <- W y. The mean of y is the mean of g. Two rows travel in each step."""

    name, sums, optimizer, rows, plainly = "tracking", "both", "plain SGD", 2, True

    tracked: ClassVar[str] = "g"  # the own vector whose mean over all replicas that of y is

    def state(self, like: Vector) -> dict[str, Vector]:
        return {"y": like.zeros(), self.tracked: like.zeros()}

    def before_update(self, s: Step) -> None:
        y, g = s.state["y"], s.state["g"]
        y.add_(s.grad).sub_(g)
        g.copy_(s.grad)
        s.grad.copy_(y)

    def after_update(self, s: Step) -> None:
        y = s.state["y"]
        mixed = s.mix(s.x, y)
        s.look()
        mixed.into(s.x, y)

    def members_changed(self, s: Step) -> None:
        """The mean of y over other replicas than before is that of what they track again."""
        s.state["y"].copy_(s.state[self.tracked])
