"""AdaGossip (Aketi, Hashemi, Roy, 2024): CHOCO with a step of its own for each number."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from gossamer.methods.choco import Choco
from gossamer.methods.step import Step
from gossamer.rows.vector import Vector


@dataclass(frozen=True)
class AdaGossip(Choco):
    """As ``choco``, with e = W x̂ - x̂; v <- β v + (1 - β) e²; x <- x + min(γ / (√v̂ + 1e-8), 1) e. v̂ is v, corrected for its start.

    - ``gamma``: a length, as a learning rate of Adam is.
    - ``beta``: how slowly v follows.
    """

    name = "adagossip"
    gamma: float | None = 0.01
    beta: float = 0.999

    def __post_init__(self) -> None:
        super().__post_init__()
        self.within("beta", "[0, 1)")

    def state(self, like: Vector) -> dict[str, Vector]:
        return super().state(like) | {"v": like.zeros(), "rounds": like.ones(1).mul_(0.0)}

    def combine(self, s: Step, apart: Vector) -> None:
        v, rounds = s.state["v"], s.state["rounds"].add_(1.0)
        v.mul_(self.beta).addcmul_(apart, apart, 1 - self.beta)
        correction = 1 - self.beta ** float(rounds.tensors[0][0])
        for x, e, square in zip(s.x.tensors, apart.tensors, v.tensors, strict=True):
            x.addcmul_(torch.div(self.far, square.div(correction).sqrt_().add_(1e-8)).clamp_(max=1.0), e)

    def members_changed(self, s: Step) -> None:
        super().members_changed(s)
        s.state["v"].zero_()
        s.state["rounds"].zero_()
