"""Centralized training: gradients are averaged over all replicas in every step, so all replicas stay the same."""

from __future__ import annotations

from dataclasses import dataclass

from gossamer.errors import GossamerError
from gossamer.methods.base import Method
from gossamer.methods.step import Step
from gossamer.rows.vector import Vector
from gossamer.rows.wires import OF_MEANS, WIRES, MeanWireName, wire


@dataclass(frozen=True)
class AllReduce(Method):
    """As ``DistributedDataParallel`` does.

    - ``wire``: how gradients travel. In 8 bits the mean is unbiased, and the same on all replicas, to the bit.
    - ``feedback``: what rounding has lost of a replica's gradients is added to those of its next step.
    """

    name, averages, own_wire, graphless = "all-reduce", "gradients", True, True
    wire: MeanWireName = "float32"
    feedback: bool = False

    def __post_init__(self) -> None:
        wire(self.wire, OF_MEANS)
        if self.feedback and self.wire == "float32":
            raise GossamerError(
                "method 'all-reduce': feedback=true adds what a wire has lost, and float32 loses nothing; add wire=8bits or 4bits"
            )

    def state(self, like: Vector) -> dict[str, Vector]:
        return {"lost": like.zeros()} if self.feedback else {}

    def after_backward(self, s: Step) -> None:
        if s.graph.n == 1:
            return
        lost = s.state.get("lost")
        mean = s.mean(s.grad, wire=WIRES[self.wire], plus=lost)
        mean.into(s.grad)
        if lost is not None and (left := mean.lost[0]).finite():  # or else a GradScaler will leave this step out
            lost.copy_(left)

    def after_update(self, s: Step) -> None:
        s.look()

    def members_changed(self, s: Step) -> None:
        """Newcomers have lost nothing."""
        for lost in s.state.values():
            lost.zero_()
