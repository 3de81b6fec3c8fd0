"""DecentLaM (Yuan et al., ICCV 2021): momentum without the bias that it adds where data differ between replicas."""

from __future__ import annotations

from dataclasses import dataclass

from gossamer.methods.base import Method
from gossamer.methods.step import Step
from gossamer.rows.vector import Vector


@dataclass(frozen=True)
class DecentLaM(Method):
    """d = (x - W (x - η g)) / η; m <- β m + d; x <- x - η m. So momentum is that of the averaged step, not of the own gradient.

    - ``beta``: 0 is ``atc``. In a step with a learning rate of 0 replicas are averaged, and m stays as it is.
    """

    name, sums, optimizer = "decentlam", "both", "plain SGD"
    beta: float = 0.9

    def __post_init__(self) -> None:
        self.within("beta", "[0, 1)")

    def state(self, like: Vector) -> dict[str, Vector]:
        return {"m": like.zeros(), "before": like.zeros()}

    def before_update(self, s: Step) -> None:
        s.state["before"].copy_(s.x)

    def after_update(self, s: Step) -> None:
        m = s.state["m"]
        mixed = s.mix(s.x)
        s.look()
        mixed.into(s.x)
        if s.lr:
            s.x.sub_(m, alpha=s.lr * self.beta)
            m.copy_(s.state["before"]).sub_(s.x).div_(s.lr)
