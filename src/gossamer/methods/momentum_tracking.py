"""Momentum tracking (Takezawa et al., TMLR 2023): gradient tracking of the momentum, so that the mean model follows heavy ball."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from gossamer.methods.step import Step
from gossamer.methods.tracking import GradientTracking


@dataclass(frozen=True)
class MomentumTracking(GradientTracking):
    """m <- β m + g; y <- y + m - m_before; x <- W (x - η y); y <- W y. The mean of y is the mean of m. Two rows travel in each step.

    - ``beta``: 0 is ``tracking``.
    - ``start``: ``mean``: in step 0 y is the mean gradient of all replicas, which takes one all-reduce, as the authors do. ``own``: each
      replica's own gradient.
    """

    name, tracked = "momentum-tracking", "m"
    beta: float = 0.9
    start: Literal["mean", "own"] = "mean"

    def __post_init__(self) -> None:
        self.within("beta", "[0, 1)")

    def before_update(self, s: Step) -> None:
        y, m = s.state["y"], s.state["m"]
        if s.t == 0 and self.start == "mean":  # such that the first y is the mean gradient
            mean = s.grad.clone()
            s.mean(mean).into(mean)
            m.copy_(s.grad).sub_(mean).div_(1 - self.beta)
        y.sub_(m)
        m.mul_(self.beta).add_(s.grad)
        y.add_(m)
        s.grad.copy_(y)
