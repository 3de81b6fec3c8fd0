"""Local steps, and now and then an outer one: what DiLoCo, SlowMo, NoLoCo and plain local SGD have in common."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from gossamer.errors import GossamerError
from gossamer.graphs import Graph
from gossamer.methods import second_moments
from gossamer.methods.base import Method
from gossamer.methods.step import Step
from gossamer.optim import moments
from gossamer.rows.vector import Vector
from gossamer.rows.wires import BFLOAT16, EXACT, OF_MEANS, WIRES, MeanWireName, wire
from gossamer.transport.agreed import AgreedMean
from gossamer.transport.transfer import Transfer


class Fragment:
    """What an outer step sees: the k-th of so many parts of the columns, of parameters and of the method's own state."""

    def __init__(self, s: Step, k: int, of: int) -> None:
        self.k, self.of, self.name = k, of, f"outer.{k}"
        self.x = self.part(s.x)
        self.state = {name: self.part(vector) for name, vector in s.state.items()}

    def part(self, vector: Vector) -> Vector:
        return vector.part(self.k, self.of)


@dataclass(frozen=True)
class Outer(Method):
    """Each replica trains H steps alone. Then φ, which is the same on all, takes a step by the mean movement, mean(φ - x); x <- φ.

    - ``H``: local steps. ``wire``: how the movement travels.
    - ``feedback``: what the wire has lost of a movement is added to the next one; by default with a wire that rounds.
    - ``delay``: the outer step follows so many local steps after the movement has set out, and these are kept: x <- x + φ - (x as sent).
    - ``fragments``: the columns in so many parts. Each has a period of H steps, and they set out one after the other, at even distances.
    - ``moments``: of the inner optimizer, at an outer step. ``own``: kept; ``mean``: averaged; ``reset``: begun anew;
      ``shared``: Adam's second moments become those of the mean gradient (``second_moments.py``).
    """

    name, by_name, own_wire, graphless, alike = "outer", False, True, True, True
    H: int = 32
    wire: MeanWireName = "float32"
    feedback: bool | None = None
    delay: int = 0
    fragments: int = 1
    moments: Literal["own", "mean", "reset", "shared"] = "own"

    def __post_init__(self) -> None:
        wire(self.wire, OF_MEANS)
        self.within("H", "[1, inf)")
        self.within("delay", f"[0, {self.H})")
        self.within("fragments", f"[1, {self.H}]")
        if self.feedback and WIRES[self.wire] is EXACT:
            self._refuse("feedback=true adds what a wire has lost, and float32 loses nothing; add wire=8bits or 4bits")
        if self.moments == "mean" and self.delay:
            self._refuse(f"moments=mean is done at once, and delay={self.delay} is later; use moments=own, or delay=0")
        if self.moments == "reset" and self.fragments > 1:
            self._refuse(
                f"moments=reset begins all moments anew, and fragments={self.fragments} have their steps apart; use moments=own"
            )

    def _refuse(self, why: str) -> None:
        raise GossamerError(f"method {self.name!r}: {why}")

    def check(self, graph: Graph, optimizers: Sequence[torch.optim.Optimizer] = ()) -> str | None:
        if self.moments == "mean" and optimizers and not moments.names(optimizers):
            return (
                f"method {self.name!r}: moments=mean averages those of Adam and its kin, or momentum; "
                f"{type(optimizers[0]).__name__} has none here; use moments=own or reset"
            )
        if self.moments == "shared" and (why := moments.shared_refusal(optimizers)):
            return f"method {self.name!r}: {why}"
        return super().check(graph, optimizers)

    @property
    def _keeps_lost(self) -> bool:
        return WIRES[self.wire] is not EXACT if self.feedback is None else self.feedback

    def state(self, like: Vector) -> dict[str, Vector]:
        """``anchor``: φ. ``before``: x when the movement set out."""
        own = {"anchor": like.clone()} | ({"lost": like.zeros()} if self._keeps_lost else {})
        own |= {"before": like.clone()} if self.delay else {}
        return own | (second_moments.state(like, self.delay, self.fragments) if self.moments == "shared" else {})

    def after_update(self, s: Step) -> None:
        s.look()
        for k in range(self.fragments):
            self._exchange(s, Fragment(s, k, self.fragments))

    def phase(self, t: int, fragment: int) -> int:
        """How many steps before step t the fragment's last exchange set out, after a step itself; 0: in this one."""
        return (t + 1 - fragment * self.H // self.fragments) % self.H

    def _exchange(self, s: Step, own: Fragment) -> None:
        phase = self.phase(s.t, own.k)
        if self.moments == "shared":
            second_moments.count(s, own)
        if phase == 0:
            if self.moments == "shared":
                second_moments.depart(s, own)
            if self.delay:
                own.state["before"].copy_(own.x)
            s.crossing[own.name] = self.send(s, own, s.t)
        elif phase <= min(self.delay, s.t) and own.name not in s.crossing:
            # Of a checkpoint, or with other members than it set out with: once more, as it was.
            s.crossing[own.name] = self.send(s, own, s.t - phase)
        if phase == self.delay and own.name in s.crossing:
            self.arrive(s, own)

    def send(self, s: Step, own: Fragment, turn: int) -> AgreedMean | Transfer:
        moved, lost = own.state["anchor"] - own.state.get("before", own.x), own.state.get("lost")
        return s.mean(moved, wire=WIRES[self.wire], turn=turn, ahead=self.delay > 0, plus=lost)

    def arrive(self, s: Step, own: Fragment) -> None:
        transfer, arrived = s.crossing.pop(own.name), own.x.zeros()
        transfer.into(arrived)
        if not s.sound(arrived):
            return  # on no worker; the next one carries both movements
        if self._keeps_lost and isinstance(transfer, AgreedMean):
            own.state["lost"].copy_(transfer.lost[0])
        if self.moments == "shared":
            second_moments.arrive(s, own, arrived)
        self.step(s, own, arrived)
        if self.moments == "reset":
            s.reset_moments()
        elif self.moments == "mean":
            made = s.moments()
            self.average(s, *map(own.part, made.values()))
            s.set_moments(made)

    def step(self, s: Step, own: Fragment, moved: Vector) -> None:
        """φ takes its step, and x follows. ``moved``: what has arrived."""
        anchor, before = own.state["anchor"], own.state.get("before")
        self.outer(s, own.state, moved)
        if before is None:
            own.x.copy_(anchor)
        else:
            own.x.add_(anchor).sub_(before)

    def outer(self, s: Step, state: dict[str, Vector], moved: Vector) -> None:
        raise NotImplementedError

    def average(self, s: Step, *vectors: Vector) -> None:
        s.mean(*vectors, wire=EXACT if WIRES[self.wire] is EXACT else BFLOAT16).into(*vectors)

    def members_changed(self, s: Step) -> None:
        """What is in flight is begun again, over the new members. Newcomers have lost nothing."""
        s.crossing.clear()
        if "lost" in s.state:
            s.state["lost"].zero_()
