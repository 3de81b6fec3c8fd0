"""The runtime model against theory: what must come out whatever the parameters, and cases that can be done by hand."""

import math
from pathlib import Path

import numpy as np
import pytest
import scipy.integrate
import scipy.stats
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gossamer import GossamerError, graphs
from gossamer import methods as rules
from gossamer.graphs.rounds import Hosts, Mean
from gossamer.rows import codec
from gossamer.rows.vector import Vector
from gossamer.rows.wires import DIFFERENCES
from gossamer.runtime import DDP, Cluster, DecentDP, Gossip, StochasticGradientPush, Workload, bound, network, simulate
from gossamer.runtime.cluster import build
from gossamer.runtime.methods import parse
from gossamer.transport.mixer import Mixer
from tests.models import OWN_METHODS

METHODS = (
    DDP(),
    DDP(overlap=False),
    DDP(wire="float16"),
    Gossip("ada-auto", order="atc"),
    Gossip("one-peer-exponential"),
    Gossip("one-peer-exponential", wire="bfloat16"),
    Gossip("one-peer-exponential", send_copy=True),
    Gossip("one-peer-exponential", order="atc"),
    Gossip("one-peer-exponential", local_steps=3),
    Gossip("one-peer-ring"),
    Gossip("ring"),
    Gossip("ring", wire="bfloat16"),
    Gossip("ring", verb="edges"),
    Gossip("torus", verb="edges"),
    Gossip("exponential", order="atc"),
    Gossip("complete"),
    Gossip("complete", order="atc"),
    Gossip("all-reduce"),
    Gossip("ada"),
    Gossip("base:k=1"),
    Gossip("hierarchical"),
    Gossip("alternating-exponential-ring"),
    DecentDP("hypercube"),
    DecentDP("alternating-exponential-ring"),
    StochasticGradientPush(),
)


def cluster(hosts: int, per_host: int = 1, gbit: float = math.inf, inside: float = math.inf, **more: object) -> Cluster:
    links = {"inter": {"gbit": gbit, "latency_us": more.pop("latency_us", 0.0)}, "intra": {"gbit": inside}}
    return build({"name": "test", "hosts": hosts, "per_host": per_host, **links, **more})


WORK = Workload.of_tensors([4_000_000, 2_000_000, 2_000_000], forward=0.02, backward=0.04, update=0.01)


@pytest.mark.parametrize("method", METHODS, ids=lambda m: m.label)
@pytest.mark.parametrize(("hosts", "per_host"), [(8, 1), (4, 4), (1, 4)])
def test_free_communication_takes_exactly_the_compute_time(method, hosts, per_host):
    outcome = simulate(cluster(hosts, per_host), WORK, method, 30)
    assert outcome.seconds == pytest.approx(0.07, rel=1e-12)
    assert outcome.durations == pytest.approx(0.07, rel=1e-12)
    assert (outcome.waiting, outcome.network) == pytest.approx((0, 0), abs=1e-12)


def test_one_worker_takes_exactly_the_compute_time():
    alone = cluster(1, 1)
    for method in (DDP(), Gossip("ring"), Gossip("all-reduce"), Gossip("ring", order="atc"), Gossip("ring", wire="bfloat16")):
        assert simulate(alone, WORK, method, 5).seconds == pytest.approx(0.07, rel=1e-12)


@pytest.mark.parametrize("n", [2, 8, 64])
def test_all_reduce_with_gaussian_noise_takes_the_expected_maximum_of_n(n):
    """∫ x dΦⁿ: the mean of the largest of n standard normal numbers."""
    largest = scipy.integrate.quad(lambda x: x * n * scipy.stats.norm.pdf(x) * scipy.stats.norm.cdf(x) ** (n - 1), -9, 9)[0]
    sigma, iterations = 0.08, 20_000
    noisy = cluster(n, noise={"kind": "normal", "sigma": sigma})
    work = Workload.of_tensors([8], forward=0.02, backward=0.04)
    got = simulate(noisy, work, DDP(), iterations).seconds
    assert got == pytest.approx(0.06 * (1 + sigma * largest), abs=0.06 * sigma * 4 / math.sqrt(iterations))
    # And nobody waits for everybody in a sparse graph, so it takes less, but no less than the mean.
    if n > 2:
        sparse = simulate(noisy, work, Gossip("one-peer-exponential"), 2000).seconds
        assert 0.06 < sparse < got


# --- Two workers, by hand. A row of 8 MB takes 64 ms at 1 Gbit; forward 20, backward 40, update 10 ms. ---------------------

PAIR = {"hosts": 2, "gbit": 1.0}


@pytest.mark.parametrize(
    ("method", "ms"),
    [
        (Gossip("one-peer-exponential"), 64 + 10),  # under forward and backward, which take 60
        (Gossip("one-peer-exponential", order="atc"), 70 + 64),
        (Gossip("one-peer-exponential", wire="bfloat16"), 60 + 10),  # 32 ms: hidden
        (Gossip("one-peer-exponential", local_steps=4), (3 * 70 + 74) / 4),
        (parse("one-peer-exponential, qgm"), 70 + 64),  # after the update, as atc
        (parse("one-peer-exponential, tracking"), 70 + 2 * 64),  # two rows
        (parse("directed-ring, push-sum:wire=8bits"), 70 + 64 * 129 / 512),
        (parse("ring, choco:wire=sign"), 70 + 64 * 10 / 256),
        (Gossip("complete", verb="slices"), 2 * 32 + 10),  # half a row each way, twice
        (Gossip("all-reduce"), 60 + 64 + 10),
        (DDP(overlap=False), 60 + 64 + 10),
        # Buckets: 4 MB after half of backward, as 1 MB is the first one's size, and the other 4 MB. 20 + 20 + 32, + 32, + 10
        (DDP(), 40 + 32 + 32 + 10),
        (DDP(bucket_mb=25), 60 + 64 + 10),
        # One bucket. It sets out after the first step's 75 (70) and is waited for before the next one's update, 64 later, 60 of
        # them hidden; nothing comes after the last one.
        (StochasticGradientPush(overhead=0.005), (75 + 39 * 79 + 64) / 40),
        (DecentDP("hypercube"), (70 + 39 * 74 + 64) / 40),
        # Two: 4 MB after half of backward (at 45, with half of the update) and 4 MB at 70, which wait for the first until 77 and end
        # at 109; all hidden, but for the last step's.
        (DecentDP("hypercube", bucket_mb=3), (39 * 70 + 109) / 40),
    ],
    ids=lambda v: getattr(v, "label", ""),
)
def test_two_workers_by_hand(method, ms):
    assert simulate(cluster(**PAIR), WORK, method, 40).seconds * 1e3 == pytest.approx(ms, rel=1e-12)


@pytest.mark.parametrize("wire", DIFFERENCES)
def test_the_plan_counts_the_bytes_that_the_mixer_counts(wire):
    """Also where graphs are so dense that rows without a wire would travel by slices."""
    for method, dense in ((f"choco:wire={wire}", "complete"), (f"push-sum:wire={wire},gamma=0.5", "directed-exponential")):
        for graph in ("ring", dense):
            round_, row = graphs.parse(graph, 8).rounds[0], Vector([torch.zeros(1, 64_000)])
            sent = simulate(cluster(8), Workload.of_tensors([256_000], 0.02, 0.04, 0.01), parse(f"{graph}, {method}"), 1).sent
            assert sent == pytest.approx(Mixer(8).cost(round_, row, wire=DIFFERENCES[wire]), rel=0.01), (graph, method)


def test_the_page_of_methods_says_what_each_sends_and_keeps():
    """docs/methods.md has a row for each; those around others keep nothing, and outer methods what their options say."""
    page = (Path(__file__).parent.parent / "docs" / "methods.md").read_text(encoding="utf-8").splitlines()
    lines = [[cell.strip(" `") for cell in line.split("|")[1:-1]] for line in page if line.startswith("| ")]
    table = {cells[0].removeprefix("… `+ "): cells for cells in lines if len(cells) == 6}
    for name in OWN_METHODS:
        _, _, _, _, rows, own = table[name]
        rule = rules.method(name)
        if not hasattr(rule, "around") and not rule.graphless:
            planned = parse(f"{'directed-ring' if rule.sums == 'columns' else 'ring'}, {name}")
            assert int(own.split()[0]) == planned.vectors, name
            assert rows.startswith("2") == (isinstance(planned, Gossip) and planned.rows == 2), name
    assert parse("ring, gut:beta=0.9").vectors == 4
    assert parse("directed-ring, push-sum:wire=8bits").vectors == 3


def test_two_workers_one_slower():
    """The other takes 1.5 times as long: 90 + 15 ms. By one-peer its 64 ms are hidden, and the first waits for it; the first sends
    when both are there, so from then on both take the slow one's time."""
    slow = cluster(**PAIR, host=[{"index": 1, "compute": 1.5}])
    assert simulate(slow, WORK, Gossip("one-peer-exponential"), 50).seconds == pytest.approx(0.105, rel=1e-12)
    assert simulate(slow, WORK, DDP(overlap=False), 50).seconds == pytest.approx(0.090 + 0.064 + 0.015, rel=1e-12)
    outcome = simulate(slow, WORK, DDP(overlap=False), 50)
    # Of the first one's 169 ms: 60 + 10 its own, 30 + 5 waiting, 64 the network. Of the other's: 105 its own and 64.
    assert outcome.waiting == pytest.approx(35 / 338, rel=0.03)  # the very first step has no 5 ms
    assert outcome.network == pytest.approx(128 / 338, rel=0.03)


def test_two_workers_at_different_speeds_of_their_links():
    links = cluster(**PAIR, host=[{"index": 1, "gbit": 0.5}])
    assert simulate(links, WORK, Gossip("one-peer-exponential"), 50).seconds == pytest.approx(0.128 + 0.010, rel=1e-12)


def test_latency_and_processor_costs_by_hand():
    costs = {
        "traffic": 1.0,
        "drag": 0.2,
        "combine": 0.5,
        "narrow": 0.25,
        "widen": 2.0,
        "reduce": 3.0,
        "copy": 4.0,
        "apply": 5.0,
        "encode": 1.5,
        "decode": 0.75,
    }  # ns/B, but for drag
    made = cluster(2, 1, 1.0, costs=costs, latency_us=1000.0)

    def ms(method):
        return simulate(made, WORK, method, 40).seconds * 1e3

    assert ms(Gossip("one-peer-exponential")) == pytest.approx(max(60 + 8, 1.2 * (64 + 1)) + 4 + 10)
    assert ms(Gossip("one-peer-exponential", wire="bfloat16")) == pytest.approx(2 + max(60 + 4, 1.2 * (32 + 1)) + 16 + 10)
    assert ms(Gossip("one-peer-exponential", order="atc")) == pytest.approx(70 + 65 + 4)
    assert ms(Gossip("complete", verb="slices")) == pytest.approx(1.2 * (2 * 33 + 40) + 4 + 10)
    # 12 ms to encode a row, 6 to decode one; between the stages one is decoded and half of one encoded.
    coded = 12 + (2 * (1 + 32 * codec.SHARE) + 6 + 6) + 6 + 4
    assert ms(Gossip("periodic:every=1,bits=8", order="atc")) == pytest.approx(70 + coded)
    assert ms(parse("ada-auto")) == pytest.approx(70 + coded)
    assert ms(DDP(overlap=False)) == pytest.approx(60 + 2 * (1 + 32 + 12) + 32 + 10)
    assert ms(DDP(overlap=False, wire="float16")) == pytest.approx(60 + 2 * (1 + 16 + 6) + 32 + 2 * 2 + 10)
    faster = cluster(2, 1, 1.0, costs=costs | {"ring": 0.75}, latency_us=1000.0)
    assert simulate(faster, WORK, DDP(overlap=False), 40).seconds * 1e3 == pytest.approx(60 + 2 * (1 + 24 + 12) + 32 + 10)


def test_a_mean_in_8_bits_takes_a_quarter_of_the_time():
    made = cluster(4, 1, gbit=1.0)
    whole, few = (float(np.max(network.by_library(made, Mean(4, bits), 8_000_000, 1.0).seconds)) for bits in (32, 8))
    assert few == pytest.approx(whole * codec.SHARE)


def test_workers_of_a_host_share_its_interface():
    """Two hosts of four. Offsets 1, 2, 4: one, two and four rows leave a host at a time, each with its part of 1 Gbit."""
    made = cluster(2, 4, 1.0, 8.0)
    rounds = graphs.one_peer_exponential(8).rounds
    seconds = [network.by_library(made, r, 8_000_000, 1.0).seconds for r in rounds]
    assert [float(np.max(s)) for s in seconds] == pytest.approx([0.064, 0.128, 0.256])
    assert float(np.min(seconds[0])) == pytest.approx(0.008)  # two neighbours on one host
    # By slices: 4 workers send 4/8 of a row to the other host: 2 rows, in each of two stages.
    assert network.slices(made, Mean(8), 8_000_000).seconds == pytest.approx(2 * 2 * 0.064)
    # Around a ring each host's interface is crossed once: 2·7/8 rows.
    assert network.everyone(made, 8_000_000).seconds == pytest.approx(2 * 7 / 8 * 0.064)
    # Hierarchical: 3/4 of a row inside, one row between the hosts, 3/4 of a row inside.
    hierarchical = graphs.parse("hierarchical:per_node=4", 8).rounds[0]
    assert isinstance(hierarchical, Hosts)
    assert network.by_library(made, hierarchical, 8_000_000, 1.0).seconds == pytest.approx(0.006 + 0.064 + 0.006)
    shared = made.model_copy(update={"intra": made.intra.model_copy(update={"shared": True})})
    assert float(np.min(network.by_library(shared, rounds[0], 8_000_000, 1.0).seconds)) == pytest.approx(3 * 0.008)


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(["ring", "torus", "exponential", "one-peer-exponential", "base:k=1", "star", "lattice:k=4"]),
    st.integers(0, 99),
)
def test_a_transfer_agrees_with_its_definition(name, seed):
    """Edge by edge, in plain Python: a row is there so many seconds after both ends are ready."""
    made, size = cluster(3, 4, 1.0, 8.0, latency_us=100.0), 1_000_000
    go = np.random.default_rng(seed).random(12)
    for round_ in graphs.parse(name, 12).rounds:
        pairs = [(i, j) for i in range(12) for j in round_.neighbors(i) if j != i]
        arrived, left = go.copy(), go.copy()
        for i, j in pairs:
            if i // 4 != j // 4:
                flows = max(
                    sum(a // 4 != b // 4 and b // 4 == j // 4 for a, b in pairs),
                    sum(a // 4 != b // 4 and a // 4 == i // 4 for a, b in pairs),
                )
                end = max(go[i], go[j]) + 1e-4 + size * flows / 125e6
            else:
                flows = max(
                    sum(b == j and a // 4 == b // 4 for a, b in pairs), sum(a == i and a // 4 == b // 4 for a, b in pairs)
                )
                end = max(go[i], go[j]) + size * flows / 1e9
            arrived[i], left[j] = max(arrived[i], end), max(left[j], end)
        got = network.by_library(made, round_, size, 1.0, "edges").run(go)
        assert got[0] == pytest.approx(arrived, rel=1e-12)
        assert got[1] == pytest.approx(left, rel=1e-12)


# --- Whatever the cluster ---------------------------------------------------------------------------------------------------


@st.composite
def clusters(draw) -> Cluster:
    hosts, per_host = draw(st.sampled_from([(2, 1), (4, 1), (8, 1), (2, 4), (4, 2), (1, 4), (8, 4)]))
    number = st.floats(0.05, 50)
    noise = draw(
        st.sampled_from(
            [
                {"kind": "constant"},
                {"kind": "lognormal", "sigma": 0.3},
                {"kind": "stragglers", "share": 0.2, "factor": 3.0},
                {"kind": "trace", "factors": [0.9, 1.0, 1.7]},
            ]
        )
    )
    different = [{"index": draw(st.integers(0, hosts - 1)), "compute": draw(st.floats(0.5, 3)), "gbit": draw(number)}]
    return build(
        {
            "name": "any",
            "hosts": hosts,
            "per_host": per_host,
            "inter": {"gbit": draw(number), "latency_us": draw(st.floats(0, 1e4))},
            "intra": {"gbit": draw(number), "shared": draw(st.booleans())},
            "noise": noise,
            "host": different if draw(st.booleans()) else [],
            "costs": {"traffic": draw(st.floats(0, 5)), "combine": draw(st.floats(0, 5)), "reduce": draw(st.floats(0, 5))},
        }
    )


fitting = st.sampled_from([m for m in METHODS if m.label != "torus, edges"])


@settings(max_examples=150, deadline=None)
@given(clusters(), fitting, st.floats(1, 10))
def test_more_bandwidth_is_never_slower(made, method, factor):
    before = simulate(made, WORK, method, 25)
    after = simulate(made.scaled(bandwidth=factor), WORK, method, 25)
    assert after.seconds <= before.seconds * (1 + 1e-12)


@settings(max_examples=150, deadline=None)
@given(clusters(), fitting, st.integers(1, 40))
def test_never_below_the_bound(made, method, iterations):
    outcome = simulate(made, WORK, method, iterations)
    assert outcome.seconds >= bound(made, WORK, method, outcome.compute, iterations) * (1 - 1e-12)
    assert -1e-9 <= outcome.waiting <= 1
    assert -1e-9 <= outcome.network <= 1


def test_bounds_are_met_where_nothing_is_uneven():
    made = cluster(8, 1, 1.0)
    for method in (Gossip("one-peer-exponential"), Gossip("ring"), Gossip("complete", order="atc"), Gossip("all-reduce")):
        assert bound(made, WORK, method) == pytest.approx(simulate(made, WORK, method, 30).seconds)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("hypercube", "does not fit 6 workers: hypercube: n=6 is not a power of two"),
        ("alternating-exponential-ring", "does not fit 6 workers"),
        ("rong", "did you mean 'ring'"),
        ("ring, H=x", "'H=x' is not known"),
        ("ddp, bfloat16", "only float16 may stand"),
        ("auto", "whichever it finds faster; name these two"),
        ("ring, qgm + pga:every=4", "how often 'pga' averages is not in the runtime model; leave it out"),
    ],
)
def test_a_method_that_does_not_fit_says_so(text, says):
    with pytest.raises(GossamerError, match=says):
        simulate(cluster(6), WORK, parse(text), 1)


def test_labels_are_read_back():
    for method in METHODS:
        again = parse(method.label)
        assert again == method or again.label == method.label


def test_a_hundred_thousand_workers_need_no_square_matrix():
    """The timing is in benchmarks/runtime_scale.py."""
    many = cluster(12_500, 8, 10.0, 100.0, noise={"kind": "lognormal", "sigma": 0.1})
    outcome = simulate(many, WORK, Gossip("one-peer-exponential"), 20)
    assert outcome.n == 100_000
    assert outcome.seconds >= bound(many, WORK, Gossip("one-peer-exponential"), outcome.compute, 20) > 0
