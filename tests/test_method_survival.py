"""A worker is killed while a method with state of its own runs, and comes back: what must hold of that state holds again at once.

Between the death and the step in which the members change, rows are missing; after that step the invariant of each method is whole.
"""

import json

import numpy as np
import pytest

from gossamer import graphs
from tests.invariant_driver import LR
from tests.test_survival import Campaign, started

N = 4


class Job(Campaign):
    def __init__(self, folder, method, graph):
        self.start(folder, N, ("--restart", "9"), ["-m", "tests.invariant_driver", str(folder), method, graph])


def steps(folder):
    """Of each step that all its members have written down: their records, in the order of ranks."""
    seen = {}
    for path in folder.glob("*.log"):
        rank = int(path.name.split(".")[0].split("-")[1])
        for line in path.read_text().splitlines():
            if line.endswith("}"):
                record = json.loads(line)
                seen.setdefault(record["step"], {})[rank] = record
    whole = {}
    for step, rows in sorted(seen.items()):
        members = next(iter(rows.values()))["members"]
        if sorted(rows) == members and all(record["members"] == members for record in rows.values()):
            whole[step] = [rows[rank] for rank in members]
    return whole


def column(rows, name):
    return np.array([row[name] for row in rows])


def tracking(rows, before, w):
    assert np.allclose(column(rows, "y").mean(0), column(rows, "g").mean(0), atol=1e-9)


def choco(rows, before, w):
    assert np.allclose(column(rows, "mixed"), w @ column(rows, "copy"), atol=1e-4)


def push_sum(rows, before, w):
    assert column(rows, "w").sum() == pytest.approx(len(rows), abs=1e-9)


def qgm(rows, before, w):
    """The mean momentum follows the mean row."""
    moved = (column(before, "x").mean(0) - column(rows, "x").mean(0)) / LR
    width = len(moved)
    m, m_before = (column(some, "m").mean(0)[:width] for some in (rows, before))
    assert np.allclose(m, 0.9 * m_before + 0.1 * moved, atol=1e-8)


def alike(rows, before, w):
    """All outer steps begin at the same point, to the bit: a worker that died in the middle of an exchange costs its own share only."""
    anchor = column(rows, "anchor")
    assert (anchor == anchor[0]).all()


def follows_pairs(rows, before, w):
    assert np.isfinite(column(rows, "anchor")).all()
    assert (
        np.abs(column(rows, "anchor") - column(rows, "anchor").mean(0)).max() < 3
    )  # targets differ by 1 from worker to worker


@pytest.mark.parametrize(
    ("method", "graph", "invariant"),
    [
        ("tracking", "ring", tracking),
        ("choco", "ring", choco),
        ("push-sum:wire=8bits", "directed-random", push_sum),  # its weights are those of plain push-sum
        ("qgm", "ring", qgm),
        ("diloco:H=4,delay=3,wire=8bits,fragments=2", "complete", alike),
        ("noloco:H=4,delay=3", "complete", follows_pairs),
    ],
)
def test_after_a_death_and_a_return_the_invariant_is_whole(method, graph, invariant, tmp_path):
    with Job(tmp_path, method, graph) as job:
        started(job, N)
        job.wait_for(lambda: job.step() > 80, 60)
        (gone,) = job.kill(2)
        job.wait_for(lambda: job.pid(2) not in (None, gone), 60)
        before = job.step()
        job.wait_for(lambda: job.step() > before + 100, 60)
        out, records = job.finish(seconds=90)
        assert job.process.returncode == 0, out
    assert sorted(records) == list(range(N)), out
    found = steps(tmp_path)
    checked = {N: 0, N - 1: 0}
    for step, rows in found.items():
        last = found.get(step - 1)
        if last is None or [row["members"] for row in last] != [row["members"] for row in rows]:
            continue  # a step in which members have changed, or the first
        invariant(rows, last, graphs.parse(graph, len(rows)).matrix())
        checked[len(rows)] += 1
    assert checked[N] > 50, checked
    assert checked[N - 1] > 3, checked  # between the change and the return
