"""Quasi-global momentum (Lin et al., ICML 2021): momentum of how the averaged parameters move, for data that differ between replicas."""

from __future__ import annotations

from dataclasses import dataclass

from gossamer.methods.base import Method
from gossamer.methods.step import Step
from gossamer.rows.vector import Vector


@dataclass(frozen=True)
class QuasiGlobalMomentum(Method):
    """x <- W (x - η (g + β m)); then m <- μ m + (1 - μ) (x_before - x) / η.

    - ``beta``: how much of the momentum a step takes. 0 is ``atc``.
    - ``mu``: how slowly the momentum follows. In a step with a learning rate of 0 it stays as it is.
    - ``nesterov``: the step is g + β (g + β m), as in the published commands.
    - ``local_step``: the momentum follows the mean movement of so many steps, and changes once in them.
    """

    name, sums, optimizer, one_rate, plainly = "qgm", "both", "plain SGD", True, True
    beta: float = 0.9
    mu: float = 0.9
    nesterov: bool = False
    local_step: int = 1

    def __post_init__(self) -> None:
        self.within("beta", "[0, 1)")
        self.within("mu", "[0, 1]")
        self.within("local_step", "[1, inf)")

    def state(self, like: Vector) -> dict[str, Vector]:
        own = {"m": like.zeros(), "before": like.zeros()}
        return own | {"moved": like.zeros()} if self.local_step > 1 else own

    def before_update(self, s: Step) -> None:
        s.state["before"].copy_(s.x)
        if self.nesterov:
            s.grad.mul_(1 + self.beta).add_(s.state["m"], alpha=self.beta**2)
        else:
            s.grad.add_(s.state["m"], alpha=self.beta)

    def after_update(self, s: Step) -> None:
        mixed = s.mix(s.x)
        s.look()
        mixed.into(s.x)
        moved = s.state["before"].sub_(s.x).div_(s.lr) if s.lr else None
        if self.local_step == 1:
            if moved is not None:
                s.state["m"].lerp_(moved, 1 - self.mu)
            return
        total = s.state["moved"]
        if moved is not None:
            total.add_(moved)
        if (s.t + 1) % self.local_step == 0:
            s.state["m"].lerp_(total.div_(self.local_step), 1 - self.mu)
            total.zero_()
