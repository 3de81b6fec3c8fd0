"""The examples of the library run as they are written, on real workers, and the diff in docs/library.md is what it says."""

import difflib
import os
import re
import subprocess
import sys

import pytest
import torch

from tests import workers

EXAMPLES = workers.ROOT / "examples"
LIBRARY = workers.ROOT / "docs" / "library.md"


def numbers(text, pattern):
    return [float(found) for found in re.findall(pattern + r" ([-+.\de]+)", text)]


def difference():
    before, after = ((EXAMPLES / name).read_text().splitlines() for name in ("train_ddp.py", "train_gossamer.py"))
    return [
        line
        for line in difflib.unified_diff(before, after, n=0, lineterm="")
        if line[:3] not in ("---", "+++") and line[0] in "+-"
    ]


def test_the_change_from_ddp_is_five_lines():
    changed = difference()
    assert len(changed) <= 5, changed
    shown = LIBRARY.read_text()
    for line in filter(str.strip, (line[1:] for line in changed)):
        assert line.strip() in shown


@pytest.mark.parametrize(("script", "n"), [("train_ddp.py", 2), ("train_gossamer.py", 3)])
def test_training(script, n, tmp_path):
    saved = tmp_path / "digits.pt"
    check(workers.run_ok(n, [EXAMPLES / script, "--epochs", "3", "--save", saved])[0].out, saved)


def test_training_under_torchrun(tmp_path):
    saved = tmp_path / "digits.pt"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*command, EXAMPLES / "train_gossamer.py", "--epochs", "3", "--save", saved],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    check(done.stdout, saved)


def check(out, saved):
    assert numbers(out, "accuracy")[0] > 0.9
    keys = list(torch.load(saved, weights_only=True))
    assert keys[0] == "features.0.weight"  # as a single-process run would save them
    assert len(keys) == 11


def test_the_code_in_the_page_runs(tmp_path):
    blocks = re.findall(r"```python\n(.*?)```", LIBRARY.read_text(), flags=re.S)
    assert len(blocks) >= 5
    script = tmp_path / "page.py"
    script.write_text(PRELUDE + "\n".join(blocks) + "\nprint('resumed', resumed, 'accuracy', accuracy)\n")
    for worker in workers.run_ok(2, [script, tmp_path]):
        assert "resumed False" in worker.out
    assert (tmp_path / "checkpoints" / "averaged.safetensors").exists()
    assert (tmp_path / "final.pt").exists()


# What the page takes for granted.
PRELUDE = """
import sys
from pathlib import Path
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
out = Path(sys.argv[1])

def Net():
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.BatchNorm1d(16), torch.nn.ReLU(), torch.nn.Linear(16, 2))

def evaluate(model):
    model.eval()
    with torch.no_grad():
        right = (model(x).argmax(dim=1) == y).float().mean()
    model.train()
    return float(right)

inputs = [torch.randn(32, 8) for _ in range(4)]
loader = [(x, (x[:, 0] > 0).long()) for x in inputs]
"""


def test_gan():
    out = [worker.out for worker in workers.run_ok(2, [EXAMPLES / "gan.py", "--steps", "80"])]
    for text in out:
        assert numbers(text, "steps") == [80], "the second optimizer counts, the first does not"
        assert numbers(text, "sent per step")[0] == pytest.approx(1, abs=0.02), "both networks in one exchange"
        assert numbers(text, "differ by")[0] < 0.05
        assert numbers(text, "and then") == [0]
    assert len({tuple(numbers(text, "near a cluster")) for text in out}) == 1


def test_mixed_precision_goes_on_after_an_overflow():
    out = [worker.out for worker in workers.run_ok(2, [EXAMPLES / "mixed_precision.py"])]
    assert [numbers(text, "skipped")[0] for text in out] == [0, 1]
    assert [numbers(text, "scale")[0] for text in out] == [1024, 512]
    for text in out:
        assert numbers(text, "steps") == [60]
        assert "finite True" in text
        assert numbers(text, "->")[0] < numbers(text, "loss")[0] / 2


def test_a_method_of_ones_own():
    results = workers.run_ok(2, [EXAMPLES / "own_method.py"])
    assert numbers(results[0].out, "accuracy")[0] > 0.8
