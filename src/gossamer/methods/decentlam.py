"""DecentLaM (Yuan et al., ICCV 2021): momentum without the bias that it adds where data differ between replicas."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from gossamer.graphs import Graph
from gossamer.methods.base import Method
from gossamer.methods.step import Step
from gossamer.rows.vector import Vector

_LARGEST = 64  # replicas up to which graphs are looked at


@dataclass(frozen=True)
class DecentLaM(Method):
    """d = (x - W (x - η g)) / η; m <- β m + d; x <- x - η m. So momentum is that of the averaged step, not of the own gradient.

    - ``beta``: 0 is ``atc``. In a step with a learning rate of 0 replicas are averaged, and m stays as it is.
    """

    name, sums, optimizer = "decentlam", "both", "plain SGD"
    beta: float = 0.9

    def __post_init__(self) -> None:
        self.within("beta", "[0, 1)")

    def check(self, graph: Graph, optimizers: Sequence[torch.optim.Optimizer] = ()) -> str | None:
        return super().check(graph, optimizers) or apart(self.describe(), graph, self.beta)

    def state(self, like: Vector) -> dict[str, Vector]:
        return {"m": like.zeros(), "before": like.zeros()}

    def before_update(self, s: Step) -> None:
        s.state["before"].copy_(s.x)

    def after_update(self, s: Step) -> None:
        m = s.state["m"]
        mixed = s.mix(s.x)
        s.look()
        mixed.into(s.x)
        if s.lr:
            s.x.sub_(m, alpha=s.lr * self.beta)
            m.copy_(s.state["before"]).sub_(s.x).div_(s.lr)


def apart(name: str, graph: Graph, beta: float, mu: float = 0.0) -> str | None:
    """Why a method can't run on a graph on which differences between replicas would grow by themselves, gradients or not: under
    u <- β u + (W - 1) x + μ W u + μ β (W - 1) (x - u); x <- x + u. Where W is symmetric and the same in every step, they do not."""
    if graph.n > _LARGEST:
        return None
    one, cycle = np.eye(graph.n), np.eye(2 * graph.n)
    for t in range(graph.period):
        w = graph.matrix(t)
        a, b = (1 + mu * beta) * (w - one), beta * one + mu * w - mu * beta * (w - one)
        cycle = np.block([[one + a, b], [a, b]]) @ cycle
    if np.abs(np.linalg.eigvals(cycle)).max() <= 1 + 1e-6:
        return None
    return (
        f"method {name!r} drives replicas apart on {graph.name!r}, whatever the learning rate; use ring, a smaller beta or mu, or "
        "method 'qgm'"
    )
