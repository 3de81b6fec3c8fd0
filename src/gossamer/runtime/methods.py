"""Ways to train on several workers, as the model knows them.

``parse`` reads them as a person writes them: ``"ddp"``, ``"ddp, float16"``, ``"ddp (no overlap)"``,
``"one-peer-exponential, bfloat16, H=4"``, ``"complete, atc"``, ``"ring, edges"``, ``"all-reduce"``, ``"ada-auto"``,
``"decent-dp: hypercube"``, ``"sgp"``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Literal

from gossamer.errors import GossamerError
from gossamer.graphs import Graph, told_hosts
from gossamer.schedules import AdaAuto, Order, Schedule, schedule

ALL_REDUCE = "all-reduce"


@dataclass(frozen=True)
class Method(ABC):
    @property
    @abstractmethod
    def label(self) -> str: ...


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
    """Gossamer's ``DecentralizedDataParallel``, with its options. ``verb``: how rows travel; "auto" is what the library does."""

    graph: str | Graph | Schedule = "one-peer-exponential"
    order: Order = "awc"
    wire: Literal["float32", "bfloat16"] = "float32"
    local_steps: int = 1
    send_copy: bool = False
    verb: Literal["auto", "edges", "slices"] = "auto"

    def __post_init__(self) -> None:
        if self.local_steps < 1:
            raise GossamerError(f"local_steps={self.local_steps}: workers average every that many steps, so it is at least 1")

    @property
    def label(self) -> str:
        parts = [_name(self.graph)]
        parts += [self.order] if self.order == "atc" else []
        parts += [self.wire] if self.wire != "float32" else []
        parts += [f"H={self.local_steps}"] if self.local_steps > 1 else []
        parts += ["send_copy"] if self.send_copy else []
        parts += [self.verb] if self.verb != "auto" else []
        return ", ".join(parts)

    @property
    def edge_share(self) -> float:
        return 0.5 if self.wire == "bfloat16" else 1.0


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
    atc = name.endswith(" (atc)")
    graph = name.removesuffix(" (atc)")
    by_itself = graph.partition(":")[0].strip().lower() == "ada-auto"
    chosen: dict[str, object] = {"graph": graph, "order": "atc" if atc else AdaAuto.order if by_itself else Schedule.order}
    for option in options:
        if option in ("awc", "atc"):
            chosen["order"] = option
        elif option in ("float32", "bfloat16"):
            chosen["wire"] = option
        elif option in ("edges", "slices"):
            chosen["verb"] = option
        elif option == "send_copy":
            chosen["send_copy"] = True
        elif option.startswith("H=") and option[2:].isdigit():
            chosen["local_steps"] = int(option[2:])
        else:
            raise GossamerError(
                f"method {text!r}: {option!r} is not known; after a graph may stand atc, bfloat16, H=4, send_copy, edges or slices"
            )
    return Gossip(**chosen)  # type: ignore[arg-type]
