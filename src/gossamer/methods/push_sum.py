"""Stochastic gradient push (Assran et al., ICML 2019), and its quantized form (Taheri et al., ICML 2020): averaging on directed graphs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from gossamer.graphs import Graph
from gossamer.methods.base import Method
from gossamer.methods.step import Step
from gossamer.rows.vector import Vector
from gossamer.rows.wires import DIFFERENCES, WireName


@dataclass(frozen=True)
class PushSum(Method):
    """Columns of W sum to 1, rows need not. A weight w travels with the row w x, and their quotient x is what the model shows:
    w x <- W (w x - η d(x)); w <- W w.

    - ``wire``: not float32: what travels is q = Q(w x - x̂), and x̂ <- x̂ + q is what all know; w x <- w x + γ (W x̂ - x̂). W must be the same
      in every step. (Our reconstruction; the paper's text was not at hand.)
    - ``gamma``: 1 in the paper. A wire that is too coarse for it diverges; then less (ours).
    """

    name, sums = "push-sum", "columns"
    wire: WireName = "float32"
    gamma: float = 1.0

    def __post_init__(self) -> None:
        self.within("gamma", "(0, 1]")

    static = property(lambda self: self.quantized)

    @property
    def quantized(self) -> bool:
        return self.wire != "float32" or self.gamma < 1

    def check(self, graph: Graph, optimizers: Sequence[torch.optim.Optimizer] = ()) -> str | None:
        if self.quantized and graph.period > 1:
            return (
                f"method {self.describe()!r} needs the same W in every step, and {graph.name!r} has {graph.period}; "
                "use directed-exponential, or wire=float32"
            )
        return super().check(graph, optimizers)

    def state(self, like: Vector) -> dict[str, Vector]:
        own = {"w": like.ones(1), "before": like.zeros()}
        return own | {"copy": like.zeros(), "mixed": like.zeros()} if self.quantized else own

    def before_update(self, s: Step) -> None:
        s.state["before"].copy_(s.x)

    def after_update(self, s: Step) -> None:
        w, before = s.state["w"], s.state["before"]
        s.x.sub_(before).add_(before.mul_(w))  # w x - η d(x)
        if not self.quantized:
            transfer = s.mix(s.x, w)
            s.look()
            transfer.into(s.x, w)
        else:
            copy, mixed = s.state["copy"], s.state["mixed"]
            rows, weights = s.mix(s.x - copy, wire=DIFFERENCES[self.wire]), s.mix(w)
            s.look()
            mixed.add_(rows.arrived[0])
            copy.add_(rows.own[0])
            rows.end()
            weights.into(w)
            s.x.add_(mixed, alpha=self.gamma).sub_(copy, alpha=self.gamma)
        s.x.div_(w)

    def members_changed(self, s: Step) -> None:
        """Weights of those that left are lost, newcomers have a donor's and were sent nothing: all begin anew, from what models show."""
        s.state["w"].zero_().add_(1.0)
        if self.quantized:
            s.state["copy"].zero_()
            s.state["mixed"].zero_()
