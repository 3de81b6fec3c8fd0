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
    """

    name, sums, optimizer = "qgm", "both", "plain SGD"
    beta: float = 0.9
    mu: float = 0.9

    def state(self, like: Vector) -> dict[str, Vector]:
        return {"m": like.zeros(), "before": like.zeros()}

    def before_update(self, s: Step) -> None:
        s.state["before"].copy_(s.x)
        s.grad.add_(s.state["m"], alpha=self.beta)

    def after_update(self, s: Step) -> None:
        mixed = s.mix(s.x)
        s.look()
        mixed.into(s.x)
        if s.lr:
            s.state["m"].lerp_(s.state["before"].sub_(s.x).div_(s.lr), 1 - self.mu)
