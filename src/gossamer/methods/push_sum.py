"""Stochastic gradient push (Assran et al., ICML 2019): averaging on directed graphs, where a replica may send to more than it hears."""

from __future__ import annotations

from dataclasses import dataclass

from gossamer.methods.base import Method
from gossamer.methods.step import Step
from gossamer.rows.vector import Vector


@dataclass(frozen=True)
class PushSum(Method):
    """Columns of W sum to 1, rows need not. A weight w travels with the row w x, and their quotient x is what the model shows:
    w x <- W (w x - η d(x)); w <- W w."""

    name, sums = "push-sum", "columns"

    def state(self, like: Vector) -> dict[str, Vector]:
        return {"w": like.ones(1)}

    def before_update(self, s: Step) -> None:
        s.grad.div_(s.state["w"])

    def after_update(self, s: Step) -> None:
        w = s.state["w"]
        s.x.mul_(w)
        mixed = s.mix(s.x, w)
        s.look()
        mixed.into(s.x, w)
        s.x.div_(w)
