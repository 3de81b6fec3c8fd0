"""The code blocks of docs/logging.md and docs/notebook.md, and the example notebook, run as they are written."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from gossamer import dbench
from tests import workers
from tests.workers import ROOT

PICTURES = os.environ.get("GOSSAMER_PICTURES")  # a folder that keeps what is drawn, to look at


def blocks(page):
    return re.findall(r"```python\n(.*?)```", (ROOT / "docs" / page).read_text(), re.DOTALL)


def test_the_page_on_logging(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    script = tmp_path / "script.py"
    script.write_text(f"import os\nos.chdir({str(tmp_path)!r})\n" + "\n".join(blocks("logging.md")))
    workers.run_ok(2, [script])
    read = EventAccumulator(str(tmp_path / "runs" / "tensorboard"))
    read.Reload()
    assert [event.step for event in read.Scalars("gossamer/consensus_distance")] == [0, 10, 20, 30]
    assert len(read.Scalars("gossamer/exposed_wait_ms")) == 40
    done = gossamer(tmp_path, "trace", "runs/trace")
    assert "rank 0" in done.stdout
    events = json.loads((tmp_path / "runs" / "trace" / "trace.json").read_text())["traceEvents"]
    assert {event["pid"] for event in events} == {0, 1}


def test_the_page_on_notebooks(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    raw = {
        "name": "page",
        "replicas": [8, 16],
        "methods": ["centralized", "ring", "ada"],
        "seeds": [0, 1],
        "task": {"name": "digits/mlp", "epochs": 4, "batch": 8},
        "profile": {"every": 5},
    }
    dbench.bench(dbench.spec.build(raw), "runs/quickstart", jobs=1, quiet=True)
    here = {}
    for block in blocks("notebook.md"):
        exec(block, here)
    assert here["look"].norms.shape[1:] == (16, 4)
    assert here["other"].layout.title.text == "Dispersion by step"
    folder = Path("exported")
    done = gossamer(
        tmp_path, "export", "runs/quickstart", "--figures", "pdf,svg,png", "--tables", "latex,markdown", "--out", folder
    )
    names = {path.name for path in folder.iterdir()}
    assert {f"accuracy-n16.{kind}" for kind in ("pdf", "svg", "png")} <= names
    assert {"results.tex", "results.md", "dispersion-n16-gini-coefficient.pdf", "scale.png"} <= names
    assert len(names) == 3 * len(here["run"].figures) + 2
    assert sorted(map(Path, done.stdout.splitlines())) == sorted(folder / name for name in names)
    assert (folder / "scale.pdf").read_bytes()[:5] == b"%PDF-"
    if PICTURES:
        shutil.copytree(folder, PICTURES, dirs_exist_ok=True)
    svg = (folder / "accuracy-n16.svg").read_text()
    assert all(f">{text}</text>" in svg for text in ("ring", "epoch", "accuracy"))


def test_the_example_notebook(tmp_path):
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.read(ROOT / "examples" / "dbench.ipynb", as_version=4)
    assert not any(cell.get("outputs") for cell in notebook.cells)
    NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    outputs = [output.get("data", {}) for cell in notebook.cells for output in cell.get("outputs", [])]
    figures = [data["application/vnd.plotly.v1+json"] for data in outputs if "application/vnd.plotly.v1+json" in data]
    assert [figure["layout"]["title"]["text"] for figure in figures] == [
        "Accuracy by epoch",
        "Dispersion by step",
        "ring, n=16: the first layer's norm on each replica",
    ]
    assert all(any(trace["y"] for trace in figure["data"]) for figure in figures)
    tables = [data["text/html"] for data in outputs if "<table" in data.get("text/html", "")]
    assert "16 of 16 runs are finished" in tables[0]
    assert len(tables) == 3
    if PICTURES:
        for k, figure in enumerate(figures):
            (Path(PICTURES) / f"notebook-{k}.json").write_text(json.dumps(figure))


@pytest.mark.parametrize("choice", [[], ["--every"]])
def test_an_export_draws_what_failures_did(tmp_path, choice):
    raw = {
        "name": "failing",
        "replicas": [4],
        "methods": ["ring", "complete"],
        "seeds": [0],
        "task": {"name": "digits/mlp", "epochs": 4, "batch": 16},
        "failures": {"none": {}, "crash": {"events": [{"workers": [2], "at": 1, "back": 2}]}},
    }
    dbench.bench(dbench.spec.build(raw), tmp_path, jobs=1, quiet=True)
    done = gossamer(tmp_path, "export", tmp_path, "--figures", "png", "--out", PICTURES or "exported", *choice)
    assert ("failures-crash-n4-consensus-distance.png" in done.stdout) is bool(choice)
    assert "failures-crash-n4-accuracy.png" in done.stdout


def gossamer(folder, *arguments):
    done = subprocess.run([sys.executable, "-m", "gossamer", *map(str, arguments)], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done
