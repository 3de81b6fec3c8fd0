"""Local SGD (Stich, ICLR 2019), with any inner optimizer: parameters are averaged over all replicas every H steps."""

from __future__ import annotations

from dataclasses import dataclass

from gossamer.methods.outer import Fragment, Outer
from gossamer.methods.step import Step
from gossamer.rows.vector import Vector
from gossamer.rows.wires import EXACT, WIRES
from gossamer.transport.agreed import AgreedMean
from gossamer.transport.transfer import Transfer


@dataclass(frozen=True)
class Local(Outer):
    """x <- mean x. As it stands, with H=8, it is ``complete, atc`` with ``local_steps=8``. On a wire that rounds, or with a delay, what
    travels is the movement since the last mean."""

    name, by_name = "local", True
    H: int = 8

    @property
    def _plain(self) -> bool:
        return WIRES[self.wire] is EXACT and not self.delay and self.moments != "shared"

    def state(self, like: Vector) -> dict[str, Vector]:
        return {} if self._plain else super().state(like)

    def send(self, s: Step, own: Fragment, turn: int) -> AgreedMean | Transfer:
        return s.mean(own.x) if self._plain else super().send(s, own, turn)

    def step(self, s: Step, own: Fragment, moved: Vector) -> None:
        if self._plain:
            own.x.copy_(moved)
        else:
            super().step(s, own, moved)

    def outer(self, s: Step, state: dict[str, Vector], moved: Vector) -> None:
        state["anchor"].sub_(moved)
