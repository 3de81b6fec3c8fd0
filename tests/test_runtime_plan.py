"""The planner, the cluster files, the fit, and the commands."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from gossamer import GossamerError
from gossamer.apps import tasks
from gossamer.cli import app
from gossamer.runtime import DDP, Gossip, Workload, fit, simulate
from gossamer.runtime import cluster as clusters
from gossamer.runtime import plan as planning
from gossamer.runtime.calibrate import _sigma
from gossamer.runtime.noise import Lognormal
from tests.commands import together


def planned(name: str, params: str, *methods: str) -> planning.Plan:
    cluster = clusters.load(name)
    return planning.plan(cluster, planning.estimated(cluster, planning.parameters(params), 8192), methods or planning.DEFAULT)


# --- Advice ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("params", ["1M", "25M"])
def test_a_small_model_on_nvlink_stays_with_all_reduce(params):
    made = planned("nvlink-8", params)
    assert made.choice == "ddp"
    assert re.match(r"Stay with all-reduce \(DDP\) on 8 workers: it loses \d+% of its time to the network", made.advice)


@pytest.mark.parametrize("params", ["1M", "124M"])
def test_an_office_network_takes_means_in_8_bits(params):
    """One-peer in bfloat16 is a little faster; but this trains as all-reduce does."""
    made = planned("office-1g", params)
    assert made.choice == "ada-auto, atc"
    assert "it trains as all-reduce does" in made.advice
    rival = made.row("one-peer-exponential, bfloat16")
    assert rival.seconds < made.row(made.choice).seconds < 1.1 * rival.seconds
    assert "one-peer-exponential, bfloat16 would take" in made.advice


@pytest.mark.parametrize("params", ["1M", "124M"])
def test_an_office_network_takes_a_one_peer_graph(params):
    made = planned("office-1g", params, "ddp", "ring", "one-peer-exponential", "one-peer-exponential, bfloat16")
    assert made.choice.startswith("one-peer-exponential")
    assert re.search(r"because DDP loses \d+% of its time to the network, and each worker sends .* instead of", made.advice)
    taken, ddp = made.row(made.choice), made.row("ddp")
    assert taken.seconds < ddp.seconds
    assert taken.sent < ddp.sent
    for row in made.rows:
        assert row.low <= row.seconds <= row.high
        assert row.speedup == pytest.approx(ddp.seconds / row.seconds)


def test_rounded_gradients_are_simpler_than_a_graph():
    """Four hosts of eight GPUs: DDP in float16 is faster than gossip that ignores the hosts, slower than what knows them."""
    half = planned("infiniband-100g", "124M", "ddp", "ddp, float16", "one-peer-exponential, bfloat16")
    assert half.choice == "ddp, float16"
    assert "fp16_compress_hook" in half.advice
    assert half.row("ddp, float16").sent == half.row("ddp").sent / 2
    assert planned("infiniband-100g", "124M", "ddp", "ddp, float16", "hierarchical").choice == "hierarchical"


def test_advice_follows_the_network_and_nothing_else():
    """The same office with links a thousand times as fast: no reason to leave all-reduce."""
    slow = clusters.load("office-1g")
    fast = slow.model_copy(
        update={"inter": slow.inter.model_copy(update={"gbit": 940.0, "latency_us": 2.0}), "noise": clusters.NoisePart()}
    )
    work = planning.estimated(slow, 25_000_000, 8192)
    assert planning.plan(slow, work).choice != "ddp"
    assert planning.plan(fast, work).choice == "ddp"


@pytest.mark.parametrize(
    "methods",
    [
        ("periodic:every=128",),
        ("one-peer-exponential", "one-peer-exponential, H=4"),
        ("all-reduce, 8bits", "local:H=8,delay=4", "diloco:H=32,delay=8,wire=4bits", "noloco:H=8"),
    ],
)
def test_local_steps_are_named_with_what_they_cost_and_never_chosen(methods):
    made = planned("office-1g", "124M", *methods)
    assert made.row(made.choice).every == 1
    assert re.search(r"The fastest that trains as DDP does: \S+, [\d.]+ m?s per iteration", made.advice)
    assert re.search(
        r"The fastest if you accept .*loss.* studies/specs/outer.toml.*: \S+.*, [\d.]+ m?s per iteration", made.advice
    )


def test_what_runs_under_the_next_steps_costs_no_time_and_bytes_are_those_of_the_codes():
    """124 M parameters on 8 workers: the exchange takes as long as about 30 steps."""
    now, soon, later, streamed, fewer, pairs = rows = [
        planned("office-1g", "124M", f"{rule}:H=64{options}").rows[1]
        for rule, options in (
            *(("diloco", more) for more in ("", ",delay=12", ",delay=40", ",delay=12,fragments=8", ",wire=4bits")),
            ("noloco", ""),
        )
    ]
    size = 4 * 124e6 / 64
    assert [row.sent for row in rows] == pytest.approx([1.75 * size] * 4 + [1.75 * 33 / 256 * size, size], rel=0.01)
    assert min(later.utilization, streamed.utilization) > 0.95 > soon.utilization > now.utilization
    assert now.utilization < 0.8
    assert {fewer.every, pairs.every} == {row.every for row in rows} == {64}


def test_stragglers_are_a_reason_too():
    made = clusters.build(
        {
            "name": "shared",
            "hosts": 32,
            "inter": {"gbit": 1000},
            "noise": {"kind": "stragglers", "share": 0.05, "factor": 2.0},
        }
    )
    result = planning.plan(made, Workload.of_parameters(1_000_000, 0.1))
    assert result.choice != "ddp"
    assert "wait for their neighbours only" in result.advice


def test_a_graph_that_hardly_mixes_is_not_proposed():
    """On 25 Gb Ethernet a ring in bfloat16 is the fastest; with 32 workers its spectral gap is 0.013."""
    made = planned("ethernet-25g", "124M")
    ring = made.row("ring, bfloat16")
    assert ring.seconds < made.row(made.choice).seconds
    assert ring.gap == pytest.approx(0.0128, abs=1e-3)
    assert made.row(made.choice).gap >= 0.1


def test_the_gap_in_closed_form_is_the_graph_s_own():
    from gossamer import graphs

    cluster = clusters.load("office-1g").sized(12)
    for name in ("ring", "lattice:k=4"):
        assert planning._gap(Gossip(name), cluster) == pytest.approx(graphs.parse(name, 12).spectral_gap())


def test_one_worker_has_nothing_to_plan():
    with pytest.raises(GossamerError, match="has no other to average with"):
        planning.plan(clusters.load("office-1g").sized(1), Workload.of_parameters(1000, 0.1))


@pytest.mark.parametrize(("text", "count"), [("124M", 124_000_000), ("1.5b", 1_500_000_000), ("60_000", 60_000), ("7k", 7000)])
def test_numbers_of_parameters(text, count):
    assert planning.parameters(text) == count


# --- Cluster files -----------------------------------------------------------------------------------------------------------

GOOD = 'name = "x"\nhosts = 2\nper_host = 2\n[inter]\ngbit = 1\n[intra]\ngbit = 10\n'


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (("hosts = 2\n", ""), "hosts is missing"),
        (("hosts = 2", "hosts = 0"), "hosts: .*greater than or equal to 1"),
        (("gbit = 1\n", "gbit = -1\n"), "inter.gbit: .*greater than 0.*-1"),
        (("gbit = 1\n", "gbit = nan\n"), "inter.gbit: .*greater than 0"),
        (("gbit = 1\n", 'gbit = "fast"\n'), "inter.gbit: .*valid number"),
        (("[inter]\ngbit = 1\n", ""), "inter is missing: 2 hosts are connected by something"),
        (("[intra]\ngbit = 10\n", ""), "intra is missing: 2 workers on a host"),
        (("[inter]\ngbit", "[inter]\ngbits"), "did you mean 'gbit'"),
        (("[intra]", "[[host]]\nindex = 2\n[intra]"), "host.index=2, but there are 2 hosts"),
        (("[intra]", "[[host]]\nindex = 1\n[[host]]\nindex = 1\n[intra]"), "index=1 is there twice"),
        (("[intra]", "[noise]\nkind = 'lognormal'\n[intra]"), "'lognormal' needs sigma"),
        (("[intra]", "[noise]\nkind = 'constant'\nsigma = 0.1\n[intra]"), "'constant' takes no sigma; they contradict"),
        (("[intra]", "[noise]\nkind = 'trace'\nfactors = [1.0, -1.0]\n[intra]"), "none negative"),
        (("[intra]", "[[workload]]\nforward_ms = 1\nbackward_ms = 1\nbytes = [0]\n[intra]"), "all above 0"),
        (("[intra]", "[intra"), "is not valid TOML"),
    ],
)
def test_a_wrong_cluster_file_is_one_clear_message(change, says):
    with pytest.raises(GossamerError, match=says) as error:
        clusters.parse(GOOD.replace(*change), "c.toml")
    assert str(error.value).startswith("c.toml")
    assert "\n" not in str(error.value)


@given(st.text(max_size=60))
def test_any_text_is_a_cluster_or_a_message(text):
    try:
        clusters.parse(text)
    except GossamerError as error:
        assert str(error)  # noqa: PT017


@pytest.mark.parametrize("name", clusters.shipped())
def test_shipped_clusters_come_back_as_they_were_written(name, tmp_path):
    cluster = clusters.load(name)
    clusters.save(cluster, tmp_path / "c.toml")
    assert clusters.load(tmp_path / "c.toml") == cluster


def test_sizes_that_do_not_fill_hosts():
    cluster = clusters.parse(GOOD)
    assert (cluster.sized(8).hosts, cluster.sized(1).per_host) == (4, 1)
    with pytest.raises(GossamerError, match="3 workers do not fill hosts of 2 .*use 2 or 4"):
        cluster.sized(3)
    with pytest.raises(GossamerError, match="is one host of 8"):
        clusters.load("nvlink-8").sized(16)


# --- The fit -----------------------------------------------------------------------------------------------------------------


def test_the_published_a100_table():
    """Fitted on 8 and 16 GPUs, it predicts 32. The T4 table is in benchmarks/published_table.py."""
    found = fit.fit(fit.published()[1])
    assert [cell.workers for cell in found.cells if not cell.fitted] == [32] * 4
    assert found.mean_error(False) < 0.15
    measured, predicted = found.ranking(32)
    assert measured == predicted


def test_a_table_of_the_model_s_own_is_found_again():
    truth = fit.Unknowns(0.03, 1.6, 10.0, 50.0, 0.05)
    raw = {"name": "own", "per_host": 1, "parameters": 10_000_000, "gbit": 25, "latency_us": 50}
    shell = fit.Table.model_validate({**raw, "times": {2: {"ddp": 1.0}, 4: {"ddp": 1.0}}})
    times = {
        n: {name: fit.predict(shell, truth, n, planning.parse(name)) for name in ("ddp", "one-peer-exponential")}
        for n in (2, 4, 16)
    }
    found = fit.fit(fit.Table.model_validate({**raw, "times": times}))
    assert found.mean_error(True) < 0.02
    assert found.mean_error(False) < 0.08


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"times": {}}, "times is empty"),
        ({"times": {2: {"ddp": 1.0}, 3: {"ddp": 1.0}}, "per_host": 2}, "3 workers do not fill hosts of 2"),
        ({"times": {2: {"ddp": -1.0}, 4: {"ddp": 1.0}}}, "a time is above 0"),
        ({"times": {2: {"ring, H=x": 1.0}, 4: {"ddp": 1.0}}}, "is not known"),
        ({"fit": [2, 8]}, "fit names 8 workers"),
        ({"fit": [2]}, "two sizes at least"),
        ({"parameters": 0}, "greater than or equal to 1"),
    ],
)
def test_a_wrong_table_is_one_clear_message(change, says):
    raw = {"name": "t", "per_host": 1, "parameters": 1000, "times": {2: {"ddp": 2.0}, 4: {"ddp": 1.0}}}
    with pytest.raises(GossamerError, match=says):
        fit.tables({"cluster": [raw | change]})


# --- Commands ----------------------------------------------------------------------------------------------------------------


def test_plan_prints_a_table_and_draws_a_figure(tmp_path):
    run = CliRunner().invoke(
        app,
        ["plan", "office-1g", "--params", "25M", "--workers", "4,8", "--figure", str(tmp_path / "p.html")],
        env={"COLUMNS": "200"},
    )
    assert run.exit_code == 0, run.output
    assert "Use ada-auto, atc on 4 workers" in run.output
    assert "Use ada-auto, atc on 8 workers" in run.output
    page = (tmp_path / "p.html").read_text(encoding="utf-8")
    assert "one-peer-exponential, bfloat16" in page
    assert "error_y" in page


def test_a_task_is_counted_without_its_data(tmp_path, monkeypatch):
    monkeypatch.setenv("GOSSAMER_DATA", str(tmp_path))
    command = ["plan", "office-1g", "--task", "cifar10/resnet20", "--samples", "8", "--figure", str(tmp_path / "p.html")]
    shown = CliRunner().invoke(app, [*command, "--method", "ddp", "--method", "ring"], env={"COLUMNS": "80"})
    assert shown.exit_code == 0, shown.output
    assert "cifar10/resnet20" in shown.output
    with pytest.raises(GossamerError, match="CIFAR-10 is not in"):
        tasks.make("cifar10/resnet20")


def test_plan_says_what_a_method_keeps_in_memory(tmp_path):
    methods = ["--method", "ring, tracking", "--method", "ring, choco:wire=sign", "--method", "ring"]
    run = CliRunner().invoke(app, ["plan", "office-1g", "--params", "1M", *methods, "--figure", str(tmp_path / "p.html")])
    assert "as large as the parameters: ring, tracking 2; ring, choco:wire=sign, edges 2" in " ".join(run.output.split())


def test_the_table_fits_80_columns(tmp_path):
    run = CliRunner().invoke(
        app, ["plan", "ethernet-25g", "--params", "124M", "--figure", str(tmp_path / "p.html")], env={"COLUMNS": "80"}
    )
    assert run.exit_code == 0, run.output
    (ddp,) = (line for line in run.output.splitlines() if line.startswith("ddp, float16 "))
    assert len(ddp.split()) == 10  # every column is there
    assert "…" not in run.output


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["plan"], "which cluster"),
        (["plan", "office-1"], "did you mean 'office-1g'"),
        (["plan", "office-1g"], "holds no measured workload"),
        (["plan", "office-1g", "--params", "many"], "is not a number of parameters"),
        (["plan", "office-1g", "--params", "1M", "--task", "digits/mlp"], "contradict each other"),
        (["plan", "office-1g", "--params", "1M", "--workers", "a"], "is not a list of numbers"),
        (["plan", "office-1g", "--params", "1M", "--workers", "6", "--method", "hypercube"], "does not fit 6 workers"),
        (["plan", "office-1g", "--params", "1M", "--figure", "/nowhere/p.html"], "can't be written"),
        (["plan", "office-1g", "--task", "digits/mpl"], "did you mean 'digits/mlp'"),
        (["plan", "--fit", "/nowhere.toml"], "can't be read"),
        (["calibrate", "--out", "/tmp/c.toml"], "there is one process only"),
        (["calibrate", "--out", "/nowhere/c.toml"], "there is no folder"),
        (["calibrate", "--module", "nothing"], "is not of the form"),
    ],
)
def test_a_mistake_is_one_line(arguments, says, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = CliRunner().invoke(app, arguments)
    assert isinstance(run.exception, GossamerError)
    assert says in str(run.exception)
    assert "\n" not in str(run.exception)


# --- Calibration -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sigma", [0.02, 0.2])
def test_the_spread_is_that_of_the_slowest(sigma):
    import numpy as np

    rng = np.random.default_rng(0)
    times = np.array([Lognormal(sigma).draw(rng, 8) for _ in range(4000)]).T
    assert _sigma(times) == pytest.approx(sigma, rel=0.1)
    assert _sigma(np.ones((4, 10))) == 0


@pytest.mark.parametrize(("hosts", "per_host"), [(2, 1), (1, 3)])
def test_calibrate_writes_a_cluster_that_can_be_planned(hosts, per_host, pool, tmp_path):
    out = tmp_path / "c.toml"
    command = ["calibrate", "--out", out, "--task", "digits/mlp", "--megabytes", "1"]
    first, *others = together(pool, hosts * per_host, tmp_path, *command, LOCAL_WORLD_SIZE=str(per_host))
    assert first.returncode == 0, first.stderr
    assert ("between hosts" if hosts > 1 else "inside a host") in first.stdout
    assert not any(other.returncode or other.stdout for other in others)
    cluster = clusters.load(out)
    assert (cluster.hosts, cluster.per_host) == (hosts, per_host)
    assert (cluster.inter or cluster.intra).gbit > 0.01
    (work,) = cluster.workload
    assert work.forward_ms > 0
    assert sum(work.bytes) == 4 * (64 * 64 + 64 + 64 * 10 + 10)
    assert (
        simulate(cluster, work.made(), DDP(), 10).seconds > simulate(cluster, work.made(), Gossip(local_steps=10), 10).seconds
    )
