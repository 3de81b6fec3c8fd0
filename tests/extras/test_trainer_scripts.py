"""The scripts of docs/trainers.md run as they are written, and the page shows them."""

import subprocess
import sys

import pytest

from tests.extras.launch import outputs
from tests.test_library_examples import numbers
from tests.workers import ROOT


@pytest.mark.parametrize(
    ("script", "word", "least", "most"),
    [("accelerate", "accuracy", 0.85, 1), ("transformers", "loss", 0, 1.5)],
)
def test_under_torchrun(script, word, least, most, tmp_path):
    path = ROOT / "examples" / f"with_{script}.py"
    assert path.read_text() in (ROOT / "docs" / "trainers.md").read_text()
    out = outputs(2, path, tmp_path)[0]
    assert least < numbers(out, word)[-1] < most
    if script == "transformers":
        assert (tmp_path / "model.safetensors").exists()


def test_lightning_starts_its_workers(tmp_path):
    path = ROOT / "examples" / "with_lightning.py"
    assert path.read_text() in (ROOT / "docs" / "trainers.md").read_text()
    done = subprocess.run([sys.executable, path], capture_output=True, text=True, timeout=120, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert numbers(done.stdout, "accuracy")[0] > 0.85
    assert len(list(tmp_path.glob("checkpoints/*.ckpt.replicas/*/averaged.safetensors"))) == 1
