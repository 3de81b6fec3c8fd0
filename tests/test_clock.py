"""A spec that names a cluster: every run also gets a predicted wall clock of it."""

import pytest

from gossamer import GossamerError
from gossamer.apps import tasks
from gossamer.dbench import analysis, clock, report
from gossamer.dbench.findings import findings
from gossamer.dbench.results import results
from gossamer.dbench.runner import bench
from gossamer.dbench.spec import build
from gossamer.dbench.store import FILE, Store
from gossamer.runtime import DDP, Gossip, simulate
from gossamer.runtime import cluster as clusters
from gossamer.runtime.plan import of_task

RAW = {
    "name": "clocked",
    "replicas": [4],
    "methods": ["centralized", "one-peer-exponential"],
    "algorithm": "dsgd-awc",
    "task": {"name": "digits/mlp", "epochs": 2, "batch": 32},
    "target": {"value": 0.2},
    "clock": {"cluster": "office-1g"},
}


def test_runs_get_the_time_that_the_model_predicts(tmp_path):
    spec = build(RAW)
    bench(spec, tmp_path, jobs=1, quiet=True)
    store = Store(tmp_path / FILE)
    by_method = {row["method"]: row for row in results(store)}
    cluster = clusters.load("office-1g").sized(4)
    work = of_task(cluster, tasks.make("digits/mlp"), 32)
    for name, method in (("centralized", DDP()), ("one-peer-exponential", Gossip("one-peer-exponential"))):
        row = by_method[name]
        assert row["predicted_seconds"] == pytest.approx(row["steps"] * simulate(cluster, work, method, 60, epochs=2).seconds)
    assert by_method["one-peer-exponential"]["predicted_seconds"] < by_method["centralized"]["predicted_seconds"]
    runs = analysis.load(store)
    reached = {t.method: t for t in analysis.to_target(runs, 0.2)}
    first = next(r for r in runs if r.run.method == "centralized")
    step = next(e.step for e in first.epochs if e.value >= 0.2)
    assert reached["centralized"].seconds.mean == pytest.approx(step * first.step_seconds)
    assert any("s predicted" in sentence for sentence in findings(runs, spec, "accuracy", True))
    page = report.page(store, runs)
    assert "Accuracy against predicted time" in page
    assert "Predicted, not measured" in page


def test_ada_auto_weighs_seconds_with_fewer_workers_too(tmp_path):
    """One of 8 dies: it stays ada-auto, and the report is made. Hosts of 4 can't be filled by 7: bytes stand in."""
    for cluster in ("office-1g", "ethernet-25g"):
        raw = RAW | {
            "replicas": [8],
            "methods": ["ada-auto"],
            "algorithm": "dsgd-atc",
            "clock": {"cluster": cluster},
            "failures": {"gone": {"events": [{"workers": [3], "at": 1.0}]}},
        }
        out = tmp_path / cluster
        bench(build(raw), out, jobs=1, quiet=True)
        store = Store(out / FILE)
        (run,) = analysis.load(store)
        assert {change.graph for change in run.changes} == {"periodic:every=1,bits=8"}
        assert "Accuracy against predicted time" in report.page(store, [run])


def test_without_a_clock_nothing_is_predicted():
    spec = build({key: value for key, value in RAW.items() if key != "clock"})
    assert clock.predict(spec, tasks.make("digits/mlp")) is None


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"clock": {"cluster": "office"}}, "clock: there is no cluster 'office'.*did you mean 'office-1g'"),
        ({"clock": {"cluster": "nvlink-8"}, "replicas": [16]}, "clock: cluster '8 GPUs with NVLink' is one host of 8"),
        ({"clock": {"cluster": "ethernet-25g"}, "replicas": [6]}, "clock: 6 workers do not fill hosts of 4"),
    ],
)
def test_a_cluster_that_does_not_fit_is_one_clear_message(change, says, tmp_path):
    with pytest.raises(GossamerError, match=says):
        bench(build(RAW | change), tmp_path, jobs=1, quiet=True)
    assert not (tmp_path / FILE).exists()
