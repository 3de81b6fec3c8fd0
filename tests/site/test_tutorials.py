"""The code of the tutorials and of the API pages runs as it is written, with the commands between it."""

import os
import re
import subprocess
import sys

import pytest

from gossamer.errors import GossamerError
from gossamer.runtime import lab
from tests.commands import ROOT

DOCS = ROOT / "docs"
BLOCK = re.compile(r'^```(\w+)(?: title="([^"]+)")?\n(.*?)^```$', re.M | re.S)

# What must come of the commands of a page.
EXPECTED = {
    "slow-network": [r"% is communication", r"accuracy 0\.9", r"MB sent / received: host 0 "],
    "compare-graphs": [r"16 of 16 runs are finished", r"one-peer-exponential", r"runs/my-model/report\.html", r"qgm"],
    "write-a-method": [r"runs/shrinking/report\.html", r"steps 20"],
    "before-buying": [r"all-reduce", r"The cluster file: measured\.toml", r"a host with rank 1"],
    "dead-workers": [
        r"rank 1 was killed by SIGKILL",
        r"saved by rank \d at step 40\d; members \(0, 1, 2\)",
        r"6 of 6 runs|2 of 2 runs",
    ],
}


def needs_a_lab(command):
    if not command.startswith("gossamer lab"):
        return False
    try:
        lab.check()
    except GossamerError:
        return True
    return False


def run_page(page, folder):
    """Files are written, commands are run, in the order of the page. What the commands have said."""
    path = f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}"
    env = os.environ | {"PATH": path, "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
    said = []
    for kind, title, text in BLOCK.findall(page.read_text()):
        if title:
            (folder / title).write_text(text)
        elif kind == "sh":
            for command in filter(None, text.splitlines()):
                if needs_a_lab(command):
                    continue
                done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, cwd=folder, env=env, timeout=200)
                assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
                said.append(done.stdout)
        else:
            raise AssertionError(f"{page.name}: a block of {kind} that is neither a file nor commands")
    return "\n".join(said)


def test_each_tutorial_is_here():
    assert {page.stem for page in (DOCS / "tutorials").glob("*.md")} == set(EXPECTED)


@pytest.mark.parametrize("name", EXPECTED)
def test_a_tutorial(name, tmp_path):
    said = run_page(DOCS / "tutorials" / f"{name}.md", tmp_path)
    for pattern in EXPECTED[name]:
        if "host" not in pattern or os.geteuid() == 0:
            assert re.search(pattern, said), f"{pattern}\n{said}"
    if name == "write-a-method":
        rows = re.findall(r"ring, (?:atc|shrinking:half=1e12), seed \d: accuracy (0\.\d+)", said)
        assert len(rows) == 4
        assert sorted(rows)[0::2] == sorted(rows)[1::2], "going the whole way is atc"


@pytest.mark.parametrize("page", sorted((DOCS / "api").glob("*.md")), ids=lambda page: page.stem)
def test_an_api_page(page, tmp_path):
    blocks = [text for kind, _, text in BLOCK.findall(page.read_text()) if kind == "python"]
    assert blocks, "an example"
    (tmp_path / "page.py").write_text("\n".join(blocks))
    done = subprocess.run([sys.executable, "page.py"], capture_output=True, text=True, cwd=tmp_path, timeout=100)
    assert done.returncode == 0, done.stderr
