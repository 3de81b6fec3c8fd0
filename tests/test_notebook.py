"""A bench's output as rows, arrays and figures, and its table for a paper."""

import sys

import numpy as np
import plotly.graph_objects
import pytest
import torch

from gossamer import dbench
from gossamer.dbench.export import export
from gossamer.dbench.results import results
from gossamer.dbench.store import FILE, Store
from gossamer.dbench.summary import Summary
from gossamer.errors import GossamerError
from gossamer.rows.profile import dispersion
from tests.commands import inside

RAW = {
    "name": "50 % <of> it",
    "replicas": [4, 8],
    "methods": ["centralized", "ring", {"name": "wild", "graph": "ring", "lr": 1e9}],
    "seeds": [0, 1],
    "backend": "tape",
    "task": {"name": "digits/mlp", "epochs": 3, "batch": 16},
    "profile": {"every": 10},
}
FAILING = RAW | {
    "methods": ["ring"],
    "seeds": [0],
    "replicas": [4],
    "failures": {"none": {}, "crash": {"events": [{"workers": [2], "at": 1, "back": 2}]}},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    out = tmp_path_factory.mktemp("notebook")
    dbench.bench(dbench.spec.build(RAW), out, jobs=1, quiet=True)
    return out


@pytest.fixture(scope="module")
def run(folder):
    return dbench.read(folder)


def test_the_table_has_a_flat_row_for_each_run(run, folder):
    store, rows = Store(folder / FILE), run.table()
    assert [row["value"] for row in rows] == [row["value"] for row in results(store)]
    assert len(rows) == 12
    assert not any(isinstance(value, (dict, list)) for row in rows for value in row.values())
    assert rows[2]["dispersion_at_100_percent_gini"] == results(store)[2]["dispersion"]["at_100_percent"]["gini"]


def test_curves_have_a_row_for_each_epoch(run, folder):
    store, rows = Store(folder / FILE), run.curves()
    one = store.find(dbench.spec.Cell("ring", 8, 1))
    mine = [row for row in rows if (row["method"], row["replicas"], row["seed"]) == ("ring", 8, 1)]
    assert [(row["epoch"], row["value"], row["graph"]) for row in mine] == [
        (epoch.epoch, epoch.value, epoch.graph) for epoch in store.epochs(one.id)
    ]
    assert mine[0]["metric"] == "accuracy"


def test_profiles_are_arrays_by_look_replica_and_tensor(run, folder):
    store = Store(folder / FILE)
    (look,) = run.profiles("ring", replicas=8, seed=1)
    rows = store.profiles(store.find(dbench.spec.Cell("ring", 8, 1)))
    assert look.norms.shape == (len(rows), 8, len(look.tensors))
    np.testing.assert_array_equal(look.norms, [row.norms for row in rows])
    assert look.steps.tolist() == [row.step for row in rows]
    expected = dispersion(torch.tensor(rows[3].norms))["gini"]
    np.testing.assert_allclose(look.dispersion["gini"][3], expected)
    assert [(p.method, p.replicas, p.seed) for p in run.profiles(replicas=4)][:2] == [
        ("centralized", 4, 0),
        ("ring", 4, 0),
    ]
    with pytest.raises(GossamerError, match=r"profiles\(replicas=5\): .* has no such run; there are 4, 8"):
        run.profiles(replicas=5)


def test_a_replica_that_is_away_has_no_norms(tmp_path):
    dbench.bench(dbench.spec.build(FAILING), tmp_path, jobs=1, quiet=True)
    looks = {look.failures: look for look in dbench.read(tmp_path).profiles()}
    crash = looks["crash"]
    away = np.isnan(crash.norms).all(axis=2)
    assert away[crash.epochs == 1].tolist() == [[False, False, True, False]] * int((crash.epochs == 1).sum())
    assert (crash.epochs == 1).any()
    assert not away[crash.epochs != 1].any()


def test_figures_are_plotlys_by_the_reports_names_and_the_metrics(run):
    drawn = run.figure("accuracy", replicas=4)
    assert isinstance(drawn, plotly.graph_objects.Figure)
    assert drawn.layout.title.text == "Accuracy by epoch"
    ring = next(trace for trace in drawn.data if trace.name == "ring")
    values = [
        [row["value"] for row in run.curves() if (row["method"], row["replicas"], row["epoch"]) == ("ring", 4, e)]
        for e in range(3)
    ]
    np.testing.assert_allclose(ring.y, np.mean(values, axis=1), rtol=1e-4)
    assert run.figure("dispersion", measure="cv").data != run.figure("dispersion").data
    assert run.figure("dispersion").data == run.figure("dispersion", replicas=8, measure="Gini coefficient").data
    assert "bytes" in run.figures
    with pytest.raises(GossamerError, match="has no figure 'byte'; there are epochs, connections"):
        run.figure("byte")
    with pytest.raises(GossamerError, match="figure 'epochs' has no replicas='5'; to choose there is replicas: 8, 4"):
        run.figure("accuracy", replicas=5)


def test_a_notebook_shows_the_reports_table(run, folder):
    assert "12 of 12 runs are finished; metric: accuracy" in repr(run)
    shown = run._repr_html_()
    assert "50 % &lt;of&gt; it" in shown
    assert run.summary.html() in shown
    assert run.summary.html() in dbench.report.write(folder).read_text()


def test_a_bench_without_a_finished_run_is_read_and_says_so(folder, tmp_path):
    spec = dbench.spec.build(RAW)
    Store.create(tmp_path / FILE, spec, ("accuracy", True), {}).close()
    run = dbench.read(tmp_path)
    assert "0 of 12 runs" in repr(run)
    assert run.curves() == []
    assert len(run.table()) == 12
    assert "0 of 12" in run._repr_html_()
    with pytest.raises(GossamerError, match="no finished run yet"):
        run.summary.latex()


def test_tables_for_a_paper(run, tmp_path):
    written = export(run, tmp_path, tables=("latex", "markdown"))
    latex, markdown = (path.read_text() for path in written)
    assert [path.name for path in written] == ["results.tex", "results.md"]
    assert "2 diverged & 2 diverged & -- & -- " in latex
    assert r"mean $\pm$ 95 \% interval" in latex
    assert markdown.startswith("| method | n=4 | n=8 | worst replica, n=8 | MB per replica, n=8 |\n| --- | ---: |")
    made = Summary("50 % of x_1", ["method", "n=4"], [["a|b_c", "0.9 ± 0.1"], ["d", "–"]], {(0, 1)})
    assert made.markdown().splitlines()[2] == "| a&#124;b_c | **0.9 ± 0.1** |"
    assert r"a|b\_c & \textbf{0.9 $\pm$ 0.1} \\" in made.latex()
    assert r"\caption{50 \% of x\_1}" in made.latex()
    assert "<th>a|b_c</th><td><strong>0.9 ± 0.1</strong></td>" in made.html()


def test_mistakes_in_an_export_are_one_line(folder, monkeypatch):
    for arguments, said in (
        ((), "give --figures pdf, --tables latex, or both"),
        (("--figures", "gif"), "--figures gif: not known; there are pdf, svg, png"),
        (("--tables", "latex,html"), "--tables html: not known; there are latex, markdown"),
    ):
        refused = inside("export", folder, *arguments)
        assert refused.returncode == 2
        assert said in refused.stderr
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    refused = inside("export", folder, "--figures", "pdf")
    assert "figures for a paper need matplotlib; install it with: pip install 'gossamer[export]'" in refused.stderr
    assert not (folder / "export").exists()
