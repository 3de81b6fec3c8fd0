"""Measures the cluster that it runs on: links, what communication costs the processor, and the times of a workload.

All processes take part at the same time, as they do in training, and go through the same parts of the library as training does
(``Exchange`` for rows, ``dist.all_reduce`` for DDP). Every figure is a median of a few repeats. What is sent is bounded: a few
repeats of at most ``megabytes``, less on a slow network.
"""

from __future__ import annotations

import importlib
import itertools
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import scipy.optimize
import scipy.special
import torch
import torch.distributed as dist
from torch import Tensor, nn

from gossamer.apps import tasks
from gossamer.errors import GossamerError
from gossamer.graphs.rounds import Mean
from gossamer.members.store import open_link
from gossamer.rows import codec, mixing
from gossamer.runtime.cluster import Cluster, build
from gossamer.runtime.workload import gradient_sizes
from gossamer.transport.exchange import Exchange
from gossamer.transport.operation import Operation

_IN_A_ROW = 50
_TRANSFER = 0.5  # seconds that one large transfer should take at most
_COMPUTE = 8.0  # seconds for the steps of a workload, alone and while traffic flows
_WAITS = 1.3  # a step this much longer than its computing has waited for its row
_BLOCK, _STREAM = 3, 2  # steps in a row; rows one after the other
_MIN_TURNS, _MAX_TURNS = 3, 20
_RING = (0.5, 1.5)  # what an all-reduce may take per byte, against rows


@dataclass(frozen=True)
class Job:
    """What is trained: a model, the loss of one batch, and an optimizer."""

    name: str
    model: nn.Module
    loss: Callable[[], Tensor]
    optimizer: torch.optim.Optimizer

    @property
    def sizes(self) -> list[int]:
        return gradient_sizes(self.model)


def of_task(name: str, batch: int) -> Job:
    task = tasks.make(name, batch=batch)
    model, part = task.build(), task.example(batch)
    return Job(f"{name}, batch {batch}", model, lambda: task.loss(model, *part), _sgd(model))


def of_function(where: str) -> Job:
    """``package.module:function``, which returns a model and a function that gives the loss of one batch, and perhaps an optimizer."""
    module, _, function = where.partition(":")
    if not module or not function:
        raise GossamerError(f"--module {where!r} is not of the form package.module:function")
    sys.path.insert(0, os.getcwd())
    try:
        made = getattr(importlib.import_module(module), function)()
    except (ImportError, AttributeError) as error:
        raise GossamerError(f"--module {where!r} can't be loaded: {error}") from None
    finally:
        sys.path.remove(os.getcwd())
    if not isinstance(made, tuple) or len(made) not in (2, 3) or not isinstance(made[0], nn.Module) or not callable(made[1]):
        raise GossamerError(
            f"--module {where!r} must return (model, loss) or (model, loss, optimizer), where loss() is the loss of one batch"
        )
    model, loss = made[:2]
    return Job(function, model, loss, made[2] if len(made) == 3 else _sgd(model))


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)


# --- The measurements ----------------------------------------------------------------------------------------------------


class Probe:
    """One process's part of it. ``say`` is told what is measured next."""

    def __init__(self, megabytes: float, say: Callable[[str], object]) -> None:
        refuse_alone()
        self.n = dist.get_world_size()
        self.rank, self.say, self.most = dist.get_rank(), say, int(megabytes * 1e6)
        self.per_host = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        if self.n % self.per_host:
            raise GossamerError(f"{self.n} processes with LOCAL_WORLD_SIZE={self.per_host}: hosts must have the same number")
        self.hosts = self.n // self.per_host
        link = open_link(torch.device("cpu"))
        assert link is not None
        self.exchange = Exchange(link)

    def together(self, work: Callable[[], object], repeats: int, times: int = 1) -> float:
        """Median seconds until the last process has done it; all begin at the same time, and a first time warms up. ``times``: so often
        in a row, as training does it. A connection that has rested stalls more often than one in use."""
        taken = []
        for _ in range(1 + repeats):
            dist.barrier()
            began = time.perf_counter()
            for _ in range(times):
                work()
            taken.append((time.perf_counter() - began) / times)
        return self.slowest(statistics.median(taken[1:]))

    def slowest(self, value: float) -> float:
        return float(self.everyone([value]).max())

    def everyone(self, values: Sequence[float]) -> np.ndarray:
        """``[processes, values]``"""
        return self.exchange.gather(torch.tensor(list(values), dtype=torch.float64)).numpy()

    # Links

    def shift(self, by: int, size: int, flows: int | None = None, inside: bool = False) -> Callable[[], object]:
        """A transfer of ``size`` bytes to the worker ``by`` further on: around all of them, or inside each host. ``flows``: only so
        many workers of a host take part."""
        base, m = (self.rank - self.rank % self.per_host, self.per_host) if inside else (0, self.n)
        place = self.rank - base
        takes_part = flows is None or self.rank % self.per_host < flows
        return self._transfer(base + (place + by) % m, base + (place - by) % m, size, takes_part)

    def pair(self, size: int) -> Callable[[], object]:
        """Only the first two workers of a host, in both directions."""
        place = self.rank % self.per_host
        peer = self.rank + 1 - 2 * place
        return self._transfer(peer, peer, size, place < 2)

    def _transfer(self, to: int, source: int, size: int, takes_part: bool) -> Callable[[], object]:
        out, into = torch.zeros(max(1, size // 4)), torch.empty(max(1, size // 4))

        def run() -> None:
            tag = self.exchange.collective_tag()
            if takes_part:
                self.exchange.edges([(to, out)], [(source, into)], tag, "calibrate").wait()

        return run

    def latency(self, run: Callable[[], object]) -> float:
        """Of one exchange in a row of them: they wait for each other, so nothing else needs to keep them together."""
        return self.together(run, repeats=3, times=_IN_A_ROW)

    def size_for(self, make: Callable[[int], Callable[[], object]]) -> int:
        """Bytes that take about as long as one transfer may."""
        small = min(self.most, 4_000_000)
        seconds = self.together(make(small), repeats=2)
        return int(min(self.most, max(small, small * _TRANSFER / max(seconds, 1e-6))))

    def rate(self, make: Callable[[int], Callable[[], object]], latency: float) -> float:
        """Bytes per second of one worker, without what a message costs in any case."""
        size = self.size_for(make)
        return size / max(self.together(make(size), repeats=3, times=4) - latency, 1e-9)

    def links(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        if self.hosts > 1:
            self.say("between hosts: latency and bandwidth")
            step = self.per_host
            latency = self.latency(self.shift(step, 4, 1))
            alone = whole = self.rate(lambda size: self.shift(step, size, 1), latency)
            if self.per_host > 1:
                self.say("between hosts: all workers of a host at once")
                whole = self.per_host * self.rate(lambda size: self.shift(step, size), latency)
            found["inter"] = {"gbit": max(alone, whole) * 8e-9, "latency_us": latency * 1e6}
            found["said"] = (
                f"between hosts one flow has {alone * 8e-9:.3g} Gbit/s and all of a host's together {whole * 8e-9:.3g}"
            )
        if self.per_host > 1:
            self.say("inside a host: latency and bandwidth")
            latency = self.latency(self.shift(1, 4, inside=True))
            alone = self.rate(self.pair, latency)
            each = self.rate(lambda size: self.shift(1, size, inside=True), latency)
            shared = each < 0.7 * alone
            gbit = (each * self.per_host if shared else each) * 8e-9
            found["intra"] = {"gbit": gbit, "latency_us": latency * 1e6, "shared": shared}
        return found

    def all_reduce(self, row: int, wire: float, latency: float) -> dict[str, float]:
        """What a byte of an all-reduce takes, as a factor of what it takes rows; and in ns what the wire can't explain, where it is so fast
        that summing decides. ``wire``: seconds per byte of the slowest link, as rows find it."""
        self.say("all-reduce")
        size = max(1_000_000, min(self.most, row, int(_TRANSFER / (2 * wire))))
        data = torch.ones(size // 4)
        message = self.together(lambda: dist.all_reduce(data.fill_(1.0)), repeats=3, times=3) / (2 * (self.n - 1))
        byte = max(message - latency, 0.0) / (size / self.n)  # the reverse of ``network.Rings.sized``
        return {"reduce": max(0.0, byte - _RING[1] * wire) * 1e9, "ring": min(_RING[1], max(_RING[0], byte / wire))}

    # What communication costs the processor

    def costs(self, row: int) -> dict[str, float]:
        self.say("what mixing costs the processor")
        d = max(16 * self.n, row // 4)
        x, other, out = torch.randn(d), torch.randn(d), torch.empty(d)
        narrow, received = torch.empty(d, dtype=torch.bfloat16), torch.randn(d).bfloat16()
        columns, mixed = torch.randn(2, self.n, d // self.n)
        coded = torch.empty(codec.width(d), dtype=torch.uint8)
        codec.encode(x, coded)

        def per_byte(work: Callable[[], object]) -> float:
            return self.together(work, repeats=9) / (4 * d) * 1e9

        return {
            "combine": per_byte(lambda: mixing.blend(x, 0.5, [(0.5, other)], x)),
            "narrow": per_byte(lambda: narrow.copy_(x)),
            "widen": per_byte(lambda: mixing.correct(x, narrow, [(0.5, received)])),
            "encode": per_byte(lambda: codec.encode(x - other, coded)),
            "decode": per_byte(lambda: codec.decode(coded, out)),
            "apply": per_byte(lambda: mixing.mix(Mean(self.n), columns, mixed)),
            "copy": per_byte(lambda: (out.copy_(x), other.copy_(out))),
        }

    # The workload

    def steps(self, job: Job, size: int) -> Steps:
        """Of this process. Alone, under a stream of rows, and with one row of ``size`` bytes per step: the three take turns, some steps in
        a row of each, so that whatever else the machine does hits all alike."""
        out, into = torch.zeros(size // 4), torch.empty(size // 4)
        # In turn to the next host (or worker, if there is one host) and to the one after it, as one-peer graphs do: a connection that has
        # rested for a step is slower.
        one = self.per_host if self.hosts > 1 else 1
        offsets = itertools.cycle([one, 2 * one] if self.n > 2 * one else [one])
        found = Steps([], [], [], [])

        def fly() -> Operation:
            by = next(offsets)
            to, source = (self.rank + by) % self.n, (self.rank - by) % self.n
            return self.exchange.edges([(to, out)], [(source, into)], self.exchange.collective_tag(), "calibrate")

        def turn() -> None:
            dist.barrier()
            found.alone.extend(_step(job) for _ in range(_BLOCK))
            dist.barrier()
            for _ in range(_STREAM):
                operation, began = fly(), time.perf_counter()
                beside = []
                while not operation.done.is_set():
                    beside.append(sum(_step(job)[:2]))
                operation.wait()
                found.beside.extend(beside[:-1])  # the last one has outlived the row
                found.rates.append(size / max(operation.ended - began, 1e-9))
            dist.barrier()
            for _ in range(_BLOCK):
                operation, began = fly(), time.perf_counter()
                _gradients(job)
                operation.wait()
                job.optimizer.step()
                found.paces.append(time.perf_counter() - began)

        began = time.perf_counter()
        turn()
        once = self.slowest(time.perf_counter() - began)
        found = Steps([], [], [], [])
        for _ in range(max(_MIN_TURNS, min(_MAX_TURNS, int(_COMPUTE / max(once, 1e-6))))):
            turn()
        return found


@dataclass(frozen=True)
class Steps:
    """Seconds. ``alone``: forward, backward and update; ``beside``: forward and backward under a stream of rows, which had ``rates`` bytes
    per second; ``paces``: whole steps with a row each, which is waited for before the update."""

    alone: list[tuple[float, float, float]]
    beside: list[float]
    rates: list[float]
    paces: list[float]

    def medians(self) -> list[float]:
        """Forward, backward, update, pace, and what one byte that leaves adds to computing."""
        forward, backward, update = np.median(self.alone, axis=0).tolist()
        beside = statistics.median(self.beside) if self.beside else forward + backward  # too short for a step: nothing is known
        byte = max(0.0, beside - forward - backward) / max(statistics.median(self.rates) * beside, 1.0)
        return [forward, backward, update, statistics.median(self.paces), byte]


def _step(job: Job) -> tuple[float, float, float]:
    forward, backward = _gradients(job)
    began = time.perf_counter()
    job.optimizer.step()
    return forward, backward, time.perf_counter() - began


def _gradients(job: Job) -> tuple[float, float]:
    began = time.perf_counter()
    job.optimizer.zero_grad()
    loss = job.loss()
    forward = time.perf_counter()
    loss.backward()
    return forward - began, time.perf_counter() - forward


# --- All of it -----------------------------------------------------------------------------------------------------------


def calibrate(jobs: Sequence[Job], name: str, megabytes: float, say: Callable[[str], object]) -> Cluster:
    """The cluster that this process and the others run on; the same on all of them. At least one job."""
    probe = Probe(megabytes, say)
    row = max(sum(job.sizes) for job in jobs)
    found = probe.links()
    far = found.get("inter") or found["intra"]
    wire = 8e-9 / far["gbit"] * (probe.per_host if far.get("shared") else 1)
    costs = probe.costs(row)
    costs |= probe.all_reduce(row, wire, far["latency_us"] * 1e-6)
    workloads, spreads, traffic, drag = [], [], [], []
    flow = 8e-9 / far["gbit"] * (probe.per_host if "inter" in found or far.get("shared") else 1)  # when all send at once
    size = max(4, min(probe.most, row, int(_TRANSFER / flow)))
    for job in jobs:
        say(f"steps of {job.name}, alone and while rows are on their way")
        steps = probe.steps(job, size)
        spreads.append(_sigma(probe.everyone([forward + backward for forward, backward, _ in steps.alone])))
        forward, backward, update, pace, byte = (float(value) for value in probe.everyone(steps.medians()).mean(axis=0))
        traffic.append(byte * 1e9)
        exposed = pace - update  # where the row takes longer than forward and backward, this is how long it takes
        if exposed > _WAITS * (forward + backward):
            drag.append(max(0.0, exposed / (far["latency_us"] * 1e-6 + size * flow) - 1))
        times = {"forward_ms": forward * 1e3, "backward_ms": backward * 1e3, "update_ms": update * 1e3}
        workloads.append({"name": job.name, **times, "bytes": job.sizes})
    costs["traffic"], costs["drag"] = statistics.median(traffic), statistics.median(drag or [0.0])
    said = found.pop("said", "")
    return build(
        {
            "name": name,
            "description": f"measured by gossamer calibrate on {probe.n} workers; {said}".rstrip("; "),
            "hosts": probe.hosts,
            "per_host": probe.per_host,
            "uncertainty": 0.1,
            "noise": {"kind": "lognormal", "sigma": statistics.median(spreads)},
            "costs": costs,
            "workload": workloads,
            **found,
        },
        "calibrate",
    )


def _sigma(times: np.ndarray) -> float:
    """The sigma of a lognormal whose largest of n is, on average, as much above the mean as here. From ``[processes, steps]``.

    Not from the spread of single times: workers that share cores are slow in turn, and what counts is how long the last one takes.
    """
    n = len(times)
    ratio = float(np.median(times.max(axis=0)) / np.median(times.mean(axis=0)))
    grid = (np.arange(4000) + 0.5) / 4000  # quantiles of the largest: u^(1/n) of a single one
    normal = scipy.special.ndtri(grid ** (1 / n))

    def excess(sigma: float) -> float:
        return float(np.exp(sigma * normal - sigma**2 / 2).mean()) - ratio

    return 0.0 if ratio <= 1 else float(scipy.optimize.brentq(excess, 0.0, 1.0)) if excess(1.0) > 0 else 1.0


@contextmanager
def started() -> Iterator[None]:
    """torch.distributed, from what torchrun or the lab has put into the environment."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1 and not dist.is_initialized():
        dist.init_process_group("gloo")
        try:
            yield
        finally:
            dist.destroy_process_group()
    else:
        yield


def refuse_alone() -> None:
    if not dist.is_initialized() or dist.get_world_size() < 2:
        raise GossamerError(
            "calibrate measures the links between workers, and there is one process only; start it on all of them, "
            "such as: torchrun --nproc-per-node 4 -m gossamer calibrate --out cluster.toml"
        )


def is_first() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0


def check_out(path: Path) -> None:
    if not path.parent.is_dir():
        raise GossamerError(f"--out {path}: there is no folder {path.parent}")
    if not os.access(path.parent, os.W_OK):
        raise GossamerError(f"--out {path}: the folder {path.parent} can't be written to")
