"""One description of how to average: which graph, which method, on which wire, every how many steps.

The library's arguments, ``Settings``, specs and the planner all mean the same by it. As a person writes it: ``"ring"``,
``"one-peer-exponential, atc, bfloat16, H=4"``, ``"ring, qgm:beta=0.8"``, ``"all-reduce"``.
"""

from __future__ import annotations

from dataclasses import dataclass

from gossamer.errors import GossamerError
from gossamer.graphs import Graph, plain_name
from gossamer.methods.base import ALL_REDUCE, METHODS, Method, known, method
from gossamer.methods.policies.base import Policy
from gossamer.rows.wires import ANY_METHOD, BFLOAT16, EXACT, wire
from gossamer.schedules import Schedule


@dataclass(frozen=True)
class Averaging:
    """``method`` None: what the schedule asks for, or else what the caller takes by default. ``every``: a step with averaging comes every
    that many steps."""

    graph: str | Graph | Schedule
    method: Method | None = None
    wire: str = EXACT.name
    every: int = 1

    def __post_init__(self) -> None:
        wire(self.wire, ANY_METHOD)
        if self.every < 1:
            raise GossamerError(f"local_steps={self.every}: workers average every that many steps, so it is at least 1")

    @property
    def averages_gradients(self) -> bool:
        return self.method is not None and self.method.averages == "gradients"

    def rule(self, planned: Schedule, default: str) -> Method:
        """The method of a step. ``default``: if neither a person nor a policy says which."""
        if isinstance(planned, Policy):
            return planned.method(self.method)
        return self.method or method(default)

    def refuse(self, planned: Schedule) -> None:
        """What the schedule, or the method, can't work with."""
        rule = self.method
        if rule is not None and rule.static and self.every > 1:
            raise GossamerError(
                f"local_steps={self.every}: method {rule.describe()!r} needs the same W in every step, and between averages there is none; "
                + (f"use '{rule.name}:p={self.every}'" if hasattr(rule, "p") else "leave it at 1")
            )
        if rule is not None and rule.own_wire and self.wire != EXACT.name:
            inner = rule.inner.name
            raise GossamerError(f"wire={self.wire!r}: method {inner!r} has a wire of its own; write '{inner}:wire={self.wire}'")
        if planned.watches and self.every > 1:
            raise GossamerError(
                f"local_steps={self.every}: {planned.describe()!r} decides by itself how often to average; leave it at 1"
            )

    @classmethod
    def of(
        cls,
        graph: str | Graph | Schedule,
        rule: str | Method | None,
        wire: str = EXACT.name,
        every: int = 1,
        order: str | None = None,
    ) -> Averaging:
        """From separate arguments. A graph by the name of all-reduce, or one of its other names, is that method. ``order``: the method,
        if the graph is another one and ``rule`` is not given."""
        chosen = None if rule is None else method(rule)
        if isinstance(graph, str) and known(plain_name(graph)) == ALL_REDUCE:
            chosen, graph = chosen or method(ALL_REDUCE), "complete"
        if chosen is not None and chosen.averages == "gradients":
            if every > 1:
                raise GossamerError(
                    f"local_steps={every}: method {chosen.name!r} averages gradients in every step; leave it at 1, accumulate "
                    f"gradients with no_sync(), or average parameters in every {every} steps (graph='complete', local_steps={every})"
                )
            graph = "complete"
        return cls(graph, method(order) if chosen is None and order else chosen, wire, every)

    @classmethod
    def parse(cls, text: str) -> Averaging:
        graph, *options = (part.strip() for part in text.split(", "))
        rule, chosen_wire, every = None, EXACT.name, 1
        for option in options:
            if option.startswith("H=") and option[2:].isdigit():
                every = int(option[2:])
            elif option in {one.name for one in ANY_METHOD}:
                chosen_wire = option
            elif known(plain_name(option.split(" + ")[0])) in METHODS.makers:
                rule = option
            else:
                raise GossamerError(
                    f"method {text!r}: {option!r} is not known; after a graph may stand a method ({', '.join(sorted(METHODS.makers))}), "
                    f"{BFLOAT16.name}, or H=4 to average in every fourth step"
                )
        return cls.of(graph, rule, chosen_wire, every)

    def describe(self) -> str:
        if self.averages_gradients and self.method is not None:
            return self.method.describe()
        graph = (
            self.graph
            if isinstance(self.graph, str)
            else self.graph.name
            if isinstance(self.graph, Graph)
            else self.graph.describe()
        )
        parts = [graph, "" if self.method is None else self.method.describe(), "" if self.wire == EXACT.name else self.wire]
        return ", ".join(filter(None, [*parts, f"H={self.every}" if self.every > 1 else ""]))
