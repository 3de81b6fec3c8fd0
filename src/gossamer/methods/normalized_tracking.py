"""GT-NSGDm (ICLR 2026): gradient tracking of the momentum, and steps of the length of the learning rate; made for transformers."""

from __future__ import annotations

from dataclasses import dataclass

from gossamer.methods.step import Step
from gossamer.methods.tracking import GradientTracking


@dataclass(frozen=True)
class NormalizedTracking(GradientTracking):
    """v <- β v + (1 - β) g; y <- y + v - v_before; x <- W (x - η y / ‖y‖); y <- W y. Two rows travel in each step. ‖y‖ is of all parameters
    of a replica. Our reconstruction: y travels with x, after it was used, as in ``tracking``.

    - ``beta``: how slowly the momentum follows.
    """

    name, tracked = "gt-nsgdm", "v"
    beta: float = 0.9

    def __post_init__(self) -> None:
        self.within("beta", "[0, 1)")

    def before_update(self, s: Step) -> None:
        y, v = s.state["y"], s.state["v"]
        y.sub_(v)
        v.lerp_(s.grad, 1 - self.beta)
        y.add_(v)
        s.grad.copy_(y).div_(y.norm().add_(1e-12))
