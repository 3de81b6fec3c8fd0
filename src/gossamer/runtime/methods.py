"""Ways to train on several workers, as the model knows them.

``parse`` reads them as a person writes them: ``"ddp"``, ``"ddp, float16"``, ``"ddp (no overlap)"``,
``"one-peer-exponential, bfloat16, H=4"``, ``"complete, atc"``, ``"ring, tracking"``,
``"ring, choco:wire=sign"``, ``"ring, edges"``, ``"all-reduce"``, ``"all-reduce, 8bits"``, ``"ada-auto"``,
``"diloco:H=32,delay=8,wire=4bits"``,
``"decent-dp: hypercube"``, ``"sgp"``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import Literal

import torch

from gossamer.errors import GossamerError
from gossamer.graphs import Graph, plain_name, told_hosts
from gossamer.methods import ALL_REDUCE, Around, Averaging, Order, Outer
from gossamer.methods import Method as Rule
from gossamer.rows.vector import Vector
from gossamer.rows.wires import DIFFERENCES, EXACT, WIRES
from gossamer.schedules import Fixed, Schedule, schedule


@dataclass(frozen=True)
class Method(ABC):
    @property
    @abstractmethod
    def label(self) -> str: ...

    @property
    def vectors(self) -> int:
        """What a worker keeps beside the optimizer's state: so many vectors as large as the parameters."""
        return 0


@dataclass(frozen=True)
class DDP(Method):
    """torch's DistributedDataParallel: gradients are all-reduced around a ring, a bucket at a time, under backward. ``bucket_mb`` as
    torch takes it. Without ``overlap``: all of them when backward is done. ``wire="float16"``: with torch's ``fp16_compress_hook``."""

    overlap: bool = True
    bucket_mb: float | None = None
    wire: Literal["float32", "float16"] = "float32"

    @property
    def label(self) -> str:
        return ("ddp" if self.overlap else "ddp (no overlap)") + (", float16" if self.wire == "float16" else "")

    @property
    def share(self) -> float:
        """Of the bytes of float32."""
        return 0.5 if self.wire == "float16" else 1.0


@dataclass(frozen=True)
class Gossip(Method):
    """Gossamer's ``DecentralizedDataParallel``, with its options. ``verb``: how rows travel; "auto" is what the library does. ``rule``: a
    method that averages after the update, as atc does, but sends more vectors, or in fewer bytes; what it computes beside is not in the
    model."""

    graph: str | Graph | Schedule = "one-peer-exponential"
    order: Order = "awc"
    wire: str = "float32"
    local_steps: int = 1
    send_copy: bool = False
    verb: Literal["auto", "edges", "slices"] = "auto"
    rule: Rule | None = None

    def __post_init__(self) -> None:
        Averaging(self.graph, wire=self.wire, every=self.local_steps)  # checked there

    @property
    def label(self) -> str:
        if self.rule is not None and self.rule.graphless:
            return self.rule.describe()
        parts = [_name(self.graph)]
        parts += [self.rule.describe()] if self.rule is not None else [self.order] if self.order == "atc" else []
        parts += [self.wire] if self.wire != "float32" else []
        parts += [f"H={self.local_steps}"] if self.local_steps > 1 else []
        parts += ["send_copy"] if self.send_copy else []
        parts += [self.verb] if self.verb != "auto" else []
        return ", ".join(parts)

    @property
    def _own_share(self) -> float:
        wires = WIRES if self.rule is None or self.rule.graphless else DIFFERENCES
        return wires[getattr(self.rule, "wire", "float32")].share(torch.float32)

    @property
    def coded(self) -> bool:
        """Whether rows travel on the rule's own wire, and it is one that rounds."""
        return self._own_share < 1

    @property
    def edge_share(self) -> float:
        return self._own_share if self.coded else 0.5 if self.wire == "bfloat16" else 1.0

    @property
    def rows(self) -> int:
        """Vectors that travel in a step."""
        return 1 if self.rule is None else self.rule.rows

    @property
    def vectors(self) -> int:
        like = Vector([torch.zeros(1, 64)])
        return 0 if self.rule is None else sum(sum(own.numels) for own in self.rule.state(like).values()) // 64

    @property
    def volume(self) -> float:
        """Of an outer step, or of gradients: rows in float32 that weigh as much as what travels."""
        moments = 2.0 * (0.5 if self.coded else 1.0) if isinstance(self.rule, Outer) and self.rule.moments == "mean" else 0.0
        return self._own_share + moments


@dataclass(frozen=True)
class DecentDP(Method):
    """decent-dp: a group all-reduces a bucket of parameters at a time; it starts in backward, when the bucket is updated, and is
    waited for in the next backward."""

    graph: str | Graph = "hypercube"
    bucket_mb: float = 25.0

    @property
    def label(self) -> str:
        return f"decent-dp: {_name(self.graph)}"


@dataclass(frozen=True)
class StochasticGradientPush(Method):
    """SGP: one-peer exponential push-sum. Transfers are pipelined as decent-dp's are, and each step has ``overhead`` seconds of its
    own (packing, the gossip thread, the push-sum weight)."""

    graph: str | Graph = "one-peer-exponential"
    overhead: float = 0.0
    bucket_mb: float = 25.0

    @property
    def label(self) -> str:
        return "sgp"


def _name(graph: str | Graph | Schedule) -> str:
    return graph if isinstance(graph, str) else graph.name if isinstance(graph, Graph) else graph.describe()


def graph_of(method: Method, n: int, per_host: int = 1) -> Schedule:
    """The method's graph for n workers. A graph over hosts takes the workers per host from the cluster, if it is not told."""
    graph = getattr(method, "graph", "complete")
    if graph == ALL_REDUCE:
        graph = "complete"
    graph = told_hosts(graph, per_host)
    try:
        return schedule(graph, n)
    except GossamerError as error:
        raise GossamerError(f"method {method.label!r} does not fit {n} workers: {error}") from None


def steps_per_exchange(method: Method, n: int, per_host: int = 1) -> float:
    """How many steps come to an exchange: more than 1 with local steps."""
    if not isinstance(method, Gossip):
        return 1.0
    planned = graph_of(method, n, per_host)
    rounds = planned.fixed.rounds if isinstance(planned, Fixed) else ()
    return method.local_steps * (len(rounds) / max(1, sum(r.degree > 0 for r in rounds)) if rounds else 1.0)


def parse(text: str) -> Method:
    name, *options = (part.strip() for part in text.split(", "))
    if name in ("ddp", "ddp (no overlap)"):
        if options not in ([], ["float16"]):
            raise GossamerError(f"method {text!r}: after ddp only float16 may stand")
        return DDP(overlap=name == "ddp", wire="float16" if options else "float32")
    if name == "sgp":
        return StochasticGradientPush()
    if name.startswith("decent-dp"):
        return DecentDP(name.partition(":")[2].strip() or "hypercube")
    verbs = [option for option in options if option in ("edges", "slices")]
    own: dict[str, object] = {"send_copy": "send_copy" in options, "verb": verbs[0] if verbs else "auto"}
    how = Averaging.parse(
        ", ".join([name.replace(" (atc)", ", atc"), *(o for o in options if o not in ("send_copy", "edges", "slices"))])
    )
    if how.graph == "auto":
        raise GossamerError(
            f"method {text!r}: the library's default is 'all-reduce' or 'all-reduce, 8bits', whichever it finds faster; name these two"
        )
    if how.averages_gradients:
        rounds = getattr(how.method, "wire", EXACT.name) != EXACT.name
        return Gossip(ALL_REDUCE, **own, rule=how.method if rounds else None)  # type: ignore[arg-type]
    if isinstance(how.method, Outer):
        return Gossip("complete", "atc", local_steps=how.method.H, **own, rule=how.method)  # type: ignore[arg-type]
    assert isinstance(how.graph, str)
    by_itself = plain_name(how.graph) == "ada-auto"
    order = how.method.name if how.method is not None else "atc" if by_itself else "awc"
    if order in ("awc", "atc"):
        return Gossip(how.graph, order, how.wire, how.every, **own)  # type: ignore[arg-type]
    if isinstance(how.method, Around):
        raise GossamerError(f"method {text!r}: how often {order!r} averages is not in the runtime model; leave it out")
    every = how.every * getattr(how.method, "p", 1)
    made = Gossip(how.graph, "atc", how.wire, every, **own, rule=how.method)  # type: ignore[arg-type]
    return replace(made, verb="edges") if made.coded else made  # codes can't be added up on the way
