"""Does it pay, and with which graph? All methods on one cluster, with error bars, and one sentence of advice.

Every figure comes from ``model.py``. Error bars are the 10 % and 90 % quantiles over draws in which all compute times and all
bandwidths are wrong by the cluster's ``uncertainty``; a draw is the same for all methods, so a speed-up is compared like with like.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from gossamer.data.tasks import Task
from gossamer.errors import GossamerError
from gossamer.graphs import OVER_HOSTS
from gossamer.graphs.rounds import Window
from gossamer.methods import AdaAuto
from gossamer.runtime import quality
from gossamer.runtime.cluster import Cluster
from gossamer.runtime.methods import ALL_REDUCE, DDP, Gossip, Method, graph_of, parse, steps_per_exchange
from gossamer.runtime.model import Outcome, simulate
from gossamer.runtime.workload import Workload, gradient_sizes
from gossamer.schedules import Fixed

_DRAWS = 9
_WORTH = 1.05  # a speed-up that is worth changing the way one trains
_ALIKE = 1.03  # two methods that are this near to each other are chosen between by other things than time
_SAME = 1.1  # so much longer than the fastest graph may a method take that trains as all-reduce does: nothing is lost with it
_DENSE = 256  # workers up to which any spectral gap is computed
_MIXES = 0.1  # the spectral gap from which on a graph is proposed: a ring of 32 (0.013) is fast, and its workers hardly hear of each other
_WORK = 1_500_000  # worker-steps per simulation, about

DEFAULT = (
    "ddp",
    "ddp, float16",
    "ada-auto",
    "one-peer-exponential",
    "one-peer-exponential, bfloat16",
    "one-peer-exponential, H=4",
    "ring",
    "ring, bfloat16",
    "complete",
    "hierarchical",
    "alternating-exponential-ring",
    "all-reduce, 8bits",
    "diloco:H=32,delay=8,wire=8bits",
)


@dataclass(frozen=True)
class Row:
    """Seconds per iteration with the interval they lie in, and the speed-up over DDP with its own. ``gap``: the spectral gap per
    step; 1 is the exact mean in each, None if there are too many workers to compute it. ``sent``: bytes per step and worker.
    ``every``: steps per exchange."""

    method: Method
    seconds: float
    low: float
    high: float
    speedup: float
    speedup_low: float
    speedup_high: float
    sent: float
    gap: float | None
    waiting: float
    network: float
    every: float = 1.0

    @property
    def utilization(self) -> float:
        """The share of the time in which workers compute."""
        return 1 - self.waiting - self.network

    @property
    def label(self) -> str:
        return self.method.label


@dataclass(frozen=True)
class Plan:
    """Of one number of workers. ``left_out``: methods that do not fit, and why. ``choice``: what to use; ``advice``: and the reason."""

    cluster: Cluster
    workload: Workload
    rows: tuple[Row, ...]
    left_out: tuple[str, ...]
    choice: str
    advice: str

    @property
    def workers(self) -> int:
        return self.cluster.n

    def row(self, label: str) -> Row:
        return next(row for row in self.rows if row.label == label)


def plan(
    cluster: Cluster,
    workload: Workload,
    methods: Sequence[str] = DEFAULT,
    tick: Callable[[str], object] = lambda label: None,
) -> Plan:
    """``tick`` is told of each method when it begins."""
    if cluster.n < 2:
        raise GossamerError(f"cluster {cluster.name!r} has one worker, which has no other to average with; give --workers")
    chosen = [parse(name) for name in methods]
    if DDP() not in chosen:
        chosen.insert(0, DDP())  # what everything is compared with
    iterations = max(20, min(160, _WORK // cluster.n)) // 4 * 4  # whole rounds of H=4
    rng = np.random.default_rng(0)
    spread = math.log1p(cluster.uncertainty)
    wrong = [(1.0, 1.0), *np.exp(rng.normal(0, spread, (_DRAWS - 1, 2))).tolist()]
    times: dict[str, list[Outcome]] = {}
    fitting, left_out = [], []
    for method in chosen:
        tick(method.label)
        try:
            _check_fit(method, cluster)
            every = math.ceil(steps_per_exchange(method, cluster.n, cluster.per_host))
            whole = -(-iterations // every) * every
            times[method.label] = [
                simulate(cluster.scaled(bandwidth=bandwidth), workload.slower(compute), method, whole, seed)
                for seed, (compute, bandwidth) in enumerate(wrong)
            ]
            fitting.append(method)
        except GossamerError as error:
            if methods is not DEFAULT:
                raise
            left_out.append(str(error))
    rows = tuple(_row(method, times[method.label], times["ddp"], cluster) for method in fitting)
    choice, advice = advise(rows, cluster)
    return Plan(cluster, workload, rows, tuple(left_out), choice, advice)


def _check_fit(method: Method, cluster: Cluster) -> None:
    if getattr(method, "graph", None) in OVER_HOSTS and (cluster.hosts == 1 or cluster.per_host == 1):
        raise GossamerError(f"{method.label} is for several hosts of several workers")


def _row(method: Method, outcomes: list[Outcome], ddp: list[Outcome], cluster: Cluster) -> Row:
    seconds = [outcome.seconds for outcome in outcomes]
    gains = [base.seconds / outcome.seconds for base, outcome in zip(ddp, outcomes, strict=True)]
    first = outcomes[0]
    return Row(
        method,
        first.seconds,
        *_interval(seconds),
        gains[0],
        *_interval(gains),
        first.sent,
        _gap(method, cluster),
        max(first.waiting, 0.0),
        max(first.network, 0.0),
        steps_per_exchange(method, cluster.n, cluster.per_host),
    )


def _interval(values: list[float]) -> tuple[float, float]:
    """The 10 % and 90 % quantiles, and the first value inside."""
    low, high = np.quantile(values, [0.1, 0.9]).tolist()
    return min(low, values[0]), max(high, values[0])


def _gap(method: Method, cluster: Cluster) -> float | None:
    if isinstance(method, DDP) or getattr(method, "graph", None) in (ALL_REDUCE, "complete"):
        gap = 1.0
    else:
        made = graph_of(method, cluster.n, cluster.per_host)
        if isinstance(made, AdaAuto):
            return 1.0  # where it begins
        if not isinstance(made, Fixed):
            return None
        first = made.fixed.rounds[0]
        if isinstance(first, Window):  # a circulant matrix has its eigenvalues in closed form
            turns = 2 * np.pi * np.arange(1, first.n // 2 + 1)[:, None] * np.arange(1, first.half + 1) / first.n
            gap = 1 - float(np.abs((1 + 2 * np.cos(turns).sum(axis=1)) / (2 * first.half + 1)).max())
        elif cluster.n > _DENSE:
            return None
        else:
            gap = made.fixed.spectral_gap()
    every = method.local_steps if isinstance(method, Gossip) else 1
    return 1 - (1 - gap) ** (1 / every)


# --- Advice --------------------------------------------------------------------------------------------------------------


def advise(rows: Sequence[Row], cluster: Cluster) -> tuple[str, str]:
    """What to use, and why; then the fastest that trains as DDP does, and the fastest with local steps, which cost loss: those are named
    with their price, and never chosen."""
    choice, text = _advise(rows, cluster)
    taken = next(row for row in rows if row.label == choice)
    exact = min((row for row in rows if _averages_gradients(row.method)), key=lambda row: row.seconds)
    text += f" The fastest that trains as DDP does: {exact.label}, {_ms(exact.seconds)} per iteration."
    seldom = [row for row in rows if row.every > 1 and row.seconds * _ALIKE < taken.seconds]
    if seldom:
        fastest = min(seldom, key=lambda row: row.seconds)
        text += (
            f" The fastest if you accept {quality.price(fastest.method, fastest.every)}: {fastest.label}, "
            f"{_ms(fastest.seconds)} per iteration."
        )
    return choice, text


def _averages_gradients(method: Method) -> bool:
    return isinstance(method, DDP) or getattr(method, "graph", None) == ALL_REDUCE


def _advise(rows: Sequence[Row], cluster: Cluster) -> tuple[str, str]:
    """Among those that exchange something in every step. DDP that rounds its gradients is one line of torch: a graph must be faster than
    that."""
    ddp = next(row for row in rows if row.label == "ddp")
    half = next((row for row in rows if row.method == DDP(wire="float16") and row.speedup_low >= _WORTH), None)
    every = [row for row in rows if isinstance(row.method, Gossip) and row.every == 1]
    graphs = [row for row in every if row.gap is None or row.gap >= _MIXES]
    lost = f"it loses {ddp.network:.0%} of its time to the network and {ddp.waiting:.0%} to waiting for slower workers"
    if not graphs:
        return "ddp", f"Stay with all-reduce (DDP): no graph was compared that mixes well; {lost}."
    best = min(graphs, key=lambda row: row.seconds)
    if half is not None and best.seconds * _WORTH > half.seconds:
        return half.label, (
            f"Stay with all-reduce (DDP) on {cluster.n} workers and let it send float16 (torch's fp16_compress_hook): "
            f"{_ms(half.seconds)} per iteration instead of {_ms(ddp.seconds)}; {lost}, and the fastest graph, {best.label}, "
            f"takes {_ms(best.seconds)}."
        )
    if best.speedup_low < _WORTH:
        if best.speedup <= 1:
            gain = f"no graph is faster than it ({best.label}, the best, takes {best.seconds / ddp.seconds:.2f} times as long)"
        else:
            gain = (
                f"the fastest graph, {best.label}, would gain {best.speedup - 1:.1%} "
                f"(between {best.speedup_low - 1:.1%} and {best.speedup_high - 1:.1%}), less than {_WORTH - 1:.0%} for sure"
            )
        return "ddp", f"Stay with all-reduce (DDP) on {cluster.n} workers: {lost}, and {gain}."
    sure = [row for row in graphs if row.speedup_low >= _WORTH]
    same = [row for row in sure if _as_all_reduce(row.method) and row.seconds <= best.seconds * _SAME]
    near = [row for row in sure if row.seconds <= best.seconds * _ALIKE]
    taken = min(same or near, key=lambda row: (row.method.wire != "float32", -(row.gap or 0.0)))  # type: ignore[attr-defined]
    why = _why(taken, ddp)
    more = " With SGD it trains as all-reduce does, up to rounding." if same else ""
    if same and best is not taken:
        more += f" {best.label} would take {_ms(best.seconds)}, and changes what is trained."
    if half is not None:
        more += f" DDP with torch's float16 hook would take {_ms(half.seconds)}."
    return taken.label, (
        f"Use {taken.label} on {cluster.n} workers: {_ms(taken.seconds)} per iteration instead of DDP's {_ms(ddp.seconds)}, "
        f"{taken.speedup:.2f} times as fast (between {taken.speedup_low:.2f} and {taken.speedup_high:.2f}), because {why}.{more}"
    )


def _as_all_reduce(method: Method) -> bool:
    """Whether gradients are taken at the mean of all: at the beginning, at least, with ada-auto."""
    if not isinstance(method, Gossip) or method.order != "atc" or method.local_steps > 1 or not isinstance(method.graph, str):
        return False
    return method.graph.startswith(("complete", "ada-auto", "periodic:every=1,"))


def _why(taken: Row, ddp: Row) -> str:
    """The larger of what is saved: time for bytes, or time spent waiting."""
    saved_network = ddp.network * ddp.seconds - taken.network * taken.seconds
    saved_waiting = ddp.waiting * ddp.seconds - taken.waiting * taken.seconds
    if saved_waiting > saved_network:
        return (
            f"its workers wait for their neighbours only: {taken.waiting:.0%} of the time goes to waiting for slower ones, "
            f"against {ddp.waiting:.0%} when all wait for all"
        )
    fewer = f"each worker sends {_bytes(taken.sent)} per step instead of {_bytes(ddp.sent)}"
    if taken.label.startswith("hierarchical"):
        fewer = "only one copy of the model per host crosses the network, under forward and backward"
    elif taken.sent >= ddp.sent * 0.95:
        fewer = "its transfers run under forward and backward"
    elif taken.method.order == "awc":  # type: ignore[attr-defined]
        fewer += ", under forward and backward"
    return f"DDP loses {ddp.network:.0%} of its time to the network, and {fewer}, which leaves {taken.network:.0%}"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


def _bytes(count: float) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count:.0f} B"


# --- Workloads for a plan ------------------------------------------------------------------------------------------------


def parameters(text: str) -> int:
    """``"124M"``, ``"1.5B"``, ``"60000"``."""
    units = {"k": 10**3, "m": 10**6, "b": 10**9, "g": 10**9}
    cleaned = text.strip().lower().replace("_", "").replace(",", "")
    unit = units.get(cleaned[-1:], 1)
    try:
        count = float(cleaned[:-1] if unit > 1 else cleaned) * unit
    except ValueError:
        count = math.nan
    if not 1 <= count <= 1e13:
        raise GossamerError(f"--params {text!r} is not a number of parameters; use a number and k, M or B, such as 124M")
    return round(count)


def estimated(cluster: Cluster, count: int, samples: int, compute_ms: float | None = None, name: str = "") -> Workload:
    """From a number of parameters: 6 operations per parameter and sample (token), at the cluster's ``tflops``."""
    if compute_ms is not None:
        if not 0 < compute_ms < math.inf:
            raise GossamerError(f"--compute-ms {compute_ms:g} is not a time above 0")
        return Workload.of_parameters(count, compute_ms / 1e3, name=name)
    if samples < 1:
        raise GossamerError(f"--samples {samples}: each worker computes at least one per step")
    return Workload.of_parameters(count, seconds_of(cluster, 6.0 * count * samples), name=name)


COUNTED = 256  # samples whose operations are counted, at most


def of_task(cluster: Cluster, task: Task, samples: int, compute_ms: float | None = None) -> Workload:
    """Sizes from the task's model; times from counting the operations of one forward and backward."""
    with torch.random.fork_rng(devices=[]):
        model = task.build()
    if compute_ms is not None:
        seconds = estimated(cluster, 1, 1, compute_ms).compute
    else:
        from torch.utils.flop_counter import FlopCounterMode  # half a second to load

        few = min(samples, COUNTED)
        with FlopCounterMode(display=False) as counter:
            task.loss(model, *task.example(few)).backward()
        seconds = seconds_of(cluster, counter.get_total_flops() * samples / few)
    return Workload.of_tensors(gradient_sizes(model), seconds / 3, seconds * 2 / 3, name=task.name)


def seconds_of(cluster: Cluster, operations: float) -> float:
    if cluster.tflops is None:
        raise GossamerError(
            f"cluster {cluster.name!r} has no tflops, so times can't be estimated; add it to the file, or give --compute-ms"
        )
    return operations / (cluster.tflops * 1e12)
