"""What a method looks like, and how to find one by name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Literal

import torch

from gossamer.errors import GossamerError
from gossamer.graphs import Graph
from gossamer.methods.step import Step
from gossamer.rows.vector import Vector
from gossamer.spelling import Registry, plain_name

ALL_REDUCE = "all-reduce"
METHODS: Registry[Method] = Registry("method")
# Names that were used for the same method elsewhere, or are in old specs.
_ALIASES = {"dsgd-awc": "awc", "dsgd-atc": "atc", "allreduce": ALL_REDUCE, "centralized": ALL_REDUCE, "ddp": ALL_REDUCE}


@dataclass(frozen=True)
class Method:
    """The mathematics of a step, on rows ``[r, D]``. A method never knows which process holds the other rows, nor what calls the optimizer.

    A subclass is a frozen dataclass: its options are its fields, ``"name:key=value"`` is how a person writes them, and it holds no handles.
    """

    name: ClassVar[str]
    averages: ClassVar[Literal["parameters", "gradients"]] = "parameters"  # gradients: replicas start, and stay, the same
    sums: ClassVar[Literal["rows", "columns", "both"]] = "rows"  # of W: those that must be 1
    static: ClassVar[bool] = False  # whether it needs the same W in every step
    optimizer: ClassVar[Literal["any", "plain SGD", "Adam"]] = "any"  # plain SGD: the method makes the whole direction itself
    rows: ClassVar[int] = 1  # vectors that travel in a step
    own_wire: ClassVar[bool] = False  # whether rows travel as its option ``wire`` says, whatever the driver was told
    one_rate: ClassVar[bool] = False  # whether it divides by the learning rate, so that all parameter groups need the same
    plainly: ClassVar[bool] = False  # whether ``after_update`` does nothing to x but x <- W x
    graphless: ClassVar[bool] = False  # whether it averages over all replicas, or with peers that it chooses itself
    alike: ClassVar[bool] = False  # whether some of its own state is the same on all replicas, to the bit
    shares_momentum: ClassVar[bool] = False  # whether it calls ``Step.share_momentum``
    by_name: ClassVar[bool] = True  # whether a person may ask for it by its name

    def __init_subclass__(cls) -> None:
        name = cls.__dict__.get("name")
        if not isinstance(name, str):
            raise GossamerError(f"class {cls.__name__}: a method needs a name of its own, as in name = 'my-method'")
        known = METHODS.makers.get(name)
        # A dataclass with slots is made twice, from the same lines.
        if known is not None and (known.__module__, known.__qualname__) != (cls.__module__, cls.__qualname__):
            raise GossamerError(
                f"class {cls.__name__}: there is a method {name!r} already, {known.__module__}.{known.__qualname__}"
            )
        if cls.by_name:
            METHODS.makers[name] = cls

    def within(self, key: str, interval: str) -> None:
        """An error for an option that is out of range: ``"[0, 1)"``, from 0 to below 1. None is no value."""
        value, (low, high) = getattr(self, key), map(float, interval[1:-1].split(","))
        if value is None:
            return
        inside = (low <= value if interval[0] == "[" else low < value) and (
            value <= high if interval[-1] == "]" else value < high
        )
        if not inside:
            raise GossamerError(f"method {self.name!r}: {key}={value} is out of range; it is in {interval}")

    @property
    def inner(self) -> Method:
        """The method that others stand around; by itself, this one."""
        return self

    @property
    def starts_alike(self) -> str:
        """Why replicas must start the same, if they must."""
        if self.averages == "gradients":
            return "averages gradients"
        return "takes outer steps from one point" if self.alike else ""

    def describe(self) -> str:
        """The canonical spelling."""
        return METHODS.describe(self.name, {field.name: getattr(self, field.name) for field in fields(self)})

    def check(self, graph: Graph, optimizers: Sequence[torch.optim.Optimizer] = ()) -> str | None:
        """Why the method can't run with these, and what would be right."""
        if self.sums != "columns" and not graph.rows_sum_to_one:
            return (
                f"method {self.name!r} averages what a replica receives, and in graph {graph.name!r} that is no average (rows of W do not "
                "sum to 1); use method 'push-sum', or a graph such as ring"
            )
        if self.sums != "rows" and not graph.columns_sum_to_one:
            return (
                f"method {self.name!r} needs a graph that keeps the mean (columns of W sum to 1), and {graph.name!r} does not; use a named "
                "graph such as ring or one-peer-exponential, or from_networkx"
            )
        if self.static and graph.period > (cycle := getattr(self, "cycle", 1)):
            also = f", or {self.name}:cycle={graph.period}" if hasattr(self, "cycle") else ""
            needs = "needs the same W in every step" if cycle == 1 else f"keeps copies for {cycle} W in turn"
            return f"method {self.name!r} {needs}, and {graph.name!r} has {graph.period}; use ring or exponential{also}"
        for optimizer in optimizers if self.optimizer == "plain SGD" else ():
            groups = optimizer.param_groups
            extra = [key for key in ("momentum", "maximize") if any(group.get(key) for group in groups)]
            if not isinstance(optimizer, torch.optim.SGD) or extra:
                shown = " with ".join([type(optimizer).__name__, *extra[:1]])
                return f"method {self.name!r} makes its own direction, so it needs SGD without momentum; this is {shown}"
            if self.one_rate and len({float(group["lr"]) for group in groups}) > 1:
                rates = ", ".join(f"{float(group['lr']):g}" for group in groups)
                return (
                    f"method {self.name!r} measures movements in units of the learning rate, so all parameter groups need the same one; "
                    f"these have {rates}. Use 'atc', 'tracking' or 'decentlam'"
                )
        for optimizer in optimizers if self.optimizer == "Adam" else ():
            if "adam" not in type(optimizer).__name__.lower():
                return f"method {self.name!r} is written for Adam and its kin; this is {type(optimizer).__name__}; use 'atc' or 'choco'"
        return None

    def refuse(self, graph: Graph | None, optimizers: Sequence[torch.optim.Optimizer], step: int = 0) -> None:
        """An error if it can't run with these. ``graph`` None: it is not known yet."""
        if graph is not None and (why := self.check(graph, optimizers)):
            raise GossamerError(f"step {step}: {why}" if step else why)

    def does(self, moment: str) -> bool:
        """Whether it does anything in a moment."""
        return getattr(type(self), moment) is not getattr(Method, moment)

    def state(self, like: Vector) -> dict[str, Vector]:
        """Own vectors of each replica, as they are at the start. They are checkpointed, taken along when members change, and handed to
        workers that join."""
        return {}

    def begin(self, s: Step) -> None:
        """Before the first step."""
        s.state = self.state(s.x)
        s.part = f"methods/{self.name}" if s.state else None

    def before_forward(self, s: Step) -> None:
        """Parameters may be read, not written, until ``before_update``."""

    def after_backward(self, s: Step) -> None:
        """Gradients are there, and not clipped yet."""

    def before_update(self, s: Step) -> None:
        """The optimizer is about to run."""

    def after_update(self, s: Step) -> None:
        """The optimizer has run."""

    def merge(self, s: Step) -> None:
        """The last step is done, and the driver knows it: all replicas become one. (In a person's own loop that is ``average_()``.)"""

    def members_changed(self, s: Step) -> None:
        """Before a step: other replicas take part than in the last one, or with another graph. Newcomers have the state of a donor."""


def known(name: str) -> str:
    """The canonical name of a method, for any of its names."""
    return _ALIASES.get(name, name)


def method(text: str | Method) -> Method:
    """``"atc"``, ``"qgm:beta=0.9"``, ``"qgm + pga:every=8"`` … or a Method."""
    if isinstance(text, Method):
        return text
    if not isinstance(text, str):
        raise GossamerError(f"method={text!r}: a method is a name such as 'atc', or a Method")
    made: Any = None
    for part in text.split(" + "):
        name, colon, options = part.partition(":")
        outer: Any = METHODS.make(known(plain_name(name)) + colon + options)
        if made is not None and not hasattr(outer, "around"):
            raise GossamerError(
                f"method {text!r}: {outer.name!r} does not go around another method; behind + may stand pga, control or merge"
            )
        made = outer if made is None else replace(outer, around=made)
    return made
