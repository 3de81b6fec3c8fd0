"""A closed form below which no iteration time can be: the slowest worker's own computing, and the busiest link's bytes."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from gossamer.graphs import Graph
from gossamer.graphs.rounds import Round
from gossamer.runtime import network
from gossamer.runtime.cluster import Cluster
from gossamer.runtime.methods import ALL_REDUCE, DDP, DecentDP, Gossip, Method, StochasticGradientPush, graph_of
from gossamer.runtime.workload import Workload


def bound(
    cluster: Cluster,
    workload: Workload,
    method: Method,
    compute: np.ndarray | None = None,
    iterations: int | None = None,
) -> float:
    """Seconds per iteration. ``compute``: each worker's mean seconds of computing (an Outcome's ``compute``); by default the
    workload's, times the host's factor and the mean of the noise.

    Hidden transfers: the longer of computing and the transfer. Exposed ones: their sum, for the worker for which it is largest.
    Graphs that change from step to step: the mean over the first ``iterations`` steps, by default over a whole period.
    """
    if compute is None:
        busy = (workload.forward + workload.backward) * cluster.noise.made().mean
        compute = (busy + workload.update) * cluster.compute_factors()
    slowest = float(compute.max())
    if cluster.n == 1:
        return slowest
    if isinstance(method, DDP):
        buckets = workload.buckets(method.bucket_mb if method.overlap else workload.row_bytes)
        return max(slowest, sum(float(network.everyone(cluster, size * method.share).taken[0]) for size, _ in buckets))
    if isinstance(method, (DecentDP, StochasticGradientPush)):
        return max(slowest + getattr(method, "overhead", 0.0), _pipelined(cluster, workload, method, iterations))
    assert isinstance(method, Gossip)
    return _gossip(cluster, workload, method, compute, iterations)


def _pipelined(
    cluster: Cluster, workload: Workload, method: DecentDP | StochasticGradientPush, iterations: int | None
) -> float:
    graph = graph_of(method, cluster.n, cluster.per_host).graph(0, 0, 1)
    steps, total = iterations or graph.period, np.zeros(cluster.n)
    sizes, push = [size for size, _ in workload.buckets(method.bucket_mb)], isinstance(method, StochasticGradientPush)
    for count, round_ in _times(graph, np.arange(1, steps + 1)):
        total += count * sum(transfer.seconds for transfer in network.pipelined(cluster, round_, sizes, push))
    return float(total.max()) / steps


def _times(graph: Graph, steps: np.ndarray) -> Iterator[tuple[int, Round]]:
    """How often each Round is used in these steps."""
    return zip(np.bincount(steps % graph.period, minlength=graph.period), graph.rounds, strict=True)


def _gossip(cluster: Cluster, workload: Workload, method: Gossip, compute: np.ndarray, iterations: int | None) -> float:
    made = graph_of(method, cluster.n, cluster.per_host)
    if len({made.graph(0, epoch, 10).name for epoch in range(10)}) > 1:  # a schedule that changes with the epoch
        return float(compute.max())
    graph, row, every = made.graph(0, 0, 1), method.rows * workload.row_bytes, method.local_steps
    if method.graph == ALL_REDUCE:
        return float((compute + network.slices(cluster, graph.rounds[0], row).seconds).max())
    steps = graph.period * every if iterations is None else iterations
    total = np.zeros(cluster.n)
    for count, round_ in _times(graph, np.arange(steps // every)):
        total += count * network.by_library(cluster, round_, row, method.edge_share, method.verb).seconds
    mean = total / steps
    update = workload.update * cluster.compute_factors() * (steps // every / steps)  # nothing hides it
    exposed = compute + mean if method.order == "atc" else np.maximum(compute, mean + update)
    return float(exposed.max())
