"""SlowMo (Wang, Tantia, Ballas, Rabbat, ICLR 2020): the outer step has heavy-ball momentum, in units of the inner learning rate."""

from __future__ import annotations

from dataclasses import dataclass

from gossamer.methods.outer import Outer
from gossamer.methods.step import Step
from gossamer.rows.vector import Vector


@dataclass(frozen=True)
class SlowMo(Outer):
    """u <- β u + Δ / γ; φ <- φ - α γ u, with Δ = mean(φ - x) and γ the inner learning rate of the step in which Δ arrives.

    - ``beta``: β; ``lr``: α. With 0 and 1 this is ``local``. Where γ is 0, φ <- φ - α Δ, and u stays as it is.
    """

    name, by_name = "slowmo", True
    H: int = 12
    lr: float = 1.0
    beta: float = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        self.within("lr", "(0, inf)")
        self.within("beta", "[0, 1)")

    def state(self, like: Vector) -> dict[str, Vector]:
        return super().state(like) | {"u": like.zeros()}

    def outer(self, s: Step, state: dict[str, Vector], moved: Vector) -> None:
        anchor = state["anchor"]
        if not s.lr:
            anchor.sub_(moved, alpha=self.lr)
            return
        u = state["u"].mul_(self.beta).add_(moved, alpha=1 / s.lr)
        anchor.sub_(u, alpha=self.lr * s.lr)
