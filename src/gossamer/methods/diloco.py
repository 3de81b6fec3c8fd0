"""DiLoCo (Douillard et al., 2023): the outer step is one of SGD with Nesterov momentum, on the mean movement."""

from __future__ import annotations

from dataclasses import dataclass

from gossamer.methods.outer import Outer
from gossamer.methods.step import Step
from gossamer.rows.vector import Vector


@dataclass(frozen=True)
class DiLoCo(Outer):
    """m <- μ m + Δ; φ <- φ - η (Δ + μ m), as ``torch.optim.SGD(nesterov=True)`` with Δ = mean(φ - x) as gradient.

    - ``lr``: η; ``momentum``: μ. With 1 and 0 this is ``local``.
    """

    name, by_name = "diloco", True
    lr: float = 0.7
    momentum: float = 0.9

    def __post_init__(self) -> None:
        super().__post_init__()
        self.within("lr", "(0, inf)")
        self.within("momentum", "[0, 1)")

    def state(self, like: Vector) -> dict[str, Vector]:
        return super().state(like) | ({"momentum": like.zeros()} if self.momentum else {})

    def outer(self, s: Step, state: dict[str, Vector], moved: Vector) -> None:
        anchor = state["anchor"]
        anchor.sub_(moved, alpha=self.lr)
        if self.momentum:
            momentum = state["momentum"].mul_(self.momentum).add_(moved)
            anchor.sub_(momentum, alpha=self.lr * self.momentum)
