"""CHOCO-SGD (Koloskova et al., ICML 2019): only compressed differences to what the neighbours already know travel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from gossamer.methods.base import Method
from gossamer.methods.step import Step
from gossamer.rows.vector import Vector
from gossamer.rows.wires import WIRES


@dataclass(frozen=True)
class Choco(Method):
    """x <- x - η d(x); q = Q(x - x̂); x̂ <- x̂ + q; x <- x + γ (W x̂ - x̂). All replicas know x̂, what they were sent so far.

    - ``gamma``: how far a step goes towards the neighbours. With ``wire=float32`` and 1 this is ``atc``.
    - ``wire``: Q, how the difference travels.
    """

    name, sums, static = "choco", "both", True
    gamma: float = 0.8
    wire: Literal["8bits", "bfloat16", "float32"] = "8bits"

    def state(self, like: Vector) -> dict[str, Vector]:
        return {"copy": like.zeros(), "mixed": like.zeros()}

    def after_update(self, s: Step) -> None:
        copy, mixed = s.state["copy"], s.state["mixed"]
        sent = s.mix(s.x - copy, wire=WIRES[self.wire])
        s.look()
        mixed.add_(sent.arrived[0])
        copy.add_(sent.own[0])
        sent.end()
        s.x.add_(mixed, alpha=self.gamma).sub_(copy, alpha=self.gamma)

    def members_changed(self, s: Step) -> None:
        """Newcomers were sent nothing, so all begin anew."""
        s.state["copy"].zero_()
        s.state["mixed"].zero_()
