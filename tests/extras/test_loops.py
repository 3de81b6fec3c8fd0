"""Training loops as people have them: three lines from DDP to all-reduce, and all digits that they print are the same."""

from pathlib import Path

import pytest

from tests.extras.launch import outputs

HERE = Path(__file__).parent
CHANGES = {
    "pretraining.py": {
        "from torch.nn.parallel import DistributedDataParallel as DDP": [
            "from gossamer import DecentralizedDataParallel as DDP"
        ],
        "model = DDP(model)": ['model = DDP(model, "all-reduce")', "model.gossip(optimizer, scaler=scaler)"],
    },
    "characters.py": {
        "from torch.nn.parallel import DistributedDataParallel as DDP": [
            "from gossamer import DecentralizedDataParallel as DDP"
        ],
        "self.model = DDP(self.model)": [
            'self.model = DDP(self.model, "all-reduce")',
            "self.model.gossip(self.optimizer, scaler=self.scaler)",
        ],
    },
}


def ported(script, folder):
    lines = []
    for line in (HERE / script).read_text().splitlines():
        indent = line[: len(line) - len(line.lstrip())]
        lines += [indent + new for new in CHANGES[script].get(line.strip(), [line.strip()])]
    path = folder / script
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.mark.parametrize(
    ("script", "runs"),
    [
        (
            "pretraining.py",
            [["--steps", "8", "--compile", "--float16"], ["--steps", "12", "--compile", "--float16", "--resume"]],
        ),
        ("characters.py", [["--epochs", "1", "--amp"], ["--epochs", "2", "--amp"]]),
    ],
)
def test_all_reduce_is_ddp(script, runs, tmp_path):
    assert sum(map(len, CHANGES[script].values())) <= 3
    text = (HERE / script).read_text()
    for line in CHANGES[script]:
        assert text.count(line + "\n") == 1
    seen = {}
    for kind, path in {"ddp": HERE / script, "all-reduce": ported(script, tmp_path)}.items():
        folder = tmp_path / kind
        folder.mkdir()
        where = ["--out", folder] if script == "pretraining.py" else ["--snapshot", folder / "snapshot.pt"]
        seen[kind] = [outputs(2, path, *where, *options) for options in runs]
    assert seen["all-reduce"] == seen["ddp"]
    printed = "".join(seen["ddp"][1])
    assert printed.count("loss") >= 8
    assert "iter 4:" not in printed
