"""NoLoCo (Gensyn, 2025; arXiv 2506.10911): the outer step is taken with one random replica, so no replica waits for all."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from gossamer.graphs import weights
from gossamer.graphs.rounds import Round
from gossamer.methods.outer import Fragment, Outer
from gossamer.methods.step import Step
from gossamer.rows.vector import Vector
from gossamer.rows.wires import WIRES
from gossamer.transport.transfer import Transfer


@dataclass(frozen=True)
class NoLoCo(Outer):
    """m <- μ m + η (mean_G(x) - φ); φ <- φ + m; x <- φ. G: the replica and its peer. That is η mean_G(x - φ) + η (mean_G(φ) - φ), so the
    one factor of the authors' code for both makes one row enough.

    - ``lr``: η; ``momentum``: μ. ``seed``: of the pairs, which are a function of the step; with an odd number one replica has no peer.
    """

    name, by_name, alike = "noloco", True, False
    wire: Literal["float32", "bfloat16"] = "float32"
    moments: Literal["own", "mean", "reset"] = "own"
    lr: float = 0.7
    momentum: float = 0.5
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        self.within("lr", "(0, 1]")
        self.within("momentum", "[0, 1)")
        self.within("seed", "[0, inf)")
        if self.feedback:
            self._refuse("x travels as x + W Q(x) - Q(x), so nothing is lost that feedback=true could add; leave it out")

    @property
    def _keeps_lost(self) -> bool:
        return False

    def state(self, like: Vector) -> dict[str, Vector]:
        return super().state(like) | {"momentum": like.zeros()}

    def peers(self, n: int, turn: int) -> Round:
        order = np.random.default_rng([self.seed, turn, n]).permutation(n).tolist()
        return weights.pairs(n, zip(order[0 : n - 1 : 2], order[1::2], strict=True))

    def send(self, s: Step, own: Fragment, turn: int) -> Transfer:
        return s.mix(own.state.get("before", own.x), wire=WIRES[self.wire], round=self.peers(s.graph.n, turn))

    def outer(self, s: Step, state: dict[str, Vector], moved: Vector) -> None:
        anchor = state["anchor"]
        momentum = state["momentum"].mul_(self.momentum).add_(moved, alpha=self.lr).sub_(anchor, alpha=self.lr)
        anchor.add_(momentum)

    def average(self, s: Step, *vectors: Vector) -> None:
        s.mix(*vectors, round=self.peers(s.graph.n, s.t)).into(*vectors)
