"""The learning rate as a pure function of the step: a base, scaled with the number of replicas, times a shape over time."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Literal

from gossamer.errors import GossamerError

Scaling = Literal["none", "linear", "sqrt"]


class Shape(ABC):
    """A factor on the learning rate at ``step`` of ``steps``."""

    @abstractmethod
    def factor(self, step: int, steps: int) -> float: ...


@dataclass(frozen=True)
class Constant(Shape):
    def factor(self, step: int, steps: int) -> float:
        return 1.0


@dataclass(frozen=True)
class WarmupCosine(Shape):
    """Linear from ``start`` to 1 over the first ``warmup`` (a fraction of the steps), then a half cosine down to ``final``."""

    warmup: float = 0.1
    start: float = 0.1
    final: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.warmup < 1:
            raise GossamerError(f"warmup={self.warmup} is out of range; it is a fraction of the steps, from 0 to below 1")

    def factor(self, step: int, steps: int) -> float:
        warm = self.warmup * steps
        if step < warm:
            return self.start + (1 - self.start) * step / warm
        progress = (step - warm) / max(1.0, steps - warm)
        return self.final + (1 - self.final) * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))


@dataclass(frozen=True)
class StepDecay(Shape):
    """Times ``decay`` at each of ``milestones`` (fractions of the steps), after a linear warm-up."""

    milestones: tuple[float, ...] = (0.5, 0.75)
    decay: float = 0.1
    warmup: float = 0.0
    start: float = 0.1

    def __post_init__(self) -> None:
        if not self.milestones or not all(0 < milestone < 1 for milestone in self.milestones):
            raise GossamerError(
                f"milestones={list(self.milestones)}: they are fractions of all steps, between 0 and 1; epoch 30 of 90 is 0.333"
            )
        if not 0 <= self.warmup < 1:
            raise GossamerError(f"warmup={self.warmup} is out of range; it is a fraction of the steps, from 0 to below 1")

    def factor(self, step: int, steps: int) -> float:
        warm = self.warmup * steps
        if step < warm:
            return self.start + (1 - self.start) * step / warm
        return self.decay ** sum(step >= milestone * steps for milestone in self.milestones)


@dataclass(frozen=True)
class InverseSqrt(Shape):
    """Linear warm-up over ``warmup`` steps, then 1/√step; 1 at the peak."""

    warmup: int = 4000

    def __post_init__(self) -> None:
        if self.warmup < 1:
            raise GossamerError(f"warmup={self.warmup} is out of range; it counts steps, from 1")

    def factor(self, step: int, steps: int) -> float:
        return min((step + 1) / self.warmup, math.sqrt(self.warmup / (step + 1)))


@dataclass(frozen=True)
class LearningRate:
    """``base`` is right for ``reference`` replicas; with n replicas it is scaled by n/reference (linear) or its root (sqrt)."""

    base: float
    shape: Shape = field(default_factory=Constant)
    scaling: Scaling = "none"
    reference: int = 1

    def __post_init__(self) -> None:
        if self.scaling not in ("none", "linear", "sqrt"):
            raise GossamerError(f"scaling={self.scaling!r} is not known; use none, linear or sqrt")
        if self.reference < 1:
            raise GossamerError(f"reference={self.reference} is out of range; it counts replicas, from 1")
        if not self.base > 0:
            raise GossamerError(f"learning rate {self.base} is out of range; it is above 0")

    def peak(self, n: int) -> float:
        ratio = n / self.reference
        return self.base * {"none": 1.0, "linear": ratio, "sqrt": math.sqrt(ratio)}[self.scaling]

    def at(self, step: int, steps: int, n: int) -> float:
        return self.peak(n) * self.shape.factor(step, steps)
