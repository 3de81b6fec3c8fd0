"""How long a step takes where computing takes 20 ms: the worker of ``benchmarks.frontier``, on each of the lab's hosts.

Computing is pretended. The model has 30 layers of 1024 × 1024 parameters (31.5 M). Forward, backward and update are sleeps of 6, 12 and
2 ms; a layer's gradient is there when its share of backward has passed, and is a tensor that was made before: no number is computed.
What is real: autograd and its hooks, DDP's buckets and their order, the optimizer's hooks, compressing, the exchange.
"""

from __future__ import annotations

import json
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as power
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.nn.parallel import DistributedDataParallel

import gossamer
from gossamer import hooks
from gossamer.methods import Averaging

LAYERS, WIDTH = 30, 1024
FORWARD_S, BACKWARD_S, UPDATE_S = 0.006, 0.012, 0.002
COMPUTE_MS = 1e3 * (FORWARD_S + BACKWARD_S + UPDATE_S)
ENOUGH_S = 10.0  # a way is timed for about as long, in whole periods
FEWEST, MOST = 2, 400  # periods


class _Pretended(torch.autograd.Function):
    """``ends``: when the layer's forward and backward are done, in seconds since their beginning."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, layer: Layer) -> Tensor:
        ctx.layer = layer
        layer.clock.until("forward", layer.forward_ends)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        layer = ctx.layer
        layer.clock.until("backward", layer.backward_ends)
        # Nothing else holds this view, so autograd takes it over as it is.
        return grads[0], layer.gradient.view(WIDTH, WIDTH), None


class Clock:
    """Of the pretended accelerator: it goes on while the process does other things."""

    def __init__(self) -> None:
        self.began: dict[str, float] = {}

    def until(self, what: str, seconds: float) -> None:
        began = self.began.setdefault(what, time.perf_counter())
        time.sleep(max(0.0, began + seconds - time.perf_counter()))


class Layer(nn.Module):
    def __init__(self, k: int, layers: int, clock: Clock) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(WIDTH, WIDTH))
        self.gradient = torch.randn(WIDTH * WIDTH, generator=torch.Generator().manual_seed(k)).mul_(1e-3)
        self.clock = clock
        self.forward_ends, self.backward_ends = FORWARD_S * (k + 1) / layers, BACKWARD_S * (layers - k) / layers

    def forward(self, x: Tensor) -> Tensor:
        return _Pretended.apply(x, self.weight, self)


class Update(torch.optim.Optimizer):
    """It changes nothing, and takes its share of the time."""

    def __init__(self, parameters: Any, whole: int) -> None:
        super().__init__(parameters, {"lr": 1e-3})
        self.seconds = UPDATE_S * sum(p.numel() for group in self.param_groups for p in group["params"]) / whole

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        time.sleep(self.seconds)


class Way:
    """One way to train. ``period``: steps after which everything has happened once; ``warm``: periods that are not timed."""

    def __init__(self, name: str, layers: int = LAYERS) -> None:
        self.clock, self.period, self.warm = Clock(), 1, 1
        bare = nn.Sequential(*(Layer(k, layers, self.clock) for k in range(layers)))
        whole = sum(p.numel() for p in bare.parameters())
        self.x = torch.zeros((), requires_grad=True)
        self.averager: PeriodicModelAverager | None = None
        self.optimizer: torch.optim.Optimizer | None = None
        if name == "decent-dp":
            self.model = _decent_dp(bare, whole)
            self.warm = 3  # its first two steps find the order of the parameters
            return
        if name.startswith("DDP"):
            self.model = self._ddp(bare, name)
        elif name.startswith("post-local SGD"):
            self.period = int(name.partition("H=")[2])
            self.model, self.averager = bare, PeriodicModelAverager(self.period)
        elif name == "alone":
            self.model = bare
        else:
            self.model = self._ours(bare, name)
        self.optimizer = Update(self.model.parameters(), whole)
        if isinstance(self.model, gossamer.DecentralizedDataParallel):
            self.model.gossip(self.optimizer)

    def _ddp(self, bare: nn.Module, name: str) -> nn.Module:
        # torch's PowerSGD starts exchanges where others end, so over gloo several buckets wait for each other: it has one.
        one = 1000 if "PowerSGD" in name else None
        model = DistributedDataParallel(bare, init_sync=False, gradient_as_bucket_view=True, bucket_cap_mb=one)
        if name == "DDP, fp16 hook":
            model.register_comm_hook(None, fp16_compress_hook)
        elif name.startswith("DDP, PowerSGD"):
            rank = int(name.partition("rank ")[2])
            model.register_comm_hook(power.PowerSGDState(None, rank, start_powerSGD_iter=2), power.powerSGD_hook)
            self.warm = 3
        elif name == "DDP, our 8-bit hook":
            model.register_comm_hook(hooks.state(), hooks.eight_bit)
        elif name == "DDP, our 4-bit hook":
            model.register_comm_hook(hooks.state(), hooks.four_bit)
        return model

    def _ours(self, bare: nn.Module, name: str) -> nn.Module:
        how = Averaging.parse(name)
        model = gossamer.DecentralizedDataParallel(
            bare, how.graph, method=how.method, wire=how.wire, local_steps=how.every, init="keep", timeout=600
        )
        own = getattr(how.method, "H", None)
        graph = model.schedule.graph(0, 0, 1, {})
        self.period = own or how.every * graph.period
        return model

    def step(self) -> None:
        self.clock.began.clear()
        if self.optimizer is not None:
            self.optimizer.zero_grad()
        self.model(self.x).backward()
        if self.optimizer is not None:
            self.optimizer.step()
        if self.averager is not None:
            self.averager.average_parameters(self.model.parameters())


def _decent_dp(bare: nn.Module, whole: int) -> nn.Module:
    from decent_dp.ddp import DecentralizedDataParallel  # the benchmark extra

    class Same(DecentralizedDataParallel):
        def _sync_at_start(self) -> None:
            """Workers start the same: a broadcast on a slow network would take longer than what is measured."""

    def make(parameters: list[tuple[str, Tensor]]) -> torch.optim.Optimizer:
        return Update([p for _, p in parameters], whole)

    return Same(bare, make, topology="one-peer-exp" if dist.get_world_size() > 2 else "complete", _local_world_size=1)


@dataclass(frozen=True)
class Spent:
    """Since the start. ``main``: processor time of this thread; ``queued``: it could have run, and had no core; ``others``: processor time
    of Python's other threads (a hook's). ``sent``: bytes."""

    wall: float
    main: float
    queued: float
    others: float
    sent: int

    @classmethod
    def now(cls) -> Spent:
        here = threading.main_thread()
        clocks = {
            t: time.clock_gettime(time.pthread_getcpuclockid(t.ident)) for t in threading.enumerate() if t.ident is not None
        }
        queued = int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9
        return cls(time.perf_counter(), clocks.pop(here), queued, sum(clocks.values()), _sent())


def _sent() -> int:
    """By this host, as its interfaces count; on loopback that is by all workers."""
    return sum(int(line.split()[9]) for line in Path("/proc/net/dev").read_text().splitlines() if ":" in line)


def measured(way: Way) -> dict[str, float]:
    """Of a step. ``ms``: how long it takes, on the slowest worker. ``own_ms``: processor time of the thread that trains, for compressing,
    copying, arithmetic; ``queued_ms``: it had no core; ``others_ms``: processor time of other threads. Means over workers."""
    began = time.perf_counter()
    for _ in range(way.warm * way.period):
        way.step()
    first = torch.tensor([(time.perf_counter() - began) / way.warm])
    dist.all_reduce(first, dist.ReduceOp.MAX)
    periods = int(min(max(FEWEST, ENOUGH_S / float(first)), MOST))
    dist.barrier()
    before = Spent.now()
    for _ in range(periods * way.period):
        way.step()
    after = Spent.now()
    steps = periods * way.period
    spent = [(b - a) / steps for a, b in zip(vars(before).values(), vars(after).values(), strict=True)]
    longest, mean = torch.tensor(spent[0]), torch.tensor(spent, dtype=torch.float64)
    dist.all_reduce(longest, dist.ReduceOp.MAX)
    dist.all_reduce(mean)
    own = [1e3 * float(x) / dist.get_world_size() for x in mean]
    made = dict(zip(("own_ms", "queued_ms", "others_ms"), own[1:4], strict=True))
    return {"steps": steps, "ms": 1e3 * float(longest)} | made | {"sent_mb": own[4] / 1e9}


def work(ways: list[str], out: Path, layers: int = LAYERS) -> None:
    """In each worker: way after way. What was measured is written after each."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for name in ways:
        result = measured(Way(name, layers))
        if dist.get_rank() == 0:
            with out.open("a") as file:
                file.write(json.dumps({"way": name} | result) + "\n")
        dist.barrier()
    dist.destroy_process_group()
