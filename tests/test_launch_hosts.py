"""The recipes for several hosts in docs/survival.md, on the lab: two hosts, and the variables that Slurm and Kubernetes set."""

import json
import os
import re
import sys

import pytest

from gossamer.runtime.lab import Lab
from tests.workers import ROOT

pytestmark = pytest.mark.skipif(os.name != "posix" or os.geteuid() != 0, reason="the lab needs root")

# What they set, in words of the lab, and the name that Kubernetes gives to the first pod.
SLURM = {"$SLURM_NNODES": "2", "$SLURM_NODEID": "$NODE_RANK", "$HEAD": "$MASTER_ADDR"}
KUBERNETES = {"$JOB_COMPLETION_INDEX": "$NODE_RANK", "train-0.train": "$MASTER_ADDR"}


def recipe(variable, words):
    """The command in the page that uses the variable."""
    commands = re.findall(r"'(gossamer launch [^']*)'", (ROOT / "docs" / "survival.md").read_text())
    (found,) = (command for command in commands if variable in command)
    for word, meaning in words.items():
        found = found.replace(word, meaning)
    return found


def test_recipes(tmp_path, monkeypatch):
    command = recipe("$SLURM_NODEID", SLURM)
    assert command == recipe("$JOB_COMPLETION_INDEX", KUBERNETES)
    driver = ["-m tests.survival_driver", str(tmp_path), "one-peer-exponential", "1000000", "0.005", "dies=3,30"]
    command = command.replace("gossamer", f"exec {sys.executable} -m gossamer", 1).replace("train.py", " ".join(driver))
    monkeypatch.chdir(ROOT)
    with Lab(hosts=2) as lab:
        result = lab.run(["sh", "-c", command], env={"PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}, timeout=120, echo=False)
    assert result.exit_code == 0, result.outputs
    records = {record["rank"]: record for record in (json.loads(path.read_text()) for path in tmp_path.glob("*.json"))}
    assert sorted(records) == [0, 1, 2, 3], result.outputs
    for record in records.values():
        assert not record["wrong"], (record["wrong"], result.outputs)
        assert record["members"] == [0, 1, 2, 3]
    assert records[3]["changes"][0][5], "it has joined"
    assert [list(change[3]) for change in records[0]["changes"] if change[3]] == [["3"]]
