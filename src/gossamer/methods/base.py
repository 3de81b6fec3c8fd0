"""What a method looks like, and how to find one by name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from gossamer.errors import GossamerError
from gossamer.methods.step import Step
from gossamer.rows.vector import Vector
from gossamer.spelling import Registry

_METHODS: Registry[Method] = Registry("method")
# Names that were used for the same method elsewhere, or are in old specs.
_ALIASES = {"dsgd-awc": "awc", "dsgd-atc": "atc", "allreduce": "all-reduce", "centralized": "all-reduce", "ddp": "all-reduce"}


@dataclass(frozen=True)
class Method:
    """The mathematics of a step, on rows ``[r, D]``. A method never knows which process holds the other rows, nor what calls the optimizer.

    A subclass is a frozen dataclass: its options are its fields, ``"name:key=value"`` is how a person writes them, and it holds no handles.
    """

    name: ClassVar[str]
    averages: ClassVar[Literal["parameters", "gradients"]] = "parameters"  # gradients: replicas start, and stay, the same

    def __init_subclass__(cls) -> None:
        name = cls.__dict__.get("name")
        if not isinstance(name, str):
            raise GossamerError(f"class {cls.__name__}: a method needs a name of its own, as in name = 'my-method'")
        known = _METHODS.makers.get(name)
        # A dataclass with slots is made twice, from the same lines.
        if known is not None and (known.__module__, known.__qualname__) != (cls.__module__, cls.__qualname__):
            raise GossamerError(
                f"class {cls.__name__}: there is a method {name!r} already, {known.__module__}.{known.__qualname__}"
            )
        _METHODS.makers[name] = cls

    def state(self, like: Vector) -> dict[str, Vector]:
        """Own vectors of each replica, as they are at the start. They are checkpointed, and taken along when members change."""
        return {}

    def before_forward(self, s: Step) -> None:
        """Parameters may be read, not written, until ``before_update``."""

    def after_backward(self, s: Step) -> None:
        """Gradients are there, and not clipped yet."""

    def before_update(self, s: Step) -> None:
        """The optimizer is about to run."""

    def after_update(self, s: Step) -> None:
        """The optimizer has run."""


def method(text: str | Method) -> Method:
    """``"atc"``, ``"qgm:beta=0.9"`` … or a Method."""
    if isinstance(text, Method):
        return text
    name, colon, options = text.partition(":")
    return _METHODS.make(_ALIASES.get(name.strip().lower().replace("_", "-"), name) + colon + options)
