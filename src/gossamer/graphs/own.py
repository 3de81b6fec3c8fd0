"""A person's own graph: from weight matrices, or from networkx."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import networkx as nx
import numpy as np

from gossamer.errors import GossamerError
from gossamer.graphs import directed, weights
from gossamer.graphs.graph import Graph
from gossamer.graphs.rounds import Round, general


def from_matrix(matrix: np.ndarray | Sequence[np.ndarray], n: int | None = None, name: str = "own") -> Graph:
    """A graph from one weight matrix ``[n, n]``, or from several that are used in turn. Row i holds what i receives."""
    try:
        array = np.asarray(matrix, dtype=np.float64)
    except (ValueError, TypeError):
        raise GossamerError(f"graph {name!r}: the weight matrices must be numbers and all of the same size [n, n]") from None
    stack = array[None] if array.ndim == 2 else array
    if stack.ndim != 3 or stack.shape[1] != stack.shape[2] or stack.shape[0] == 0 or stack.shape[1] == 0:
        raise GossamerError(f"graph {name!r}: a weight matrix is square, [n, n]; this one is {list(array.shape)}")
    if n is not None and stack.shape[1] != n:
        raise GossamerError(f"graph {name!r}: the matrix is for {stack.shape[1]} replicas, but n={n}")
    for t, w in enumerate(stack):
        weights.check_rows(name, w, t)
    return Graph(_own(name, stack), tuple(weights.connected(name, [general(w) for w in stack])))


def from_networkx(graph: nx.Graph, weight: str | None = None, name: str = "own", sums: str = "rows") -> Graph:
    """A graph from networkx. Replica i is the i-th node; an edge u → v means that v receives from u.

    Weights: Metropolis for an undirected graph, 1/(in-degree + 1) for a directed one; or those in the edge attribute
    named ``weight``, and each replica keeps what is left of 1. ``sums="columns"``, for a directed graph and method ``push-sum``: each
    replica splits its row evenly between itself and those that it sends to.
    """
    if graph.is_multigraph():
        raise GossamerError(f"graph {name!r} is a multigraph; two replicas have one edge, so make it a Graph or DiGraph")
    if graph.number_of_nodes() == 0:
        raise GossamerError(f"graph {name!r} has no nodes")
    index = {node: i for i, node in enumerate(graph.nodes)}
    plain = nx.relabel_nodes(graph, index)
    plain.remove_edges_from(list(nx.selfloop_edges(plain)))
    n = len(index)
    if weight is not None:
        for u, v, data in plain.edges(data=True):
            if weight not in data:
                raise GossamerError(f"graph {name!r}: edge {u} → {v} has no attribute {weight!r}")
        w = nx.to_numpy_array(plain, nodelist=range(n), weight=weight).T
        w[np.arange(n), np.arange(n)] = 1 - w.sum(axis=1)
        return from_matrix(w, name=name)
    if sums not in ("rows", "columns"):
        raise GossamerError(f"graph {name!r}: sums={sums!r} is not known; weights sum to 1 over 'rows' or 'columns'")
    if plain.is_directed() and sums == "columns":
        made: Round = directed.of_networkx(plain)
    elif plain.is_directed():
        made = weights.uniform([set(plain.predecessors(i)) for i in range(n)])
    else:
        made = weights.metropolis(plain)
    return Graph(_own(name, made.matrix()), tuple(weights.connected(name, [made])))


def _own(name: str, matrices: np.ndarray) -> str:
    """A name that tells two graphs with different weights apart, as a resumed run must."""
    return f"{name}-{hashlib.sha256(matrices.tobytes()).hexdigest()[:8]}" if name == "own" else name
