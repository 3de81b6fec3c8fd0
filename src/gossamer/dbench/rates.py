"""The table ``[learning_rate]`` of a spec."""

from __future__ import annotations

import itertools
from collections.abc import Collection
from typing import Literal

from pydantic import Field, ValidationInfo, model_validator

from gossamer.errors import GossamerError
from gossamer.optim.learning_rates import Constant, InverseSqrt, Scaling, Shape, StepDecay, WarmupCosine
from gossamer.toml_files import Part, stored

_SHAPES = {  # and the keys that each of them uses
    "constant": (),
    "warmup-cosine": ("warmup", "start", "final"),
    "step-decay": ("milestones", "decay", "warmup", "start"),
    "inverse-sqrt": ("warmup",),
}
_OF_SHAPES = tuple(dict.fromkeys(itertools.chain(*_SHAPES.values())))


class LearningRatePart(Part):
    """How the learning rate goes over the steps, and how it grows with the number of replicas."""

    shape: Literal["constant", "warmup-cosine", "step-decay", "inverse-sqrt"] = "constant"
    warmup: float | None = Field(None, ge=0, le=1e9, allow_inf_nan=False)
    start: float = Field(0.1, ge=0, allow_inf_nan=False)
    final: float = Field(0.0, ge=0, allow_inf_nan=False)
    milestones: tuple[float, ...] = Field((0.5, 0.75), strict=False)
    decay: float = Field(0.1, gt=0, allow_inf_nan=False)
    scaling: Scaling = "none"
    reference: int = Field(1, ge=1)

    @model_validator(mode="after")
    def _shape(self, info: ValidationInfo) -> LearningRatePart:
        if not stored(info):
            self.refuse_idle({key for key in _OF_SHAPES if getattr(self, key) != type(self).model_fields[key].default})
            self.made()
        return self

    def refuse_idle(self, given: Collection[str]) -> None:
        """Keys that the shape does not use."""
        for key in (key for key in _OF_SHAPES if key in given):
            if key not in _SHAPES[self.shape]:
                users = " or ".join(repr(shape) for shape, keys in _SHAPES.items() if key in keys)
                raise GossamerError(f"learning_rate.{key} has no effect with shape = {self.shape!r}; it is for {users}")
        if self.shape == "step-decay" and "start" in given and not self.warmup:
            raise GossamerError("learning_rate.start has no effect without warmup")

    def made(self) -> Shape:
        if self.shape == "constant":
            return Constant()
        if self.shape == "warmup-cosine":
            return WarmupCosine(0.1 if self.warmup is None else self.warmup, self.start, self.final)
        if self.shape == "step-decay":
            return StepDecay(self.milestones, self.decay, self.warmup or 0.0, self.start)
        return InverseSqrt(4000 if self.warmup is None else int(self.warmup))
