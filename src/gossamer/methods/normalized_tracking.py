"""GT-NSGDm (ICLR 2026): gradient tracking of the momentum, and steps of the length of the learning rate; made for transformers."""

from __future__ import annotations

from dataclasses import dataclass

from gossamer.methods.base import Method
from gossamer.methods.step import Step
from gossamer.rows.vector import Vector


@dataclass(frozen=True)
class NormalizedTracking(Method):
    """v <- β v + (1 - β) g; y <- y + v - v_before; x <- W (x - η y / ‖y‖); y <- W y. Two rows travel in each step. ‖y‖ is of all parameters
    of a replica. Our reconstruction: y travels with x, after it was used, as in ``tracking``.

    - ``beta``: how slowly the momentum follows.
    """

    name, sums, optimizer, rows = "gt-nsgdm", "both", "plain SGD", 2
    beta: float = 0.9

    def __post_init__(self) -> None:
        self.within("beta", "[0, 1)")

    def state(self, like: Vector) -> dict[str, Vector]:
        return {"y": like.zeros(), "v": like.zeros()}

    def before_update(self, s: Step) -> None:
        y, v = s.state["y"], s.state["v"]
        y.sub_(v)
        v.lerp_(s.grad, 1 - self.beta)
        y.add_(v)
        s.grad.copy_(y).div_(y.norm().add_(1e-12))

    def after_update(self, s: Step) -> None:
        y = s.state["y"]
        mixed = s.mix(s.x, y)
        s.look()
        mixed.into(s.x, y)

    def members_changed(self, s: Step) -> None:
        """The mean of y over other replicas than before is that of their v again."""
        s.state["y"].copy_(s.state["v"])
