"""Quasi-global Adam (Lin et al., ICML 2021): Adam whose moments follow how the averaged parameters move."""

from __future__ import annotations

from dataclasses import dataclass

from gossamer.methods.base import Method
from gossamer.methods.step import Step
from gossamer.rows.vector import Vector


@dataclass(frozen=True)
class QuasiGlobalAdam(Method):
    """a = β1 m + g and b = β2 v + (1 - β2) g², both corrected for the start; x <- W (x - η a / (√b + ε)). With d = (x_before - x) / ‖…‖:
    m <- β1 m + (1 - β1) d; v <- β2 v + (1 - β2) d². As the authors' code has it (g enters a with weight 1, and d has length 1).
    In a step with a learning rate of 0, m and v stay as they are."""

    name, sums, optimizer, plainly = "qg-adam", "both", "plain SGD", True
    beta1: float = 0.9
    beta2: float = 0.99
    eps: float = 1e-8

    def __post_init__(self) -> None:
        self.within("beta1", "[0, 1)")
        self.within("beta2", "[0, 1)")
        self.within("eps", "(0, inf)")

    def state(self, like: Vector) -> dict[str, Vector]:
        return {"m": like.zeros(), "v": like.zeros(), "before": like.zeros()}

    def before_update(self, s: Step) -> None:
        m, v = s.state["m"], s.state["v"]
        s.state["before"].copy_(s.x)
        corrections = 1 - self.beta1 ** (s.t + 1), 1 - self.beta2 ** (s.t + 1)
        root = v.clone().mul_(self.beta2).addcmul_(s.grad, s.grad, 1 - self.beta2).div_(corrections[1]).sqrt_().add_(self.eps)
        s.grad.add_(m, alpha=self.beta1).div_(corrections[0]).div_(root)

    def after_update(self, s: Step) -> None:
        mixed = s.mix(s.x)
        s.look()
        mixed.into(s.x)
        if s.lr:
            d = s.state["before"].sub_(s.x)
            d.div_(d.norm().add_(1e-8))
            s.state["m"].lerp_(d, 1 - self.beta1)
            s.state["v"].mul_(self.beta2).addcmul_(d, d, 1 - self.beta2)
