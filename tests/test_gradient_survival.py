"""Workers that average gradients are killed, paused and come back: all replicas stay the same, to the bit, in every step."""

import os
import signal
import time

import pytest

from tests.test_survival import Campaign, started

N = 4


class Job(Campaign):
    def __init__(self, folder, *launch, method="all-reduce"):
        self.start(folder, N, launch, ["-m", "tests.gradient_driver", str(folder), method])

    def together(self):
        """All take part in the same step."""

        def all_of_them():
            return all(
                any(line.endswith(f" {N}") for line in self.log(rank)[-3:]) and self.pid(rank) is not None for rank in range(N)
            )

        self.wait_for(all_of_them, 60)

    def log(self, rank):
        pid = self.pid(rank)
        path = self.folder / f"rank-{rank}.{pid}.log"
        return path.read_text().splitlines() if pid is not None and path.exists() else []


def equal_in_every_step(folder):
    """How many steps were done by several workers; they were the same on all."""
    seen = {}
    for path in folder.glob("*.log"):
        lines = [parts for line in path.read_text().splitlines() if len(parts := line.split()) == 3]
        steps = [int(parts[0]) for parts in lines]
        for (step, parts), after in zip(zip(steps, lines, strict=True), [*steps[1:], steps[-1] + 1], strict=True):
            if after == step + 1:  # otherwise it was evicted in this step, and took over another's state before its next one
                seen.setdefault(step, {}).setdefault(parts[1], []).append(path.name)
    wrong = {step: hashes for step, hashes in seen.items() if len(hashes) > 1}
    assert not wrong, dict(sorted(wrong.items())[:3])
    return sum(len(names) > 1 for hashes in seen.values() for names in hashes.values())


@pytest.mark.parametrize("method", ["auto", "all-reduce:wire=8bits,feedback=true"])
def test_after_kills_and_returns_all_replicas_are_the_same(method, tmp_path):
    with Job(tmp_path, "--restart", "9", method=method) as job:
        started(job, N)
        job.together()
        for ranks in ([2], [0], [1, 3]):
            gone = job.kill(*ranks)
            job.wait_for(lambda ranks=ranks, gone=gone: all(job.pid(rank) not in (None, *gone) for rank in ranks), 60)
            job.together()
        out, records = job.finish(seconds=90)
        assert job.process.returncode == 0, out
    assert sorted(records) == list(range(N)), out
    assert {tuple(record["members"]) for record in records.values()} == {(0, 1, 2, 3)}
    assert {record["mean"] for record in records.values()} == {1.5}
    assert equal_in_every_step(tmp_path) > 50


def test_a_worker_that_was_evicted_comes_back_with_the_same_parameters(tmp_path):
    with Job(tmp_path, "--evict-after", "3") as job:
        started(job, N)
        job.together()
        (pid,) = job.kill(1, with_=signal.SIGSTOP)
        before = job.step()
        job.wait_for(lambda: job.step() > before + 20, 30)
        time.sleep(0.5)
        os.kill(pid, signal.SIGCONT)
        job.together()
        out, records = job.finish(seconds=90)
        assert job.process.returncode == 0, out
    assert sorted(records) == list(range(N)), out
    assert equal_in_every_step(tmp_path) > 50
