"""Weights for neighbours: from which replica hears which to a Round whose rows sum to 1; and whether all are connected."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import networkx as nx
import numpy as np
import scipy.sparse
from scipy.sparse.csgraph import connected_components

from gossamer.errors import GossamerError
from gossamer.graphs.rounds import Permutation, Round, general


def uniform(hears: Sequence[set[int]]) -> Round:
    """Each replica weighs itself and each that it hears alike."""
    n = len(hears)
    w = scipy.sparse.lil_array((n, n))
    for i, peers in enumerate(hears):
        members = sorted({i, *peers})
        w[i, members] = 1 / len(members)
    return general(w)


def metropolis(graph: nx.Graph) -> Round:
    """w_ij = 1/(1 + max(degree of i, degree of j)): symmetric, so doubly stochastic, on any undirected graph."""
    n = graph.number_of_nodes()
    w = scipy.sparse.lil_array((n, n))
    for i, j in graph.edges:
        w[i, j] = w[j, i] = 1 / (1 + max(graph.degree[i], graph.degree[j]))
    w.setdiag(1 - np.asarray(w.sum(axis=1)).ravel())
    return general(w)


def pairs(n: int, couples: Iterable[tuple[int, int]]) -> Round:
    """Two and two, half and half; who is in no couple rests."""
    source = list(range(n))
    for i, j in couples:
        source[i], source[j] = j, i
    return Permutation(n, tuple(source))


def drawn(name: str, draw: Callable[[int], nx.Graph], seed: int, advice: str) -> Round:
    """The first of 100 random graphs that is connected; ``draw(seed)`` makes one."""
    graph = nx.Graph()
    for attempt in range(100):
        graph = draw(seed + attempt * 1_000_003)
        if nx.is_connected(graph):
            return metropolis(graph)
    try:
        connected(name, [metropolis(graph)])
    except GossamerError as error:
        raise GossamerError(f"{error}; 100 draws from seed={seed} were not connected: {advice}") from None
    raise AssertionError("unreachable")


def connected(name: str, rounds: Sequence[Round]) -> Sequence[Round]:
    """The rounds, if over one period every replica hears of every other, perhaps through others."""
    union = scipy.sparse.csr_array(rounds[0].matrix() != 0)
    for r in rounds[1:]:
        union = union + scipy.sparse.csr_array(r.matrix() != 0)
    count, label = connected_components(union, directed=True, connection="strong")
    if count > 1:
        parts = [np.flatnonzero(label == c).tolist() for c in range(min(count, 3))]
        shown = ", ".join("{" + ", ".join(map(str, p[:6])) + (", …}" if len(p) > 6 else "}") for p in parts)
        more = ", …" if count > 3 else ""
        raise GossamerError(f"graph {name!r} is not connected: {count} parts do not all hear of each other: {shown}{more}")
    return rounds


def check_rows(name: str, w: np.ndarray, t: int) -> None:
    """Refuses the t-th matrix if what some replica receives is no average."""
    for i, row in enumerate(w):
        where = f"graph {name!r}: row {i} of matrix {t}"
        if not np.isfinite(row).all() or row.min() < -1e-9:
            raise GossamerError(f"{where} has a weight that is negative or not a number; weights are from 0 to 1")
        if abs(row.sum() - 1) > 1e-6:
            raise GossamerError(f"{where} sums to {row.sum():.6g}; what a replica receives, its own weight included, sums to 1")
