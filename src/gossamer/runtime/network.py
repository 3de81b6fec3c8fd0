"""A Round as transfers: which worker waits for which, and how long a transfer takes on a given cluster.

Links are shared in fixed parts: if k flows of a Round leave through one host's interface, each has 1/k of it, whether or not the
others are under way. Then every time is a maximum of sums of earlier times (max-plus), all of it vectorised over workers; and more
bandwidth can never make anything later, which a link that is shared by the flows of the moment can't promise.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np
import scipy.sparse
from scipy.sparse.csgraph import connected_components

from gossamer.errors import GossamerError
from gossamer.graphs.rounds import General, Groups, Hosts, Mean, Permutation, Round, Window
from gossamer.rows import codec
from gossamer.runtime.cluster import Cluster

Array = np.ndarray


class Transfer(ABC):
    """``seconds``: how long a worker's part takes if no worker waits; ``sent``: bytes that leave it. Both ``[n]``. ``coded``: in 8 bits.
    ``durations``: its attributes that are times."""

    seconds: Array
    sent: Array
    coded = False
    durations: tuple[str, ...] = ("taken", "seconds")

    def dragged(self, drag: float) -> Transfer:
        """The same, when it takes longer by this share."""
        for name in self.durations:
            setattr(self, name, getattr(self, name) * (1 + drag))
        return self

    @abstractmethod
    def run(self, go: Array) -> tuple[Array, Array]:
        """From when each worker is ready: when all is there that it receives, and when all has left that it sends."""


class Nothing(Transfer):
    """No worker sends anything."""

    durations = ()

    def __init__(self, n: int) -> None:
        self.seconds = self.sent = np.zeros(n)

    def run(self, go: Array) -> tuple[Array, Array]:
        return go, go


class Shift(Transfer):
    """Each worker receives one row at most and sends one at most: the sources are a permutation."""

    def __init__(self, cluster: Cluster, source: Array, size: float) -> None:
        n = len(source)
        mine = np.arange(n)
        self.source = source
        self.target = np.empty(n, dtype=np.intp)
        self.target[source] = mine
        busy = source != mine
        taken = np.zeros(n)
        taken[busy] = _edge_seconds(cluster, source[busy], mine[busy], size)
        self.taken = taken
        self.seconds = np.maximum(taken, taken[self.target])
        self.sent = np.where(busy, float(size), 0.0)

    def run(self, go: Array) -> tuple[Array, Array]:
        arrived = np.maximum(go, go[self.source])
        arrived += self.taken
        return arrived, arrived[self.target]


class Edges(Transfer):
    """Any rows to any neighbours, ``target[e]`` from ``source[e]``."""

    def __init__(self, cluster: Cluster, source: Array, target: Array, size: float) -> None:
        order = np.lexsort((source, target))
        self.source, self.target = source[order], target[order]
        self.n = cluster.n
        self.taken = _edge_seconds(cluster, self.source, self.target, size)
        self.by_source = np.lexsort((self.target, self.source))
        self.receivers, self.in_starts = np.unique(self.target, return_index=True)
        self.senders, self.out_starts = np.unique(self.source[self.by_source], return_index=True)
        self.sent = np.bincount(self.source, minlength=self.n) * float(size)
        self.seconds = np.maximum(*self._collect(self.taken, np.zeros(self.n)))

    def _collect(self, ends: Array, otherwise: Array) -> tuple[Array, Array]:
        arrived, left = otherwise.copy(), otherwise.copy()
        arrived[self.receivers] = np.maximum.reduceat(ends, self.in_starts)
        left[self.senders] = np.maximum.reduceat(ends[self.by_source], self.out_starts)
        return arrived, left

    def run(self, go: Array) -> tuple[Array, Array]:
        ends = np.maximum(go[self.source], go[self.target])
        ends += self.taken
        return self._collect(ends, go)


class Together(Transfer):
    """Groups in which all workers wait for each other; ``taken`` seconds and ``sent`` bytes per group."""

    def __init__(self, groups: list[Array], taken: Array, sent: Array, n: int) -> None:
        self.taken = taken
        self.members, self.starts = _in_a_row(groups)
        self.label = np.empty(n, dtype=np.intp)
        self.label[self.members] = np.repeat(np.arange(len(groups)), [len(group) for group in groups])
        self.seconds = taken[self.label]
        self.sent = sent[self.label]

    def run(self, go: Array) -> tuple[Array, Array]:
        if len(self.starts) == 1:
            done = np.full(len(go), go.max() + self.taken[0])
        else:
            done = (np.maximum.reduceat(go[self.members], self.starts) + self.taken)[self.label]
        return done, done


class Stages(Transfer):
    """Hosts: a mean inside each, one row between two, and back inside."""

    durations = ("inside", "between", "seconds")

    def __init__(self, cluster: Cluster, round_: Hosts, size: float) -> None:
        m = self.per = round_.per_node
        hosts = round_.n // m
        self.source = np.asarray(round_.inner.source)
        self.target = np.empty(hosts, dtype=np.intp)
        self.target[self.source] = np.arange(hosts)
        groups = np.arange(round_.n).reshape(hosts, m)
        self.inside = _stage_seconds(cluster, list(groups), size)  # one of two stages, [hosts]
        busy = self.source != np.arange(hosts)
        taken = np.zeros((hosts, m))
        mine, theirs = groups[busy].ravel(), groups[self.source[busy]].ravel()
        taken[busy] = _edge_seconds(cluster, theirs, mine, size / m).reshape(-1, m)
        self.between = taken.max(axis=1)
        alone = 2 * self.inside + np.maximum(self.between, self.between[self.target])
        self.seconds = np.repeat(alone, m)
        self.sent = (2 * (m - 1) / m + np.repeat(busy, m) / m) * size

    def run(self, go: Array) -> tuple[Array, Array]:
        met = go.reshape(-1, self.per).max(axis=1) + self.inside
        arrived = np.maximum(met, met[self.source]) + self.between
        done = np.maximum(arrived, arrived[self.target]) + self.inside  # a stage ends when all is sent and received
        spread = np.repeat(done, self.per)
        return spread, spread


# --- From a Round -------------------------------------------------------------------------------------------------------


def by_library(cluster: Cluster, round_: Round, size: int, edge_share: float, verb: str = "auto") -> Transfer:
    """As Gossamer moves it: by edges, by slices or over hosts. ``size``: bytes of a row."""
    _check(cluster, round_)
    how: str = round_.verb(edge_share)
    if how == "none" or cluster.n == 1:
        return Nothing(cluster.n)
    if how == "hosts":
        assert isinstance(round_, Hosts)
        if verb != "auto":
            raise GossamerError("hierarchical has its own way over the hosts; leave out edges or slices")
        return Stages(cluster, round_, size)
    if (how if verb == "auto" else verb) == "slices":
        if not (isinstance(round_, Mean) and round_.bits < 32):
            return slices(cluster, round_, size)
        return of_mean(cluster, round_, size, codec.SHARE, coded=True)
    if isinstance(round_, Permutation):
        return Shift(cluster, np.asarray(round_.source), size * edge_share)
    return Edges(cluster, *edges(round_), size * edge_share)


def slices(cluster: Cluster, round_: Round, size: float, between: float | None = None) -> Transfer:
    """All workers' columns to their owner, applied there, and back: two stages. ``between``: seconds of applying."""
    groups = _groups(round_)
    sizes = np.array([len(group) for group in groups])
    stage = _stage_seconds(cluster, groups, size)
    apply = np.where(sizes > 1, cluster.costs.apply * 1e-9 * size if between is None else between, 0.0)
    return Together(groups, 2 * stage + apply, 2 * (sizes - 1) / sizes * size, cluster.n)


def of_mean(cluster: Cluster, round_: Round, size: float, share: float, coded: bool) -> Transfer:
    """A mean of all by slices, in so much of a row's bytes. ``coded``: the owner of some columns decodes all rows of them, and encodes
    their mean."""
    if cluster.n == 1:
        return Nothing(1)
    costs = cluster.costs
    made = slices(cluster, round_, size * share, (costs.decode + costs.encode / round_.n) * 1e-9 * size if coded else None)
    made.coded = coded
    return made


class Rings:
    """Each group of a Round all-reduces around a ring of its own, in the order of ranks: 2(m-1) messages one after the other.
    ``sized`` gives the transfer of so many bytes."""

    def __init__(self, cluster: Cluster, round_: Round) -> None:
        _check(cluster, round_)
        self.groups, self.n = _groups(round_), cluster.n
        self.sizes = np.array([len(group) for group in self.groups])
        host = np.arange(cluster.n) // cluster.per_host
        spans = [np.unique(host[group]) for group in self.groups]
        crossing = np.zeros(cluster.hosts)  # rings that leave each host
        inside = np.zeros(cluster.hosts)  # links of rings inside it
        for span, group in zip(spans, self.groups, strict=True):
            crossing[span] += len(span) > 1
            inside[span] += np.bincount(host[group])[span] - (len(span) > 1)
        rates = cluster.host_rates() / np.maximum(crossing, 1)
        local = cluster.intra_rate / (np.maximum(inside, 1) if _shared(cluster) else np.ones(cluster.hosts))
        self.per_byte, self.latency = np.zeros(len(spans)), np.zeros(len(spans))  # of one of those messages
        for g, (span, m) in enumerate(zip(spans, self.sizes, strict=True)):
            if m > 1:
                rate = float(local[span].min()) if m > len(span) else np.inf
                rate = min(rate, float(rates[span].min())) if len(span) > 1 else rate
                self.per_byte[g] = cluster.costs.ring / rate + cluster.costs.reduce * 1e-9
                self.latency[g] = cluster.inter_latency if len(span) > 1 else cluster.intra_latency

    def sized(self, size: float) -> Together:
        messages = 2 * (self.sizes - 1)
        each = self.per_byte * size / self.sizes
        return Together(self.groups, messages * (self.latency + each), messages / self.sizes * size, self.n)


def pipelined(cluster: Cluster, round_: Round, sizes: Sequence[int], push: bool) -> list[Transfer]:
    """One transfer per bucket: an all-reduce in each group, or with ``push`` rows from neighbour to neighbour."""
    if not push:
        rings = Rings(cluster, round_)
        return [rings.sized(size) for size in sizes]
    return [by_library(cluster, round_, size, 1.0) for size in sizes]


def everyone(cluster: Cluster, size: float) -> Together:
    """A ring all-reduce over all workers."""
    return Rings(cluster, Mean(cluster.n)).sized(size)


def edges(round_: Round) -> tuple[Array, Array]:
    """(source, target) of every row that travels."""
    n = round_.n
    if isinstance(round_, Window):
        offsets = np.concatenate([np.arange(-round_.half, 0), np.arange(1, round_.half + 1)])
        target = np.repeat(np.arange(n), len(offsets))
        return (target + np.tile(offsets, n)) % n, target
    if isinstance(round_, Permutation):
        source, target = np.asarray(round_.source), np.arange(n)
    elif isinstance(round_, General):
        coo = round_.weights.tocoo()
        source, target = coo.col.astype(np.intp), coo.row.astype(np.intp)
    else:
        pairs = [(np.tile(g, len(g)), np.repeat(g, len(g))) for g in _groups(round_)]
        source, target = (np.concatenate(column) for column in zip(*pairs, strict=True))
    apart = source != target
    return source[apart], target[apart]


def _groups(round_: Round) -> list[Array]:
    """Who is tied together by a Round, directly or through others."""
    if isinstance(round_, (Mean, Window, Hosts)):
        return [np.arange(round_.n)]
    if isinstance(round_, Groups):
        return [np.asarray(group) for group in round_.groups]
    source, target = edges(round_)
    joined = scipy.sparse.csr_array((np.ones(len(source)), (target, source)), shape=(round_.n, round_.n))
    label = connected_components(joined, directed=False)[1]
    order = np.argsort(label, kind="stable")
    return np.split(order, np.flatnonzero(np.diff(label[order])) + 1)


def _in_a_row(groups: list[Array]) -> tuple[Array, Array]:
    """The members of all groups, and where among them each group begins."""
    return np.concatenate(groups), np.cumsum([0, *(len(group) for group in groups[:-1])])


def _check(cluster: Cluster, round_: Round) -> None:
    if round_.n != cluster.n:
        raise GossamerError(f"the graph is for {round_.n} workers, but cluster {cluster.name!r} has {cluster.n}")


# --- How long ------------------------------------------------------------------------------------------------------------


def _shared(cluster: Cluster) -> bool:
    return cluster.intra is not None and cluster.intra.shared


def _edge_seconds(cluster: Cluster, source: Array, target: Array, size: float) -> Array:
    """Of each edge of one Round, with its fixed part of the links that it goes over."""
    here, there = source // cluster.per_host, target // cluster.per_host
    far = here != there
    near = ~far
    rates = cluster.host_rates()
    leaving = np.bincount(here[far], minlength=cluster.hosts)
    coming = np.bincount(there[far], minlength=cluster.hosts)
    taken = np.empty(len(source))
    slowest = np.maximum(leaving[here[far]] / rates[here[far]], coming[there[far]] / rates[there[far]])
    taken[far] = cluster.inter_latency + size * slowest
    if _shared(cluster):
        flows = np.bincount(here[near], minlength=cluster.hosts)[here[near]]
    else:
        sends = np.bincount(source[near], minlength=cluster.n)[source[near]]
        receives = np.bincount(target[near], minlength=cluster.n)[target[near]]
        flows = np.maximum(sends, receives)
    taken[near] = cluster.intra_latency + size * flows / cluster.intra_rate
    return taken


def _stage_seconds(cluster: Cluster, groups: list[Array], size: float) -> Array:
    """Of one stage of slices, in which each member sends a part of ``size`` to each other: per group, all groups at once."""
    n, hosts = cluster.n, cluster.hosts
    host = np.arange(n) // cluster.per_host
    far, near = np.zeros(n), np.zeros(n)  # bytes that each worker sends to other hosts, and inside its own
    for group in groups:
        place = host[group] - host[group].min()
        here = np.bincount(place)[place]
        far[group] = (len(group) - here) / len(group) * size
        near[group] = (here - 1) / len(group) * size
    out = np.bincount(host, weights=far, minlength=hosts) / cluster.host_rates()
    local = np.bincount(host, weights=near, minlength=hosts)[host] if _shared(cluster) else near
    taken = np.maximum(
        np.where(far > 0, out[host] + cluster.inter_latency, 0.0),
        np.where(near > 0, local / cluster.intra_rate + cluster.intra_latency, 0.0),
    )
    members, starts = _in_a_row(groups)
    return np.maximum.reduceat(taken[members], starts)
