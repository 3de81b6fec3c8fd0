"""Graphs: what must hold for every family and any n, and what each one promises."""

import math

import networkx as nx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gossamer import graphs
from gossamer.errors import GossamerError
from gossamer.graphs.rounds import General, Groups, Mean, Permutation, Window

PRIMES = [2, 3, 5, 7, 11, 13, 31, 61, 97, 127, 199]
ANY_N = st.one_of(st.just(1), st.sampled_from(PRIMES), st.integers(2, 200))


def applicable(n):
    """Every family, with parameters that are right for n."""
    names = ["complete", "ring", "exponential", "star", "one-peer-exponential", "one-peer-ring", "random-matching:seed=3"]
    names += ["erdos-renyi:p=0.9,seed=1", "base:k=1", "equi-dynamic:seed=2"]
    if n == 1 or any(n % d == 0 for d in range(2, math.isqrt(n) + 1)):
        names.append("torus")
    if n & (n - 1) == 0:
        names += ["hypercube", "alternating-exponential-ring:per_node=1"]
    if n % 4 == 0:
        names.append("hierarchical:per_node=4")
    if n % 4 == 0 and (n // 4) & (n // 4 - 1) == 0:
        names.append("alternating-exponential-ring:per_node=4")
    if n > 4:
        names += ["random-regular:d=4,seed=0", "base:k=3"]
    if n > 2:
        names += ["lattice:k=2", f"lattice:k={n // 2 + 1}", f"lattice:k={n - 1}"]
    return names


def product(graph, steps=None):
    w = np.eye(graph.n)
    for t in range(graph.period if steps is None else steps):
        w = graph.matrix(t) @ w
    return w


def is_mean(w):
    return np.allclose(w, 1 / len(w), atol=1e-12)


@given(ANY_N, st.data())
@settings(max_examples=120, deadline=None)
def test_every_family_is_doubly_stochastic_for_any_n(n, data):
    graph = graphs.parse(data.draw(st.sampled_from(applicable(n))), n)
    assert graph.n == n
    assert graph.is_doubly_stochastic()
    for t in range(min(graph.period, 8)):
        w = graph.matrix(t)
        assert w.shape == (n, n)
        assert w.dtype == np.float64
        assert w.min() >= 0
        np.testing.assert_allclose(w.sum(axis=0), 1, atol=1e-9)
        np.testing.assert_allclose(w.sum(axis=1), 1, atol=1e-9)


@given(ANY_N, st.data(), st.integers(0, 1000))
@settings(max_examples=80, deadline=None)
def test_neighbors_degree_and_matrix_tell_the_same(n, data, t):
    graph = graphs.parse(data.draw(st.sampled_from(applicable(n))), n)
    w = graph.matrix(t)
    i = data.draw(st.integers(0, n - 1))
    row = np.zeros(n)
    for peer, weight in graph.neighbors(i, t).items():
        row[peer] = weight
    np.testing.assert_allclose(row, w[i], atol=1e-12)
    others = (w > 0) & ~np.eye(n, dtype=bool)
    assert graph.degree(t) == others.sum(axis=1).max()
    np.testing.assert_array_equal(graph.matrix(t), graph.matrix(t + graph.period))


@given(ANY_N, st.data())
@settings(max_examples=60, deadline=None)
def test_cost_is_never_more_than_an_all_reduce(n, data):
    graph = graphs.parse(data.draw(st.sampled_from(applicable(n))), n)
    for t in range(graph.period):
        made = graph.round(t)
        assert made.cost(1_000_000) <= 2_000_000 * (n - 1) / n + 1
        assert made.cost(1_000_000) <= made.degree * 1_000_000
        assert (made.verb() == "none") == (made.degree == 0)


def test_cost_of_the_kinds():
    assert graphs.complete(8).round(0).cost(800) == 1400  # 2·7/8 rows
    assert graphs.ring(8).round(0).cost(800) == 1400  # slices beat two edges
    assert graphs.ring(8).round(0).verb() == "slices"
    assert graphs.one_peer_exponential(8).round(0).cost(800) == 800
    assert graphs.one_peer_exponential(8).round(0).verb() == "edges"
    aer = graphs.alternating_exponential_ring(16, per_node=4)
    assert aer.round(0).cost(800) == 1400  # 8 replicas of two hosts
    assert graphs.complete(1).round(0).cost(800) == 0
    assert graphs.complete(2).round(0).verb() == "edges"


@given(st.integers(3, 200))
@settings(max_examples=40, deadline=None)
def test_lattice_goes_from_ring_to_complete(n):
    np.testing.assert_array_equal(graphs.lattice(n, k=2).matrix(), graphs.ring(n).matrix())
    np.testing.assert_array_equal(graphs.lattice(n, k=n - 1).matrix(), graphs.complete(n).matrix())


def test_two_replicas_and_one():
    np.testing.assert_array_equal(graphs.ring(2).matrix(), graphs.complete(2).matrix())
    np.testing.assert_array_equal(graphs.lattice(2, k=2).matrix(), graphs.ring(2).matrix())
    for name in graphs.families():
        graph = graphs.parse("lattice:k=2" if name == "lattice" else name, 1)
        np.testing.assert_array_equal(graph.matrix(), [[1.0]])
        assert graph.spectral_gap() == 1
        assert graph.neighbors(0) == {0: 1.0}


# FACTS.md 1.4: the second largest |eigenvalue| of W, computed there.
TABLE = {
    12: {"ring": 0.9107, "lattice:k=4": 0.7464, "lattice:k=10": 0.0909, "torus": 0.6, "exponential": 0.6},
    24: {"ring": 0.9773, "lattice:k=4": 0.9328, "lattice:k=10": 0.6905, "lattice:k=20": 0.1396, "torus": 0.8, "exponential": 0.6667},
    48: {"ring": 0.9943, "lattice:k=4": 0.9829, "lattice:k=10": 0.9165, "lattice:k=20": 0.7141, "lattice:k=32": 0.3852, "lattice:k=46": 0.0213, "exponential": 0.7143},
    96: {"ring": 0.9986, "lattice:k=4": 0.9957, "lattice:k=10": 0.9787, "lattice:k=20": 0.9233, "lattice:k=32": 0.8168, "lattice:k=46": 0.6499, "exponential": 0.75},
    1008: {"lattice:k=112": 0.9795, "lattice:k=200": 0.9359, "lattice:k=500": 0.6404, "torus": 0.9939, "exponential": 0.8182},
}  # fmt: skip


@pytest.mark.parametrize("n", TABLE)
def test_second_eigenvalues_match_the_table(n):
    for name, expected in TABLE[n].items():
        graph = graphs.parse(name, n)
        if n <= 96:
            assert 1 - graph.spectral_gap() == pytest.approx(expected, abs=6e-5), name
        eigenvalues = np.abs(np.fft.fft(graph.matrix()[0])) if name != "torus" else np.abs(np.linalg.eigvalsh(graph.matrix()))
        assert np.sort(eigenvalues)[-2] == pytest.approx(expected, abs=6e-5), name


@pytest.mark.parametrize("n", [2, 4, 8, 32, 128])
def test_powers_of_two_average_exactly_in_log2_n(n):
    for graph in (graphs.one_peer_exponential(n), graphs.hypercube(n)):
        assert graph.period == int(math.log2(n))
        assert is_mean(product(graph))
        assert graph.spectral_gap() == 1
        # … and from any starting step.
        assert is_mean(np.linalg.multi_dot([graph.matrix(t) for t in range(3, 3 + graph.period)] + [np.eye(n)]))


@pytest.mark.parametrize("name", ["equi-dynamic", "random-matching"])
@pytest.mark.parametrize("n", [6, 7, 12, 20])
def test_a_long_period_is_not_taken_for_exact(name, n):
    graph = graphs.parse(name, n)
    short = graphs.Graph("first rounds", graph.rounds[:8])
    norm = np.linalg.norm(product(short) - 1 / n, 2)
    assert short.spectral_gap() == pytest.approx(1 - norm ** (1 / 8), rel=1e-6)
    assert 0.05 < graph.spectral_gap() < 0.8


def test_one_peer_exponential_is_directed():
    graph = graphs.one_peer_exponential(10)
    assert graph.period == 4
    assert graph.neighbors(3, 1) == {3: 0.5, 1: 0.5}  # receives from i-2
    assert not is_mean(product(graph))


@given(st.integers(2, 200), st.integers(1, 4))
@settings(max_examples=80, deadline=None)
def test_base_graph_is_exact_for_any_n_with_at_most_k_neighbours(n, k):
    k = min(k, n - 1)
    graph = graphs.base(n, k=k)
    assert max(graph.degree(t) for t in range(graph.period)) <= k
    assert is_mean(product(graph))
    digits = math.ceil(math.log(n) / math.log(k + 1) - 1e-9)
    assert graph.period <= 2 * digits + 2  # O(log_{k+1} n)


@pytest.mark.parametrize(("hosts", "per_node"), [(2, 4), (4, 4), (8, 4), (8, 8), (2, 1), (1, 4)])
def test_alternating_exponential_ring_is_exact_in_twice_log2_hosts(hosts, per_node):
    graph = graphs.alternating_exponential_ring(hosts * per_node, per_node=per_node)
    assert graph.period == max(1, 2 * int(math.log2(hosts)))
    assert is_mean(product(graph))
    if hosts > 2:  # in each round some pairs of hosts talk while the others stay at home
        assert {len(g) for g in graph.round(0).groups} == {per_node, 2 * per_node}


@given(st.integers(3, 199).filter(lambda n: n % 2))
@settings(max_examples=20, deadline=None)
def test_odd_one_peer_ring_uses_every_edge_and_rests_one(n):
    graph = graphs.one_peer_ring(n)
    used = set()
    for t in range(graph.period):
        pairs = {(i, j) for i, j in enumerate(graph.round(t).source) if i != j}
        assert len(pairs) == n - 1
        used |= pairs
    assert used == {(i, (i + s) % n) for i in range(n) for s in (1, -1)}


def test_kinds():
    assert isinstance(graphs.complete(5).round(0), Mean)
    assert isinstance(graphs.lattice(9, k=4).round(0), Window)
    assert isinstance(graphs.one_peer_ring(6).round(0), Permutation)
    assert isinstance(graphs.alternating_exponential_ring(8).round(0), Groups)
    assert isinstance(graphs.torus(9).round(0), General)


def test_random_families_repeat_after_rounds_and_depend_on_the_seed():
    for name in ("random-matching", "equi-dynamic"):
        a, b, c = (graphs.parse(f"{name}:seed={s}", 20) for s in (0, 0, 1))
        assert a.period == 64
        assert a.rounds == b.rounds
        assert a.rounds != c.rounds
        assert graphs.parse(f"{name}:rounds=5", 20).period == 5
    assert np.array_equal(graphs.random_regular(20, seed=1).matrix(), graphs.random_regular(20, seed=1).matrix())
    assert graphs.equi_dynamic(10).round(0).weight == pytest.approx(0.5 * 9 / 10)


def test_torus_is_the_most_square_grid():
    assert graphs.torus(12).neighbors(0) == pytest.approx({0: 0.2, 1: 0.2, 3: 0.2, 4: 0.2, 8: 0.2})  # 3 × 4
    assert graphs.torus(6).degree() == 3  # 2 × 3: up and down are the same


def test_star_has_metropolis_weights():
    w = graphs.star(5).matrix()
    assert w[0, 0] == pytest.approx(0.2)
    assert w[1, 0] == pytest.approx(0.2)
    assert w[1, 1] == pytest.approx(0.8)


def test_n_and_parameters_in_other_forms():
    assert graphs.lattice(np.int64(9), 4).name == "lattice:k=4"
    for name in applicable(16):
        np.testing.assert_array_equal(graphs.parse(name, np.int64(16)).matrix(), graphs.parse(name, 16).matrix())


def test_own_graphs():
    w = np.array([[0.5, 0.5, 0], [0.25, 0.5, 0.25], [0, 0.5, 0.5]])
    graph = graphs.from_matrix(w)
    assert not graph.is_doubly_stochastic()
    assert graph.spectral_gap() == pytest.approx(0.5)  # eigenvalues 1, 0.5, 0
    assert graphs.from_matrix([np.eye(3)[[1, 0, 2]] * 0.5 + np.eye(3) * 0.5, w]).period == 2
    petersen = graphs.from_networkx(nx.petersen_graph())
    assert petersen.is_doubly_stochastic()
    assert petersen.degree() == 3
    directed = graphs.from_networkx(nx.DiGraph([("a", "b"), ("b", "c"), ("c", "a")]))
    assert directed.neighbors(1) == {0: 0.5, 1: 0.5}  # b receives from a
    weighted = nx.Graph()
    weighted.add_edge(0, 1, w=0.3)
    assert graphs.from_networkx(weighted, weight="w").neighbors(0) == {0: 0.7, 1: 0.3}


BAD = [
    (lambda: graphs.parse("rnig", 8), "did you mean 'ring'"),
    (lambda: graphs.parse("xyzzy", 8), "known are .*hypercube"),
    (lambda: graphs.parse("ring", 0), "n=0.*at least one replica"),
    (lambda: graphs.parse("ring", True), "n=True"),
    (lambda: graphs.parse("lattice:k=1", 8), "k=1 is out of range for n=8.*2 .ring. to 7"),
    (lambda: graphs.parse("lattice:k=8", 8), "k=8 is out of range"),
    (lambda: graphs.parse("lattice", 8), "needs 'k'"),
    (lambda: graphs.lattice(9, k=2.5), "k=2.5 is not an integer"),
    (lambda: graphs.lattice(9, 4, 5), "got 2 values beside n; it takes k"),
    (lambda: graphs.parse("random-matching:seed=-1", 8), "seed=-1 is not a seed"),
    (lambda: graphs.from_matrix([np.eye(2), np.eye(3)]), "all of the same size"),
    (lambda: graphs.from_networkx(nx.MultiGraph([(0, 1)])), "multigraph"),
    (lambda: graphs.from_matrix([[1, 0, 0], [0, 1, 0], [0.25, 0.25, 0.5]]), "not connected: 3 parts"),
    (lambda: graphs.parse("lattice:k=ten", 8), "k='ten' is not an integer"),
    (lambda: graphs.parse("lattice:j=2", 8), "no parameter 'j'; it takes k"),
    (lambda: graphs.parse("ring:k=2", 8), "no parameter 'k'; it takes none"),
    (lambda: graphs.parse("lattice:k", 8), "not of the form key=value"),
    (lambda: graphs.lattice(8, q=3), "no parameter 'q'"),
    (lambda: graphs.torus(7), "n=7 is prime.*n=6 or 8.*base:k=1"),
    (lambda: graphs.torus(2), "n=2 is prime.*n=4"),
    (lambda: graphs.hypercube(12), "not a power of two; use n=8 or 16"),
    (lambda: graphs.alternating_exponential_ring(10), "n=10 with per_node=4"),
    (lambda: graphs.alternating_exponential_ring(8, per_node=0), "per_node=0"),
    (lambda: graphs.random_regular(7, d=3), "n=7 and d=3"),
    (lambda: graphs.erdos_renyi(30, p=0.01), "not connected.*parts.*100 draws.*p of 0.17"),
    (lambda: graphs.erdos_renyi(30, p=1.5), "p=1.5 is out of range"),
    (lambda: graphs.random_matching(30, rounds=1), "not connected: 15 parts"),
    (lambda: graphs.random_matching(30, rounds=0), "rounds=0"),
    (lambda: graphs.equi_dynamic(30, eta=0.0), "eta=0.0"),
    (lambda: graphs.base(8, k=0), "k=0 is out of range"),
    (lambda: graphs.from_matrix(np.ones((2, 3))), r"square.*\[2, 3\]"),
    (lambda: graphs.from_matrix(np.eye(3) * 0.9), "row 0 of matrix 0 sums to 0.9"),
    (lambda: graphs.from_matrix(np.array([[1.5, -0.5], [0.5, 0.5]])), "row 0 .* negative"),
    (lambda: graphs.from_matrix(np.eye(4)), r"not connected: 4 parts .*\{0\}, \{1\}, \{2\}, …"),
    (lambda: graphs.from_matrix(np.full((4, 4), 0.25), n=5), "for 4 replicas, but n=5"),
    (lambda: graphs.from_networkx(nx.Graph()), "no nodes"),
    (lambda: graphs.from_networkx(nx.path_graph(3), weight="w"), "edge 0 → 1 has no attribute 'w'"),
    (lambda: graphs.ring(4).neighbors(4), "there is no replica 4"),
]  # fmt: skip


@pytest.mark.parametrize(("make", "message"), BAD)
def test_mistakes_are_named_in_one_line(make, message):
    with pytest.raises(GossamerError, match=message) as caught:
        make()
    assert "\n" not in str(caught.value)
