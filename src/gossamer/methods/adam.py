"""D-Adam and CD-Adam (Gao, Huang: Adaptive Serverless Learning, 2020): Adam on each replica, its own moments, averages every p steps.

Only the abstract was at hand; these are our reconstructions. The moments are those of ``torch.optim``, with its corrections for the start.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from gossamer.graphs import Graph
from gossamer.methods.base import Method
from gossamer.methods.choco import Choco
from gossamer.methods.step import Step


@dataclass(frozen=True)
class DAdam(Method):
    """x <- x - η m / (√v + ε); in every p-th step x <- W x."""

    name, optimizer = "d-adam", "Adam"
    p: int = 1

    def __post_init__(self) -> None:
        self.within("p", "[1, inf)")

    def check(self, graph: Graph, optimizers: Sequence[torch.optim.Optimizer] = ()) -> str | None:
        if self.p > 1 and graph.period > 1:
            return (
                f"method 'd-adam:p={self.p}' would skip some rounds of {graph.name!r} for ever; use method 'd-adam' and average every "
                f"{self.p} steps (local_steps={self.p})"
            )
        return super().check(graph, optimizers)

    def after_update(self, s: Step) -> None:
        if (s.t + 1) % self.p:
            s.look()
            return
        mixed = s.mix(s.x)
        s.look()
        mixed.into(s.x)


@dataclass(frozen=True)
class CDAdam(Choco):
    """D-Adam that sends compressed differences, as ``choco`` does. Which of its two orders the authors use is not known; ``a`` is the
    default. With ``wire=float32,gamma=1`` order a is D-Adam."""

    name, optimizer = "cd-adam", "Adam"
