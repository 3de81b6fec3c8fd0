"""Centralized training: gradients are averaged over all replicas in every step, so all replicas stay the same."""

from dataclasses import dataclass

from gossamer.methods.base import Method
from gossamer.methods.step import Step


@dataclass(frozen=True)
class AllReduce(Method):
    """As ``DistributedDataParallel`` does."""

    name, averages = "all-reduce", "gradients"

    def after_backward(self, s: Step) -> None:
        s.mean(s.grad).into(s.grad)

    def after_update(self, s: Step) -> None:
        s.look()
