"""D² (Tang et al., ICML 2018): the difference between replicas' data cancels out from step to step, for the bytes of plain averaging."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from gossamer.graphs import Graph
from gossamer.methods.base import Method
from gossamer.methods.step import Step
from gossamer.rows.vector import Vector


@dataclass(frozen=True)
class DSquared(Method):
    """h = x - η g; x <- W (x + h - h_before), where h_before is x in step 0. W is symmetric, the same in every step, and has no
    eigenvalue of -1/3 or below.

    - ``lazy``: (I + W) / 2 in the place of W, which has none below 0: for any symmetric graph.
    """

    name, sums, static, optimizer = "d2", "both", True, "plain SGD"
    lazy: bool = True

    def check(self, graph: Graph, optimizers: Sequence[torch.optim.Optimizer] = ()) -> str | None:
        if why := super().check(graph, optimizers):
            return why
        w = graph.matrix()
        if not np.allclose(w, w.T):
            return f"method 'd2' needs a symmetric W, and {graph.name!r} is directed; use ring, torus, or method 'tracking'"
        least = float(np.linalg.eigvalsh(w)[0])
        if not self.lazy and least <= -1 / 3 + 1e-9:
            return (
                f"method 'd2:lazy=false' needs a W whose eigenvalues are above -1/3, and the least one of {graph.name!r} is {least:.3f}; "
                "use lazy=true"
            )
        return None

    def state(self, like: Vector) -> dict[str, Vector]:
        return {"h": like.zeros()}

    def before_update(self, s: Step) -> None:
        if s.t == 0:
            self.members_changed(s)
        s.state["h"].mul_(-1).add_(s.x)  # x - h_before

    def after_update(self, s: Step) -> None:
        h = s.x.clone()
        s.x.add_(s.state["h"])
        s.state["h"].copy_(h)
        mixed = s.mix(s.x)
        s.look()
        if self.lazy:
            mixed.into(h)
            s.x.lerp_(h, 0.5)
        else:
            mixed.into(s.x)

    def members_changed(self, s: Step) -> None:
        """As in step 0."""
        s.state["h"].copy_(s.x)
