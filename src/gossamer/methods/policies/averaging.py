"""One description of how to average: which graph, which method, on which wire, every how many steps.

The library's arguments, ``Settings``, specs and the planner all mean the same by it. As a person writes it: ``"ring"``,
``"one-peer-exponential, atc, bfloat16, H=4"``, ``"ring, qgm:beta=0.8"``, ``"all-reduce"``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from gossamer.errors import GossamerError
from gossamer.graphs import Graph, plain_name
from gossamer.methods.around import Around
from gossamer.methods.base import ALL_REDUCE, METHODS, Method, known, method
from gossamer.methods.policies.base import Policy
from gossamer.rows.wires import ANY_METHOD, BFLOAT16, EXACT, OF_MEANS, WIRES, spelled, wire
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

    def rules(self, planned: Schedule, default: str) -> tuple[Method, ...]:
        """All that a step may have."""
        return planned.methods(self.method) if isinstance(planned, Policy) else (self.rule(planned, default),)

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
        if isinstance(planned, Policy) and planned.alone and (rule is not None or self.wire != EXACT.name or self.every > 1):
            raise GossamerError(
                f"graph {planned.describe()!r} is the library's default: it measures a job's network and chooses by itself, so it "
                "takes no method, wire or local_steps, and DBench does not have it. Leave the graph out in the library, or name one, "
                "such as 'one-peer-exponential' or 'complete'"
            )
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
        if isinstance(graph, str) and ":" not in graph and plain_name(graph) == "auto":
            graph = "auto"
        if graph == "auto" and (rule, order, every) == (None, None, 1) and spelled(wire) != EXACT.name:
            rule = ALL_REDUCE  # auto chooses the wire by itself
        chosen, name = None if rule is None else method(rule), known(plain_name(graph)) if isinstance(graph, str) else ""
        if isinstance(graph, str) and name in METHODS.makers and (own := method(graph)).graphless:
            if chosen is not None and chosen.graphless and chosen.name != own.name:
                raise GossamerError(f"graph={graph!r} and method={chosen.describe()!r} are two methods; give one of them")
            chosen, graph = chosen or own, "complete"
        if chosen is not None and chosen.averages == "gradients":
            if every > 1:
                raise GossamerError(
                    f"local_steps={every}: method {chosen.name!r} averages gradients in every step; leave it at 1, accumulate "
                    f"gradients with no_sync(), or average parameters in every {every} steps (graph='complete', local_steps={every})"
                )
        elif chosen is not None and chosen.graphless and graph not in ("auto", "complete"):
            shown = repr(graph) if isinstance(graph, str) else getattr(graph, "name", type(graph).__name__)
            raise GossamerError(
                f"graph={shown}: method {chosen.name!r} takes no graph; it averages over all replicas, or chooses its peers itself. "
                "Leave the graph out"
            )
        elif chosen is not None and chosen.graphless and every > 1:
            raise GossamerError(
                f"local_steps={every}: method {chosen.name!r} has a period of its own; write '{chosen.name}:H={every}'"
            )
        if chosen is not None and chosen.graphless:
            graph = "complete"
            if spelled(wire) != EXACT.name and getattr(chosen.inner, "wire", "") == EXACT.name:
                chosen, wire = _on_wire(chosen, wire), EXACT.name
        return cls(graph, method(order) if chosen is None and order else chosen, wire, every)

    @classmethod
    def parse(cls, text: str) -> Averaging:
        graph, *options = (part.strip() for part in text.split(", "))
        rule, chosen_wire, every = None, EXACT.name, 1
        for option in options:
            if option.startswith("H=") and option[2:].isdigit():
                every = int(option[2:])
            elif spelled(option) in WIRES:
                chosen_wire = spelled(option)
            elif known(plain_name(option.split(" + ")[0])) in METHODS.makers:
                rule = option
            else:
                raise GossamerError(
                    f"method {text!r}: {option!r} is not known; after a graph may stand a method ({', '.join(sorted(METHODS.makers))}), "
                    f"{BFLOAT16.name}, or H=4 to average in every fourth step"
                )
        return cls.of(graph, rule, chosen_wire, every)

    def describe(self) -> str:
        if self.method is not None and self.method.graphless:
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


def _on_wire(rule: Method, name: str) -> Method:
    """The same method, on another wire of its own."""
    if isinstance(rule, Around):
        return replace(rule, around=_on_wire(rule.around, name))
    takes = ANY_METHOD if rule.name == "noloco" else OF_MEANS
    return replace(rule, wire=wire(name, takes).name)  # type: ignore[call-arg]
