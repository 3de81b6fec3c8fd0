"""Methods around another one: ``"qgm + pga:every=8"``. What the outer one does not do itself, the inner one does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import ClassVar

import torch

from gossamer.graphs import Graph
from gossamer.methods.base import METHODS, Method
from gossamer.methods.gossip import AdaptThenCombine
from gossamer.methods.step import Step
from gossamer.rows.vector import Vector


@dataclass(frozen=True)
class Around(Method):
    """``own``: the moments in which the outer one does something, whatever the inner one does."""

    name, by_name = "around", False
    own: ClassVar[tuple[str, ...]] = ()
    around: Method = field(default_factory=AdaptThenCombine)

    # What an inner method needs, the outer one needs.
    averages = property(lambda self: self.around.averages)
    sums = property(lambda self: self.around.sums)
    static = property(lambda self: self.around.static)
    optimizer = property(lambda self: self.around.optimizer)
    rows = property(lambda self: self.around.rows)
    own_wire = property(lambda self: self.around.own_wire)
    graphless = property(lambda self: self.around.graphless)
    alike = property(lambda self: self.around.alike)
    inner = property(lambda self: self.around.inner)

    def does(self, moment: str) -> bool:
        return moment in self.own or self.around.does(moment)

    def state(self, like: Vector) -> dict[str, Vector]:
        return self.around.state(like)

    def before_forward(self, s: Step) -> None:
        self.around.before_forward(s)

    def after_backward(self, s: Step) -> None:
        self.around.after_backward(s)

    def before_update(self, s: Step) -> None:
        self.around.before_update(s)

    def after_update(self, s: Step) -> None:
        self.around.after_update(s)

    def merge(self, s: Step) -> None:
        self.around.merge(s)

    def members_changed(self, s: Step) -> None:
        self.around.members_changed(s)

    def check(self, graph: Graph, optimizers: Sequence[torch.optim.Optimizer] = ()) -> str | None:
        return self.around.check(graph, optimizers)

    def describe(self) -> str:
        options = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "around"}
        return f"{self.around.describe()} + {METHODS.describe(self.name, options)}"
