"""Room 1: which replicas average with which. Plain numpy, no torch.

A Round is one averaging step, one matrix W. A Graph is a cycle of Rounds. The named families make Graphs of any size; ``from_matrix`` and
``from_networkx`` take a person's own.
"""

from gossamer.graphs.directed import directed_exponential, directed_random, directed_ring
from gossamer.graphs.family import (
    OVER_HOSTS,
    alternating_exponential_ring,
    base,
    complete,
    describe,
    equi_dynamic,
    erdos_renyi,
    exponential,
    families,
    hierarchical,
    hypercube,
    lattice,
    one_peer_exponential,
    one_peer_ring,
    parse,
    periodic,
    random_matching,
    random_regular,
    ring,
    star,
    told_hosts,
    torus,
)
from gossamer.graphs.graph import Graph
from gossamer.graphs.own import from_matrix, from_networkx
from gossamer.graphs.rounds import General, Groups, Hosts, Mean, Permutation, Round, Window
from gossamer.spelling import plain_name

__all__ = [
    "OVER_HOSTS",
    "General",
    "Graph",
    "Groups",
    "Hosts",
    "Mean",
    "Permutation",
    "Round",
    "Window",
    "alternating_exponential_ring",
    "base",
    "complete",
    "describe",
    "directed_exponential",
    "directed_random",
    "directed_ring",
    "equi_dynamic",
    "erdos_renyi",
    "exponential",
    "families",
    "from_matrix",
    "from_networkx",
    "hierarchical",
    "hypercube",
    "lattice",
    "one_peer_exponential",
    "one_peer_ring",
    "parse",
    "periodic",
    "plain_name",
    "random_matching",
    "random_regular",
    "ring",
    "star",
    "told_hosts",
    "torus",
]
