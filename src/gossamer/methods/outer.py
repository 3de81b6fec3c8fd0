"""Local steps, and now and then an outer one: what DiLoCo, SlowMo, NoLoCo and plain local SGD have in common."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from gossamer.errors import GossamerError
from gossamer.graphs import Graph
from gossamer.methods.base import Method
from gossamer.methods.step import Step
from gossamer.optim import moments
from gossamer.rows.vector import Vector
from gossamer.rows.wires import BFLOAT16, EXACT, OF_MEANS, WIRES, MeanWireName, wire
from gossamer.transport.agreed import AgreedMean
from gossamer.transport.transfer import Transfer


@dataclass(frozen=True)
class Outer(Method):
    """Each replica trains H steps alone. Then φ, which is the same on all, takes a step by the mean movement, mean(φ - x); x <- φ.

    - ``H``: local steps. ``wire``: how the movement travels.
    - ``feedback``: what the wire has lost of a movement is added to the next one; by default with a wire that rounds.
    - ``delay``: the outer step follows so many local steps after the movement has set out, and these are kept: x <- x + φ - (x as sent).
    - ``moments``: of the inner optimizer, at an outer step. ``own``: kept; ``mean``: averaged; ``reset``: begun anew.
    """

    name, by_name, own_wire, graphless, alike = "outer", False, True, True, True
    H: int = 32
    wire: MeanWireName = "float32"
    feedback: bool | None = None
    delay: int = 0
    moments: Literal["own", "mean", "reset"] = "own"

    def __post_init__(self) -> None:
        wire(self.wire, OF_MEANS)
        self.within("H", "[1, inf)")
        self.within("delay", f"[0, {self.H})")
        if self.feedback and WIRES[self.wire] is EXACT:
            self._refuse("feedback=true adds what a wire has lost, and float32 loses nothing; add wire=8bits or 4bits")
        if self.moments == "mean" and self.delay:
            self._refuse(f"moments=mean is done at once, and delay={self.delay} is later; use moments=own, or delay=0")

    def _refuse(self, why: str) -> None:
        raise GossamerError(f"method {self.name!r}: {why}")

    def check(self, graph: Graph, optimizers: Sequence[torch.optim.Optimizer] = ()) -> str | None:
        if self.moments == "mean" and optimizers and not moments.names(optimizers):
            return (
                f"method {self.name!r}: moments=mean averages those of Adam and its kin, or momentum; "
                f"{type(optimizers[0]).__name__} has none here; use moments=own or reset"
            )
        return super().check(graph, optimizers)

    @property
    def _keeps_lost(self) -> bool:
        return WIRES[self.wire] is not EXACT if self.feedback is None else self.feedback

    def state(self, like: Vector) -> dict[str, Vector]:
        """``anchor``: φ. ``before``: x when the movement set out."""
        own = {"anchor": like.clone()} | ({"lost": like.zeros()} if self._keeps_lost else {})
        return own | ({"before": like.clone()} if self.delay else {})

    def after_update(self, s: Step) -> None:
        s.look()
        phase = (s.t + 1) % self.H
        if phase == 0:
            if self.delay:
                s.state["before"].copy_(s.x)
            s.crossing["outer"] = self.send(s, s.state.get("before", s.x), s.t)
        elif phase <= self.delay and s.t >= self.H and "outer" not in s.crossing:
            # Of a checkpoint, or with other members than it set out with: once more, as it was.
            s.crossing["outer"] = self.send(s, s.state["before"], s.t - phase)
        if phase == self.delay and "outer" in s.crossing:
            self.arrive(s)

    def send(self, s: Step, x: Vector, turn: int) -> AgreedMean | Transfer:
        moved, lost = s.state["anchor"] - x, s.state.get("lost")
        return s.mean(moved, wire=WIRES[self.wire], turn=turn, ahead=self.delay > 0, plus=lost)

    def arrive(self, s: Step) -> None:
        transfer, arrived = s.crossing.pop("outer"), s.x.zeros()
        transfer.into(arrived)
        if not s.sound(arrived):
            return  # on no worker; the next one carries both movements
        if self._keeps_lost and isinstance(transfer, AgreedMean):
            s.state["lost"].copy_(transfer.lost[0])
        self.step(s, arrived)
        if self.moments == "reset":
            s.reset_moments()
        elif self.moments == "mean":
            made = s.moments()
            self.average(s, *made.values())
            s.set_moments(made)

    def step(self, s: Step, moved: Vector) -> None:
        """φ takes its step, and x follows. ``moved``: what has arrived."""
        anchor, before = s.state["anchor"], s.state.get("before")
        self.outer(s, anchor, moved)
        if before is None:
            s.x.copy_(anchor)
        else:
            s.x.add_(anchor).sub_(before)

    def outer(self, s: Step, anchor: Vector, moved: Vector) -> None:
        raise NotImplementedError

    def average(self, s: Step, *vectors: Vector) -> None:
        s.mean(*vectors, wire=EXACT if WIRES[self.wire] is EXACT else BFLOAT16).into(*vectors)

    def members_changed(self, s: Step) -> None:
        """What is in flight is begun again, over the new members. Newcomers have lost nothing."""
        s.crossing.clear()
        if "lost" in s.state:
            s.state["lost"].zero_()
