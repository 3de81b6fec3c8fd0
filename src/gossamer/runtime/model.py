"""Iteration times by recurrences over steps, vectorised over workers.

The state is when each worker begins its step, ``[n]``. A step draws each worker's compute time, asks the Round's transfer when
everything is there (``network.py``), and gives the next beginning. The recurrences of all methods, and what they leave out, are in
``docs/runtime-model.md``; they are our own reconstruction.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from gossamer.errors import GossamerError
from gossamer.graphs.rounds import Mean, Round
from gossamer.methods import NoLoCo, Outer
from gossamer.runtime import network
from gossamer.runtime.cluster import Cluster
from gossamer.runtime.methods import ALL_REDUCE, DDP, DecentDP, Gossip, Method, StochasticGradientPush, graph_of
from gossamer.runtime.network import Transfer
from gossamer.runtime.workload import Workload
from gossamer.schedules import Schedule

Array = np.ndarray
_KEPT = 2_000_000  # times of single workers that an Outcome holds at most


@dataclass(frozen=True)
class Outcome:
    """What the model says of one method. ``seconds``: per iteration, from the common start to the last worker's end.

    ``durations``: of single iterations, ``[iterations, workers]``, of all workers or of every so-many-th. ``waiting``: the share of
    the workers' time in which they wait for slower ones; ``network``: for bytes, or spend on them. ``compute``: mean seconds of
    each worker's own computing, as drawn, ``[n]``. ``sent``: bytes per iteration of the busiest worker.
    """

    method: str
    n: int
    iterations: int
    seconds: float
    waiting: float
    network: float
    sent: float
    durations: Array = field(repr=False)
    compute: Array = field(repr=False)


class Stepper(ABC):
    """One method on one cluster. ``step`` moves ``start``, and counts what was lost."""

    def __init__(self, cluster: Cluster, workload: Workload, method: Method) -> None:
        self.cluster, self.work, self.n = cluster, workload, cluster.n
        self.slow = cluster.compute_factors()
        self.update = workload.update * self.slow
        self.start = np.zeros(self.n)
        self.waited = 0.0  # seconds of all workers together
        self.networked = 0.0
        self.sent = 0.0  # bytes of the busiest worker, all steps together
        costs = cluster.costs
        row = workload.row_bytes * 1e-9
        self.costs = {
            key: getattr(costs, key) * row for key in ("traffic", "combine", "copy_", "narrow", "widen", "encode", "decode")
        }

    @abstractmethod
    def step(self, t: int, factor: Array, epoch: int, epochs: int) -> None:
        """Step t; ``factor``: how long each worker's forward and backward take, as a multiple of the workload's."""

    def drain(self) -> None:  # noqa: B027 - most have nothing to wait for
        """After the last step: wait for what is still on its way."""

    def count(self, new: Array, computed: Array, waited: Array) -> None:
        """``computed``: what the step takes without others; ``waited``: for others. The rest is the network's."""
        waiting = float(waited.sum())
        self.waited += waiting
        self.networked += float(new.sum()) - float(self.start.sum()) - float(computed.sum()) - waiting
        self.start = new


class DDPStepper(Stepper):
    def __init__(self, cluster: Cluster, workload: Workload, method: DDP) -> None:
        super().__init__(cluster, workload, method)
        cap = method.bucket_mb if method.overlap else workload.row_bytes
        everyone = network.Rings(cluster, Mean(self.n))
        buckets = workload.buckets(cap if self.n > 1 else None)
        self.buckets = [(share, everyone.sized(size * method.share)) for size, share in buckets]
        early = sum(float(transfer.sent[0]) for _, transfer in self.buckets[:-1])
        self.beside = cluster.costs.traffic * 1e-9 * early  # the last bucket has nothing left to run beside
        self.around = self.costs["copy_"] if self.n > 1 else 0.0
        if method.wire == "float16" and self.n > 1:
            self.around += 2 * self.costs["narrow"]  # and wide again
        self.sent_each = sum(float(transfer.sent[0]) for _, transfer in self.buckets)

    def step(self, t: int, factor: Array, epoch: int, epochs: int) -> None:
        work = self.work
        ready = self.start + work.forward * factor
        computed = (work.forward + work.backward) * factor + self.update
        if self.n == 1:
            self.count(ready + work.backward * factor + self.update, computed, np.zeros(1))
            return
        end, alone = -np.inf, np.full(self.n, -np.inf)
        for share, transfer in self.buckets:
            ready = ready + work.backward * share * factor
            seconds = float(transfer.taken[0])
            end = max(float(ready.max()), end) + seconds
            alone = np.maximum(ready, alone) + seconds
        own = ready + self.beside
        done = np.maximum(own, end)
        waited = done - np.maximum(own, alone)
        self.sent += self.sent_each
        self.count(done + self.around + self.update, computed, waited)


class GossipStepper(Stepper):
    def __init__(self, cluster: Cluster, workload: Workload, method: Gossip) -> None:
        super().__init__(cluster, workload, method)
        self.method = method
        self.schedule: Schedule = graph_of(method, self.n, cluster.per_host)
        self.left = np.zeros(self.n)  # when what was sent from a copy has left
        self._transfers: dict[int, tuple[Round, Transfer]] = {}

    def transfer(self, round_: Round) -> Transfer:
        """Made once per Round."""
        held = self._transfers.get(id(round_))
        if held is None:
            held = self._transfers[id(round_)] = (round_, self.make(round_))
        return held[1]

    def make(self, round_: Round) -> Transfer:
        m = self.method
        made = network.by_library(self.cluster, round_, m.rows * self.work.row_bytes, m.edge_share, m.verb)
        return made.dragged(self.cluster.costs.drag) if m.order == "awc" else made

    def round(self, t: int, epoch: int, epochs: int) -> Round:
        return self.schedule.graph(t, epoch, epochs).round(t // self.method.local_steps)

    def prices(self, transfer: Transfer) -> tuple[float, float, bool]:
        """Seconds before something can be sent and after it has arrived; and whether one need not wait for what one sends."""
        if isinstance(transfer, network.Nothing):
            return 0.0, 0.0, False
        slices = isinstance(transfer, (network.Together, network.Stages))
        own = self.cluster.costs.step_us * 1e-6
        if self.method.wire == "bfloat16" and not slices:
            return self.costs["narrow"], own + self.costs["widen"], True
        copy = self.costs["copy_"] / 2 if self.method.send_copy else 0.0
        if transfer.coded:
            return copy + self.costs["encode"], own + self.costs["decode"] + self.costs["combine"], False
        return copy, own + self.costs["combine"], self.method.send_copy and not slices

    def step(self, t: int, factor: Array, epoch: int, epochs: int) -> None:
        compute = (self.work.forward + self.work.backward) * factor
        if (t + 1) % self.method.local_steps:
            self.count(self.start + compute + self.update, compute + self.update, np.zeros(1))
            return
        transfer = self.transfer(self.round(t, epoch, epochs))
        before, after, apart = self.prices(transfer)
        self.sent += float(np.max(transfer.sent))
        ready = self.start if self.method.order == "awc" else self.start + compute + self.update
        go = (np.maximum(ready, self.left) if apart else ready) + before
        held = go - ready - before  # by a receiver that has not yet taken the last one
        arrived, self.left = transfer.run(go)
        there = arrived if apart else np.maximum(arrived, self.left)
        if self.method.order == "awc":
            own = go + compute + self.cluster.costs.traffic * 1e-9 * transfer.sent
            done = np.maximum(own, there)
            alone = np.maximum(own, go + transfer.seconds)
            new = done + after + self.update
        else:
            done, alone = there, go + transfer.seconds
            new = done + after
        waited = np.maximum(done - alone, 0.0) + held
        self.count(new, compute + self.update, waited)

    def drain(self) -> None:
        self.start = np.maximum(self.start, self.left)


class AllReduceStepper(GossipStepper):
    """Gossamer's ``graph="all-reduce"``: the mean of the gradients, by slices, when backward is done."""

    def step(self, t: int, factor: Array, epoch: int, epochs: int) -> None:
        compute = (self.work.forward + self.work.backward) * factor
        transfer = self.transfer(self.round(t, epoch, epochs))
        around = 0.0 if self.n == 1 else self.costs["copy_"] / 2 + self.cluster.costs.step_us * 1e-6 / 2
        go = self.start + compute + around
        done = transfer.run(go)[0]
        self.sent += float(np.max(transfer.sent))
        self.count(done + around + self.update, compute + self.update, done - go - transfer.seconds)

    def make(self, round_: Round) -> Transfer:
        return network.of_mean(self.cluster, round_, self.work.row_bytes, self.method.volume, self.method.coded)


class OuterStepper(GossipStepper):
    """Local steps, and an outer one in every H-th, whose exchange runs under the next ``delay`` steps. Fragments set out one after the
    other, and one that finds another under way waits for it."""

    def __init__(self, cluster: Cluster, workload: Workload, method: Gossip, rule: Outer) -> None:
        super().__init__(cluster, workload, method)
        self.rule = rule
        # Of each fragment: when it arrives; if all had been there; what it takes afterwards.
        self.flying: dict[int, tuple[Array, Array, float]] = {}

    def round(self, t: int, epoch: int, epochs: int) -> Round:
        return self.rule.peers(self.n, t) if isinstance(self.rule, NoLoCo) else super().round(t, epoch, epochs)

    def make(self, round_: Round) -> Transfer:
        size = self.work.row_bytes // self.rule.fragments
        if isinstance(self.rule, NoLoCo):
            return network.by_library(self.cluster, round_, size, self.method.volume)
        return network.of_mean(self.cluster, round_, size, self.method.volume, self.method.coded)

    def step(self, t: int, factor: Array, epoch: int, epochs: int) -> None:
        computed = (self.work.forward + self.work.backward) * factor + self.update
        new, waited, share = self.start + computed, np.zeros(self.n), 1 / self.rule.fragments
        for k in range(self.rule.fragments):
            phase = self.rule.phase(t, k)
            if phase == 0:
                transfer = self.transfer(self.round(t, epoch, epochs))
                before, after, _ = self.prices(transfer)
                self.sent += float(np.max(transfer.sent))
                new = new + before * share
                go = np.maximum.reduce([new, *(arrives for arrives, _, _ in self.flying.values())])
                self.flying[k] = np.maximum(*transfer.run(go)), go + transfer.seconds, after * share
            if phase == self.rule.delay and k in self.flying:
                arrived, alone, after = self.flying.pop(k)
                there = np.maximum(new, arrived)
                waited, new = waited + np.maximum(there - np.maximum(new, alone), 0.0), there + after
        self.count(new, computed, waited)

    def drain(self) -> None:
        self.start = np.maximum.reduce([self.start, *(arrives for arrives, _, _ in self.flying.values())])


class PipelineStepper(Stepper):
    """decent-dp and SGP: each bucket is updated as soon as backward has its gradients, sets out, and is waited for at the same place
    of the next step."""

    def __init__(self, cluster: Cluster, workload: Workload, method: DecentDP | StochasticGradientPush) -> None:
        super().__init__(cluster, workload, method)
        self.push = isinstance(method, StochasticGradientPush)
        self.schedule = graph_of(method, self.n, cluster.per_host)
        self.buckets = workload.buckets(method.bucket_mb)
        self.parts = [size / workload.row_bytes for size, _ in self.buckets]
        own = self.costs["combine"] + self.costs["copy_"] / 2 + getattr(method, "overhead", 0.0)
        self.after = self.update + (own if self.n > 1 else 0.0)
        self.arrived: list[Array] | None = None  # the transfers of the step before, per bucket
        self.unhindered: list[Array] = []
        self._per_bucket: dict[int, tuple[Round, Sequence[Transfer]]] = {}

    def transfers(self, round_: Round) -> Sequence[Transfer]:
        held = self._per_bucket.get(id(round_))
        if held is None:
            made = network.pipelined(self.cluster, round_, [size for size, _ in self.buckets], self.push)
            held = self._per_bucket[id(round_)] = (round_, made)
        return held[1]

    def step(self, t: int, factor: Array, epoch: int, epochs: int) -> None:
        work, earlier = self.work, self.arrived
        now = self.start + work.forward * factor
        stream = np.full(self.n, -np.inf) if earlier is None else earlier[-1]  # a worker's transfers go one after the other
        waited = np.zeros(self.n)
        arrived, unhindered = [], []
        transfers = self.transfers(self.schedule.graph(t + 1, epoch, epochs).round(t + 1))
        for b, ((_, share), part, transfer) in enumerate(zip(self.buckets, self.parts, transfers, strict=True)):
            now = now + work.backward * share * factor
            if earlier is not None:
                there = np.maximum(now, earlier[b])
                waited += there - np.maximum(now, self.unhindered[b])
                now = there
            now = now + self.after * part
            go = np.maximum(now, stream)
            unhindered.append(go + transfer.seconds)  # if the others were there as soon as this one
            stream = np.maximum(*transfer.run(go))
            arrived.append(stream)
            self.sent += float(transfer.sent.max())
        self.arrived, self.unhindered = arrived, unhindered
        self.count(now, (work.forward + work.backward) * factor + self.update, waited)

    def drain(self) -> None:
        if self.arrived is not None:
            self.start = np.maximum(self.start, self.arrived[-1])


def stepper(cluster: Cluster, workload: Workload, method: Method) -> Stepper:
    match method:
        case DDP():
            return DDPStepper(cluster, workload, method)
        case DecentDP() | StochasticGradientPush():
            return PipelineStepper(cluster, workload, method)
        case Gossip(rule=Outer() as rule):
            return OuterStepper(cluster, workload, method, rule)
        case Gossip(graph=graph):
            return (AllReduceStepper if graph == ALL_REDUCE else GossipStepper)(cluster, workload, method)
    raise AssertionError(method)


def simulate(
    cluster: Cluster, workload: Workload, method: Method, iterations: int = 200, seed: int = 0, epochs: int = 10
) -> Outcome:
    """All workers start together. The same seed gives each worker the same compute times whatever the method, so that methods are
    compared like with like. ``epochs``: for a schedule that changes with them (Ada); they are spread evenly over the iterations."""
    if iterations < 1:
        raise GossamerError(f"iterations={iterations}; the model runs at least one")
    run = stepper(cluster, workload, method)
    rng = np.random.default_rng([seed, cluster.n])
    noise = cluster.noise.made()
    stride = max(1, -(-cluster.n * iterations // _KEPT))
    durations = np.empty((iterations, len(range(0, cluster.n, stride))))
    drawn = np.zeros(cluster.n)
    for t in range(iterations):
        factor = noise.draw(rng, cluster.n)
        factor *= run.slow
        drawn += factor
        before = run.start
        run.step(t, factor, t * epochs // iterations, epochs)
        np.subtract(run.start[::stride], before[::stride], out=durations[t])
    run.drain()
    spent = float(run.start.sum())
    return Outcome(
        method.label,
        cluster.n,
        iterations,
        float(run.start.max()) / iterations,
        run.waited / spent if spent else 0.0,
        run.networked / spent if spent else 0.0,
        run.sent / iterations,
        durations,
        drawn / iterations * (workload.forward + workload.backward) + run.update,
    )
