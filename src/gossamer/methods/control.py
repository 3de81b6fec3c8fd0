"""Consensus control (Kong, Lin, Koloskova, Jaggi, Stich, ICML 2021): averaging is repeated until replicas are near enough to each other."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from gossamer.graphs import Graph
from gossamer.methods.around import Around
from gossamer.methods.step import Step
from gossamer.rows.vector import Vector


@dataclass(frozen=True)
class ConsensusControl(Around):
    """After the update rows are mixed again until Ξ ≤ target · φ, at most ``rounds`` times. Ξ: the consensus distance; φ: a running mean of
    the gradients' norm. How far rows move when they are mixed bounds Ξ: with Θ² = mean ‖W x - x‖² and ρ = ‖W - 11ᵀ/n‖, it is at most
    ρ Θ / (1 - ρ) afterwards. So one number per replica is averaged over all each time. Where W changes from step to step, the whole
    cycle of the graph is run each time, and W is its product. The form of the target is our reconstruction.

    - ``target``: 0 mixes ``rounds`` times in each step, inf never. ``memory``: of the running mean.
    - ``late``: the target from when the learning rate is below half of its largest value. (The authors: ``late=inf``, no control.)
    """

    name, by_name, own = "control", True, ("before_update", "after_update")
    target: float = 1.0
    late: float | None = None
    rounds: int = 4
    memory: float = 0.9

    def __post_init__(self) -> None:
        for key, interval in (("target", "[0, inf]"), ("rounds", "[1, inf)"), ("memory", "[0, 1)"), ("late", "[0, inf]")):
            self.within(key, interval)

    def state(self, like: Vector) -> dict[str, Vector]:
        """``seen``: φ, its weight, the largest learning rate; the same on all replicas."""
        return self.around.state(like) | {"seen": like.ones(3).mul_(0.0), "norm": like.ones(1)}

    def before_update(self, s: Step) -> None:
        s.state["norm"].copy_(s.grad.norm())
        self.around.before_update(s)

    def after_update(self, s: Step) -> None:
        before, norm = s.x.clone(), s.state["norm"].clone()
        self.around.after_update(s)
        moved = self._moved(s, before, norm)
        seen = s.state["seen"].tensors[0]
        seen[:, :2].lerp_(torch.cat([norm.tensors[0], torch.ones_like(norm.tensors[0])], dim=1), 1 - self.memory)
        seen[:, 2].clamp_(min=s.lr)
        phi, weight, fastest = seen[0].tolist()
        target = (self.late if self.late is not None and s.lr < fastest / 2 else self.target) * phi / weight
        rest = (1 - s.graph.spectral_gap()) ** s.graph.period
        # The step's own round is measured for nothing, if it is all of W, and all that happens after the update.
        whole = s.graph.period == 1 and s.round is s.graph.rounds[0] and self.around.plainly
        spent, reached = 0, moved * rest / (1 - rest) if whole else math.inf
        while s.agrees and reached > target and spent < self.rounds:
            before = s.x.clone()
            for round_ in s.graph.rounds:  # from the first on: of some graphs only this product is exact
                s.mix(s.x, round=round_).into(s.x)
            spent, reached = spent + 1, self._moved(s, before) * rest / (1 - rest)
        if not s.agrees:
            warnings.warn("method 'control' repeats no rounds any more: the store is gone", stacklevel=2)  # shown once
        s.note(control_target=target, control_reached=reached, control_rounds=spent)

    @staticmethod
    def _moved(s: Step, before: Vector, *also: Vector) -> float:
        """Θ, the same on all replicas; ``also``: what is averaged with it."""
        square = before.sub_(s.x).norm()
        s.mean(square.mul_(square), *also).into(square, *also)
        return math.sqrt(float(square.tensors[0][0]))

    def check(self, graph: Graph, optimizers: Sequence[torch.optim.Optimizer] = ()) -> str | None:
        if self.graphless or self.sums == "columns":
            return f"method 'control' brings parameters together by averaging them, which {self.around.name!r} does not do; leave it out"
        return self.around.check(graph, optimizers)
