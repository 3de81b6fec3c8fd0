"""The examples run as they are written."""

import json
import subprocess
import sys
from pathlib import Path

from tests.commands import ROOT, inside


def run(*command):
    done = subprocess.run([sys.executable, *map(str, command)], capture_output=True, text=True, cwd=ROOT, timeout=200)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_own_model(tmp_path):
    path = Path(run("examples/own_model.py", tmp_path).strip().splitlines()[-1])
    assert path == tmp_path / "report.html"
    assert path.exists()
    rows = json.loads(inside("results", tmp_path, "--json").stdout)
    assert len(rows) == 16
    assert all(row["status"] == "done" for row in rows)
    assert max(row["value"] for row in rows) > 0.8
    shown = (ROOT / "docs" / "own-model.md").read_text()
    assert (ROOT / "examples" / "own_model.py").read_text() in shown


def test_own_data():
    errors = [float(line.split()[-1]) for line in run("examples/own_data.py").splitlines()]
    assert len(errors) == 6
    assert errors[-1] < errors[0] / 2
    assert (ROOT / "examples" / "own_data.py").read_text() in (ROOT / "docs" / "own-model.md").read_text()


def test_compare_graphs():
    text = run("examples/compare_graphs.py", "digits", "--replicas", "6", "--epochs", "2")
    for name in ("centralized", "D-complete", "exponential", "torus", "ring", "Ada"):
        assert name in text


def test_own_method():
    text = run("examples/own_method.py")
    assert "atc: accuracy 0." in text
    assert "cautious:gamma=0.3: accuracy 0." in text
    assert (ROOT / "examples" / "own_method.py").read_text() in (ROOT / "docs" / "own-method.md").read_text()
