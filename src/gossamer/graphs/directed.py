"""Directed graphs: a replica may send to others than it hears. Columns of W sum to 1, so nothing is lost; rows need not, so what a replica
receives is no average. Method ``push-sum`` divides by a weight that travels along; methods that average refuse such a graph."""

from __future__ import annotations

from collections.abc import Sequence

import networkx as nx
import numpy as np
import scipy.sparse

from gossamer.errors import GossamerError
from gossamer.graphs import weights
from gossamer.graphs.family import family
from gossamer.graphs.rounds import Round, general


def pushed(sends: Sequence[set[int]]) -> Round:
    """Each replica splits its row evenly between itself and those that it sends to."""
    n = len(sends)
    w = scipy.sparse.lil_array((n, n))
    for j, targets in enumerate(sends):
        members = sorted({j, *targets})
        for i in members:
            w[i, j] = 1 / len(members)
    return general(w)


def of_networkx(graph: nx.DiGraph) -> Round:
    """Nodes are 0 to n-1; an edge u → v means that v receives from u."""
    return pushed([set(graph.successors(j)) for j in range(graph.number_of_nodes())])


@family
def directed_ring(n: int) -> Sequence[Round]:
    """Each replica sends to the next one. (All send to one, so rows of W sum to 1 as well.)"""
    return [pushed([{(j + 1) % n} for j in range(n)])]


@family
def directed_exponential(n: int) -> Sequence[Round]:
    """Each replica sends to those 1, 2, 4, … places on. (All send to as many, so rows of W sum to 1 as well.)"""
    offsets = [2**k for k in range((n - 1).bit_length())]
    return [pushed([{(j + offset) % n for offset in offsets} for j in range(n)])]


@family
def directed_random(n: int, degree: float = 2.0, seed: int = 0) -> Sequence[Round]:
    """Strongly connected, with unequal numbers of receivers: a ring through all replicas in random order, and further edges at random,
    so that a replica sends to ``degree`` others on average."""
    if not 1 <= degree <= n - 1:
        raise GossamerError(f"directed-random: degree={degree:g} is out of range for n={n}; it is from 1 to {n - 1}")
    rng = np.random.default_rng([seed, n])
    order = rng.permutation(n).tolist()
    sends: list[set[int]] = [set() for _ in range(n)]
    for j, i in zip(order, order[1:] + order[:1], strict=True):
        sends[j].add(i)
    others = [(j, i) for j in range(n) for i in range(n) if i != j and i not in sends[j]]
    for k in rng.permutation(len(others))[: round((degree - 1) * n)].tolist():
        j, i = others[k]
        sends[j].add(i)
    return weights.connected("directed-random", [pushed(sends)])
