"""The named families of graphs: functions of n (``lattice(96, k=10)``), and names for :func:`parse` (``parse("lattice:k=10", 96)``).

Each is doubly stochastic: averaging keeps the mean of the replicas. (``directed.py`` has others.)
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Sequence
from typing import TypeVar

import networkx as nx
import numpy as np

from gossamer.errors import GossamerError
from gossamer.graphs import weights
from gossamer.graphs.base_graph import base_rounds
from gossamer.graphs.graph import Graph
from gossamer.graphs.rounds import Groups, Hosts, Mean, Permutation, Round, Window, identity
from gossamer.spelling import Registry, plain_name, spelled

GRAPHS: Registry[Graph] = Registry("graph", own=("n",))


def family(make: Callable[..., Sequence[Round]]) -> Callable[..., Graph]:
    """Turns a function that returns Rounds into a named family: checks n, knows n=1, and registers the name."""
    name = make.__name__.replace("_", "-")

    @functools.wraps(make)
    def build(n: int, *values: int | float, **given: int | float) -> Graph:
        n = _check_n(n)
        options = GRAPHS.checked(name, values, given)
        if options.get("seed", 0) < 0:
            raise GossamerError(f"graph {name!r}: seed={options['seed']} is not a seed, an integer from 0")
        return Graph(spelled(name, options), tuple(make(n, **options) if n > 1 else [identity(1)]))

    build.__signature__ = inspect.signature(make).replace(return_annotation=Graph)  # type: ignore[attr-defined]
    GRAPHS.makers[name] = build
    return build


@family
def complete(n: int) -> Sequence[Round]:
    """Each replica with all others: the exact mean each step."""
    return [Mean(n)]


@family
def lattice(n: int, k: int) -> Sequence[Round]:
    """Ring lattice with coordination number k: k//2 neighbours on each side. k = n-1 is the complete graph."""
    if k == n - 1 or (k == n == 2):  # two replicas: ring and complete coincide
        return [Mean(n)]
    if not 2 <= k <= n - 1:
        raise GossamerError(f"lattice: k={k} is out of range for n={n}; k is from 2 (ring) to {n - 1} (complete)")
    return [Window(n, k // 2)]


@family
def ring(n: int) -> Sequence[Round]:
    """One neighbour on each side."""
    return [Mean(n)] if n <= 3 else [Window(n, 1)]


@family
def torus(n: int) -> Sequence[Round]:
    """Four neighbours on the most square grid a × b = n that wraps around."""
    a = next(d for d in range(math.isqrt(n), 0, -1) if n % d == 0)
    if a == 1:
        near = [str(m) for m in (n - 1, n + 1) if m >= 4] or ["4"]
        raise GossamerError(
            f"torus: n={n} is prime, so there is no a × b grid; use n={' or '.join(near)}, or a graph for any n: 'ring', 'base:k=1'"
        )
    b = n // a
    grid = np.arange(n).reshape(a, b)
    hears: list[set[int]] = [set() for _ in range(n)]
    for axis in (0, 1):
        for step in (-1, 1):
            for i, j in zip(grid.ravel(), np.roll(grid, step, axis).ravel(), strict=True):
                hears[i].add(int(j))
    return [weights.uniform(hears)]


@family
def exponential(n: int) -> Sequence[Round]:
    """Directed and static: i hears i-1, i-2, i-4, … (⌊log2(n-1)⌋+1 neighbours)."""
    return [weights.uniform([{(i - 2**e) % n for e in range((n - 1).bit_length())} for i in range(n)])]


@family
def star(n: int) -> Sequence[Round]:
    """Each replica with replica 0, Metropolis weights."""
    return [weights.metropolis(nx.star_graph(n - 1))]


@family
def hypercube(n: int) -> Sequence[Round]:
    """Pairs i ↔ i XOR 2^t; the exact mean after log2 n steps. n is a power of two."""
    if n & (n - 1):
        low = 1 << (n.bit_length() - 1)
        raise GossamerError(
            f"hypercube: n={n} is not a power of two; use n={low} or {2 * low}, or 'base:k=1', which is exact for any n"
        )
    return [Permutation(n, tuple(i ^ (1 << e) for i in range(n))) for e in range(n.bit_length() - 1)]


@family
def one_peer_exponential(n: int) -> Sequence[Round]:
    """Directed: send to i+2^t, receive from i-2^t, half and half. Exact after log2 n steps if n is a power of two."""
    return _one_peer_exponential(n)


def _one_peer_exponential(n: int) -> list[Permutation]:
    return [Permutation(n, tuple((i - 2**e) % n for i in range(n))) for e in range((n - 1).bit_length())]


@family
def periodic(n: int, every: int = 8, gap: int = 0, bits: int = 32) -> Sequence[Round]:
    """The mean of all in every ``every``-th step. Between: nothing (local steps), or one peer in every ``gap``-th step. ``bits``: 8 for
    means of how far each has moved, rounded, which take a quarter of the bytes."""
    for what, value, least in (("every", every, 1), ("gap", gap, 0)):
        if value < least:
            raise GossamerError(f"periodic: {what}={value} is out of range; it is at least {least}")
    if bits not in (8, 32):
        raise GossamerError(f"periodic: bits={bits} is not known; means travel in 32 or 8 bits")
    peers = _one_peer_exponential(n) if gap else []
    rounds: list[Round] = []
    for t in range(math.lcm(every, gap * len(peers)) if gap else every):
        if (t + 1) % every == 0:
            rounds.append(Mean(n, bits))
        else:
            rounds.append(peers[t // gap % len(peers)] if gap and (t + 1) % gap == 0 else identity(n))
    return rounds


@family
def one_peer_ring(n: int) -> Sequence[Round]:
    """A ring, one neighbour at a time: (0,1)(2,3)… then (1,2)(3,4)…; odd n takes a third round and lets one rest in each."""
    starts = (0,) if n == 2 else (0, 1) if n % 2 == 0 else (0, 1, n - 1)
    return [weights.pairs(n, (((s + 2 * j) % n, (s + 2 * j + 1) % n) for j in range(n // 2))) for s in starts]


@family
def random_matching(n: int, seed: int = 0, rounds: int = 64) -> Sequence[Round]:
    """New random pairs each step (odd n: one rests), repeating after ``rounds``."""
    _check_rounds("random-matching", rounds)
    rng = np.random.default_rng([seed, n])
    orders = (rng.permutation(n).tolist() for _ in range(rounds))
    return weights.connected("random-matching", [weights.pairs(n, zip(o[0 : n - 1 : 2], o[1::2], strict=True)) for o in orders])


@family
def random_regular(n: int, d: int = 4, seed: int = 0) -> Sequence[Round]:
    """A random graph in which each replica has d neighbours."""
    if not 1 <= d <= n - 1 or (n * d) % 2 or (d == 1 and n > 2):
        raise GossamerError(f"random-regular: no connected graph with n={n} and d={d}; d is from 2 to {n - 1} and n·d is even")
    return [weights.drawn("random-regular", lambda s: nx.random_regular_graph(d, n, seed=s), seed, "try a larger d")]


@family
def erdos_renyi(n: int, p: float = 0.1, seed: int = 0) -> Sequence[Round]:
    """Each pair is joined with probability p; Metropolis weights. Drawn again (up to 100 times) until it is connected."""
    if not 0 < p <= 1:
        raise GossamerError(f"erdos-renyi: p={p} is out of range; p is a probability above 0 and up to 1")
    advice = f"p of {min(1.0, 1.5 * math.log(n) / n):.2f} or more connects n={n} as a rule"
    return [weights.drawn("erdos-renyi", lambda s: nx.gnp_random_graph(n, p, seed=s), seed, advice)]


@family
def base(n: int, k: int = 1) -> Sequence[Round]:
    """Base-(k+1): at most k neighbours at a time and the exact mean after finitely many steps for any n."""
    if not 1 <= k <= n - 1:
        raise GossamerError(f"base: k={k} is out of range for n={n}; k is from 1 to {n - 1}")
    return base_rounds(n, k)


@family
def alternating_exponential_ring(n: int, per_node: int = 4) -> Sequence[Round]:
    """Hosts of ``per_node`` replicas. In turn, half of the host pairs j ↔ j XOR 2^i average over both hosts while the others
    average inside each host; then they swap. Exact after 2·log2(hosts) steps."""
    name = "alternating-exponential-ring"
    hosts, rest = divmod(n, per_node) if per_node > 0 else (0, 1)
    if rest or hosts & (hosts - 1):
        raise GossamerError(
            f"{name}: n={n} with per_node={per_node} is not a power of two of full hosts; n is per_node × 1, 2, 4, 8, …"
        )
    inside = [tuple(range(h * per_node, (h + 1) * per_node)) for h in range(hosts)]
    if hosts == 1:
        return [Mean(n)]
    rounds: list[Round] = []
    for e in range(hosts.bit_length() - 1):
        pairs = [(h, h ^ (1 << e)) for h in range(hosts) if not h & (1 << e)]
        for turn in (0, 1):
            groups: list[tuple[int, ...]] = []
            for index, (a, b) in enumerate(pairs):
                groups += [inside[a] + inside[b]] if index % 2 == turn else [inside[a], inside[b]]
            rounds.append(Groups(n, tuple(groups)))
    return rounds


@family
def hierarchical(n: int, per_node: int = 4) -> Sequence[Round]:
    """Hosts of ``per_node`` replicas: the mean inside each host, and one-peer exponential between hosts. Only one row per host
    crosses the network."""
    if per_node < 1 or n % per_node:
        raise GossamerError(f"hierarchical: n={n} is not a multiple of per_node={per_node}, the replicas on each host")
    hosts = n // per_node
    if hosts == 1:
        return [Mean(n)]
    between = _one_peer_exponential(hosts)
    return between if per_node == 1 else [Hosts(n, per_node, inner) for inner in between]


@family
def equi_dynamic(n: int, seed: int = 0, rounds: int = 64, eta: float = 0.5) -> Sequence[Round]:
    """OD-EquiDyn: each step one random offset a; i keeps 1 - eta(n-1)/n of itself and takes the rest from i-a."""
    _check_rounds("equi-dynamic", rounds)
    if not 0 < eta <= 1:
        raise GossamerError(f"equi-dynamic: eta={eta} is out of range; eta is above 0 and up to 1")
    offsets = np.random.default_rng([seed, n]).integers(1, n, size=rounds).tolist()
    weight = eta * (n - 1) / n
    made = [Permutation(n, tuple((i - a) % n for i in range(n)), weight) for a in offsets]
    return weights.connected("equi-dynamic", made)


# --- By name ------------------------------------------------------------------------------------------------------------


def families() -> list[str]:
    """The names that :func:`parse` knows."""
    return sorted(GRAPHS.makers)


def describe(name: str) -> str:
    """What a family is, in its own words."""
    return inspect.cleandoc(GRAPHS.makers[name].__doc__ or "")


_T = TypeVar("_T")
OVER_HOSTS = ("alternating-exponential-ring", "hierarchical")  # these must know how many workers a host has


def told_hosts(graph: _T, per_node: int) -> _T | str:
    """A graph over hosts whose name says nothing about them, with the number of workers per host; any other as it is."""
    if isinstance(graph, str) and ":" not in graph and plain_name(graph) in OVER_HOSTS:
        return f"{graph}:per_node={per_node}"
    return graph


def parse(text: str, n: int, also: Sequence[str] = ()) -> Graph:
    """``"ring"``, ``"lattice:k=10"``, ``"random-regular:d=4,seed=1"`` … for n replicas. ``also``: other names that the caller knows, for
    the error."""
    return GRAPHS.make(text, n, also=also)


# --- Checks -------------------------------------------------------------------------------------------------------------


def _check_n(n: int) -> int:
    if isinstance(n, bool) or not isinstance(n, (int, np.integer)) or n < 1:
        raise GossamerError(f"n={n!r}: a graph needs at least one replica, as an integer")
    return int(n)


def _check_rounds(name: str, rounds: int) -> None:
    if rounds < 1:
        raise GossamerError(f"{name}: rounds={rounds} is out of range; it is at least 1")
