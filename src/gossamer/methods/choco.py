"""CHOCO-SGD (Koloskova et al., ICML 2019): only compressed differences to what the neighbours already know travel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from gossamer.errors import GossamerError
from gossamer.methods.base import Method
from gossamer.methods.step import Step
from gossamer.rows.vector import Vector
from gossamer.rows.wires import DIFFERENCES, WireName


@dataclass(frozen=True)
class Choco(Method):
    """x <- x - η d(x); q = Q(x - x̂); x̂ <- x̂ + q; x <- x + γ (W x̂ - x̂). All neighbours know x̂, what they were sent so far.

    - ``wire``: Q, how the difference travels.
    - ``gamma``: how far a step goes towards the neighbours; by default what the wire bears (8bits 0.8, sign 0.1 …). With
      ``wire=float32`` and 1 this is ``atc``.
    - ``order``: ``a`` as above (ICML 2019). ``b`` (ICLR 2020): x <- x + γ (W x̂ - x̂) first, and then q is sent, so x̂ is that of the
      step before; with ``wire=float32`` and 1 this is ``awc``.
    - ``p``: rows travel in every p-th step.
    - ``cycle``: for graphs with so many W in turn, such as one-peer-exponential: each W has other neighbours, and copies of its own.
    """

    name, sums, static, own_wire = "choco", "both", True, True
    bears: ClassVar[dict[str, float]] = {"4bits": 0.4, "sign": 0.1, "top-10%": 0.2, "top-1%": 0.04}
    gamma: float | None = None
    wire: WireName = "8bits"
    order: Literal["a", "b"] = "a"
    p: int = 1
    cycle: int = 1

    def __post_init__(self) -> None:
        self.within("p", "[1, inf)")
        self.within("cycle", "[1, inf)")
        if self.cycle > 1 and (self.p > 1 or self.order == "b"):
            raise GossamerError(
                f"method {self.name!r}: cycle={self.cycle} is for order=a and p=1: else copies of some W would be old, or never used"
            )
        self.within("gamma", "(0, 1]")

    @property
    def far(self) -> float:
        return self.bears.get(self.wire, 0.8) if self.gamma is None else self.gamma

    def state(self, like: Vector) -> dict[str, Vector]:
        return {f"{name}{_nth(k)}": like.zeros() for k in range(self.cycle) for name in ("copy", "mixed")}

    def after_update(self, s: Step) -> None:
        if (s.t + 1) % self.p:
            s.look()
            return
        k = _nth(s.t % s.graph.period)
        copy, mixed = s.state[f"copy{k}"], s.state[f"mixed{k}"]
        if self.order == "b":
            self.combine(s, mixed - copy)
        sent = s.mix(s.x - copy, wire=DIFFERENCES[self.wire])
        s.look()
        mixed.add_(sent.arrived[0])
        copy.add_(sent.own[0])
        sent.end()
        if self.order == "a":
            self.combine(s, mixed - copy)

    def combine(self, s: Step, apart: Vector) -> None:
        """``apart``: W x̂ - x̂."""
        s.x.add_(apart, alpha=self.far)

    def members_changed(self, s: Step) -> None:
        """Newcomers were sent nothing, so all begin anew."""
        for own in [own for name, own in s.state.items() if name.startswith(("copy", "mixed"))]:
            own.zero_()


def _nth(k: int) -> str:
    return f".{k}" if k else ""
