"""The study's page, figures and results belong together, and small cells of its experiments come out again."""

import json
import math
import statistics

import pytest
import scipy.stats

from gossamer import GossamerError
from gossamer.dbench.runner import bench
from gossamer.dbench.spec import build, load
from studies import extract, figures, small, tables
from studies.__main__ import RESULTS, parts, selected


def test_figures_and_tables_are_what_the_results_say(tmp_path):
    pages = [tmp_path / page.name for page in figures.PAGES]
    for page, committed in zip(pages, figures.PAGES, strict=True):
        page.write_text(committed.read_text())
    written = figures.write(RESULTS, tmp_path / "study", pages)
    folder = figures.PAGE.parent / "study"
    assert {path.name for path in written if path not in pages} == {path.name for path in folder.iterdir()}
    assert len(written) == len(figures.FIGURES) + len(pages)
    for path in written:
        committed = (folder.parent if path in pages else folder) / path.name
        assert path.read_text() == committed.read_text(), f"{path.name}: run make study-figures"


def test_every_figure_of_the_page_is_there():
    text = "".join(page.read_text() for page in figures.PAGES)
    for path in (figures.PAGE.parent / "study").iterdir():
        assert f"study/{path.name}" in text
    assert all(f"<!-- table: {name} -->" in text for name in tables.TABLES)


@pytest.mark.parametrize("name", sorted(path.stem for path in RESULTS.glob("*.json")))
def test_results_are_of_the_spec(name):
    """Every cell of the grid is there, and nothing else."""
    cells = [cell for path in parts(name) for cell in load(str(path)).cells()]
    runs = json.loads((RESULTS / f"{name}.json").read_text())["runs"]
    assert len(runs) == len(cells)
    assert {(run["method"], run["replicas"], run["seed"]) for run in runs} == {
        (cell.method, cell.replicas, cell.seed) for cell in cells
    }


@pytest.mark.parametrize("cell", small.CELLS, ids=lambda cell: cell.experiment)
def test_a_small_cell_comes_out_again(cell):
    kept = [row for row in json.loads(small.FILE.read_text()) if row["experiment"] == cell.experiment]
    try:
        again = small.run(cell, 0)
    except GossamerError as error:
        pytest.skip(str(error))
    values = [row["value"] for row in kept]
    assert len(values) >= 3
    # What another seed would give, in 95 of 100 cases.
    reach = scipy.stats.t.ppf(0.975, len(values) - 1) * statistics.stdev(values) * math.sqrt(1 + 1 / len(values))
    assert again.pop("value") == pytest.approx(statistics.fmean(values), abs=reach)
    assert again == {key: value for key, value in kept[0].items() if key != "value"}


def test_one_method_can_be_run_again(tmp_path):
    """Its results are replaced, and come with new seeds; those of the others stay."""
    task = {"name": "digits/mlp", "epochs": 1, "batch": 8}
    spec = build(
        {"name": "tiny", "replicas": [2], "methods": ["ring", "complete"], "seeds": [0], "task": task, "backend": "loop"}
    )
    bench(spec, tmp_path / "both", jobs=1, quiet=True)
    extract.write([tmp_path / "both"], tmp_path / "result.json")
    first = json.loads((tmp_path / "result.json").read_text())["runs"]
    again = selected(spec.model_copy(update={"seeds": (0, 1)}), "ring")
    assert again is not None
    assert selected(spec, "torus") is None
    bench(again, tmp_path / "one", jobs=1, quiet=True)
    first[1]["value"] = -1.0  # so that one sees who was replaced
    first[0]["value"] = -2.0
    (tmp_path / "result.json").write_text(json.dumps({"runs": first}))
    extract.write([tmp_path / "one"], tmp_path / "result.json", keep=True)
    runs = json.loads((tmp_path / "result.json").read_text())["runs"]
    assert [(run["method"], run["seed"]) for run in runs] == [("ring", 0), ("complete", 0), ("ring", 1)]
    assert runs[0]["value"] > 0
    assert runs[1]["value"] == -1.0
