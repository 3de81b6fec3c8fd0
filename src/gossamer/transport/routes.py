"""What one process sends and receives for one Round, when n rows lie in p processes of r = n/p rows each.

A Plan is a pure function of the Round, p and the process, so every process knows what every other one will do without asking.
It holds no tensors and does no arithmetic: ``exchange.py`` moves the rows, ``mixing.py`` adds them up.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field, replace
from functools import lru_cache

import numpy as np
import scipy.sparse
from scipy.sparse.csgraph import connected_components

from gossamer.errors import GossamerError
from gossamer.graphs.rounds import Groups, Hosts, Mean, Round, Verb, general


@dataclass(frozen=True, eq=False)
class Parcel:
    """What travels from one process to another: rows as they are, or weighted sums of the sender's rows where those are fewer
    (for a mean: one)."""

    peer: int
    rows: tuple[int, ...]  # of all n; which rows travel, or are summed
    sums: np.ndarray | None = None  # [count, rows]: the weights, if sums travel

    @property
    def count(self) -> int:
        return len(self.rows) if self.sums is None else len(self.sums)


@dataclass(frozen=True, eq=False)
class Plan:
    """``verb``: none, edges or slices. For edges, ``local`` and ``remote`` are my rows' weights for my own rows and for what
    arrives, in the order of ``receives``. For slices, ``members`` are the processes that it ties together, and ``inner`` is the
    Round that each of them applies to its columns of all the members' rows; with ``reduced``, each puts in the mean of its
    rows only."""

    verb: Verb
    sends: tuple[Parcel, ...] = ()
    receives: tuple[Parcel, ...] = ()
    local: scipy.sparse.csr_array = field(default_factory=lambda: scipy.sparse.csr_array((0, 0)))
    remote: scipy.sparse.csr_array = field(default_factory=lambda: scipy.sparse.csr_array((0, 0)))
    members: tuple[int, ...] = ()
    inner: Round | None = None
    reduced: bool = False
    between: Plan | None = None  # hosts: what my host does with the others, as if it were one process
    place: int = 0  # hosts: which worker of its host this is

    @property
    def raw(self) -> bool:
        """Only whole rows travel, no sums."""
        return all(parcel.sums is None for parcel in self.receives)


def rows_of(process: int, n: int, p: int) -> range:
    """The rows that a process holds."""
    if n % p:
        raise GossamerError(f"{n} replicas do not split evenly over {p} processes; use a number of processes that divides {n}")
    r = n // p
    return range(process * r, (process + 1) * r)


def columns(width: int, members: int, k: int, unit: int = 1) -> slice:
    """The columns that the k-th member owns. ``unit``: so many must stay together. If any can be cut off, then in multiples of 16, so
    that they start on a line of the cache."""
    if unit == 1 and width >= 16 * members:
        unit = 16
    share = -(-width // members // unit) * unit
    return slice(min(k * share, width), min((k + 1) * share, width))


@lru_cache(maxsize=256)
def plan(round_: Round, p: int, process: int, quantized: bool = False, alike: bool = False) -> Plan:
    """``quantized``: rows travel on a wire that rounds, which only edges can do, and no sums, which would be rounded once more. ``alike``:
    a mean must be the same for all, to the bit."""
    n = round_.n
    mine = rows_of(process, n, p)
    if p == 1 or round_.degree == 0:
        return Plan("none")
    # No need to look at n² weights. (Two workers that swap rows may round differently.)
    if isinstance(round_, Mean) and (p > 2 or alike) and not quantized:
        return Plan("slices", members=tuple(range(p)), inner=Mean(p), reduced=True)
    if isinstance(round_, Hosts) and len(mine) == 1 and not quantized:
        host, place = divmod(process, round_.per_node)
        members = tuple(range(host * round_.per_node, (host + 1) * round_.per_node))
        return Plan(
            "hosts", members=members, between=plan(round_.inner, round_.inner.n, host), inner=Mean(round_.per_node), place=place
        )
    weights = _sparse(round_)
    traffic = _traffic(weights, p, quantized)
    label = _components(traffic, p)
    tied = np.flatnonzero(label == label[process]).tolist()
    if len(tied) == 1 and len(mine) == 1:
        return Plan("none")
    if len(tied) > 1 and not quantized and _slices(label, len(mine)) < _edges(traffic, p):
        return _plan_slices(round_, weights, tied, len(mine))
    parcels = [(to, traffic[to, source]) for to, source in sorted(traffic)]
    sends = tuple(replace(parcel, peer=to) for to, parcel in parcels if parcel.peer == process)
    receives = tuple(parcel for to, parcel in parcels if to == process)
    block = weights[mine.start : mine.stop]
    return Plan("edges", sends, receives, block[:, mine.start : mine.stop], _remote(block, receives, len(mine)))


def _sparse(round_: Round) -> scipy.sparse.csr_array:
    n = round_.n
    pairs = [(i, j, w) for i in range(n) for j, w in sorted(round_.neighbors(i).items())]
    i, j, w = (np.array(column) for column in zip(*pairs, strict=True))
    made = scipy.sparse.csr_array((w.astype(np.float64), (i, j)), shape=(n, n))
    made.eliminate_zeros()
    return made


Traffic = dict[tuple[int, int], Parcel]  # (to, source) -> what travels, as the receiver sees it


def _traffic(weights: scipy.sparse.csr_array, p: int, quantized: bool) -> Traffic:
    n = weights.shape[0]
    r = n // p
    needed: dict[tuple[int, int], set[int]] = defaultdict(set)
    coo = weights.tocoo()
    for i, j in zip(coo.row.tolist(), coo.col.tolist(), strict=True):
        if i // r != j // r:
            needed[i // r, j // r].add(j)
    traffic: Traffic = {}
    for (to, source), rows in needed.items():
        ordered = tuple(sorted(rows))
        sums = None
        if len(ordered) > 1 and not quantized:
            part = weights[to * r : (to + 1) * r][:, list(ordered)].toarray()
            distinct = np.unique(part[np.any(part, axis=1)], axis=0)
            sums = distinct if len(distinct) < len(ordered) else None
        traffic[to, source] = Parcel(source, ordered, sums)
    return traffic


def _components(traffic: Traffic, p: int) -> np.ndarray:
    """Which processes are tied together, directly or through others."""
    to, source = (np.array([key[k] for key in traffic], dtype=int) for k in (0, 1))
    return connected_components(scipy.sparse.csr_array((np.ones(len(to)), (to, source)), shape=(p, p)), directed=False)[1]


def _edges(traffic: Traffic, p: int) -> float:
    """Rows that the busiest process receives or sends, edge by edge."""
    received, sent = [0] * p, [0] * p
    for (to, source), parcel in traffic.items():
        received[to] += parcel.count
        sent[source] += parcel.count
    return max(max(received), max(sent))


def _slices(label: np.ndarray, r: int) -> float:
    m = int(np.bincount(label).max())
    return r * 2 * (m - 1) / m


def _plan_slices(round_: Round, weights: scipy.sparse.csr_array, members: list[int], r: int) -> Plan:
    rows = [row for member in members for row in range(member * r, (member + 1) * r)]
    if len(rows) == round_.n:
        inner: Round = round_
    elif isinstance(round_, Groups) and r == 1:
        inner = Mean(len(rows))
    else:
        inner = general(weights[rows][:, rows])
    return Plan("slices", members=tuple(members), inner=inner)


def _remote(block: scipy.sparse.csr_array, receives: tuple[Parcel, ...], r: int) -> scipy.sparse.csr_array:
    """My rows' weights for what arrives: the Round's own for a row, 1 for the sum that was made for it."""
    parts = []
    for parcel in receives:
        part = block[:, list(parcel.rows)]
        if parcel.sums is not None:
            dense = part.toarray()
            part = scipy.sparse.csr_array(np.all(dense[:, None, :] == parcel.sums[None], axis=2).astype(np.float64))
        parts.append(part)
    return scipy.sparse.csr_array(scipy.sparse.hstack(parts)) if parts else scipy.sparse.csr_array((r, 0))
