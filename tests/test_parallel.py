"""DecentralizedDataParallel in real processes. The cases themselves are in parallel_driver.py; a launch costs seconds, so one
launch runs all cases for its number of workers."""

import json
import time

import pytest

from gossamer.parallel.module import _per_host
from gossamer.schedules import schedule
from tests import parallel_driver, workers

DRIVER = ["-m", "tests.parallel_driver"]


def test_cases_for_one_worker(tmp_path):
    failed = parallel_driver.run_all(parallel_driver.World(0, 1, tmp_path))
    assert not failed, "\n".join(failed.values())


@pytest.mark.parametrize("n", [2, 3, 4])
def test_cases_for_several_workers(n, tmp_path):
    results = workers.run_ok(n, [*DRIVER, tmp_path], timeout=150)
    failed = [json.loads((tmp_path / f"failed-{rank}.json").read_text()) for rank in range(n)]
    shown = "\n".join(f"rank {rank}: {name}\n{text}" for rank, cases in enumerate(failed) for name, text in cases.items())
    assert not shown, shown
    assert len(results[0].out.splitlines()) == sum(n in worlds for _, worlds in parallel_driver.CASES.values())


def test_a_rank_that_fails_ends_all_with_one_clear_line_and_a_normal_exit_code(tmp_path):
    results = workers.run(3, [*DRIVER, tmp_path, "one_rank_fails"], timeout=60)
    assert [worker.code for worker in results] == [1, 1, 1], [worker.err for worker in results]
    assert "ValueError: this worker has had enough" in results[1].err
    for rank in (0, 2):
        last = results[rank].err.strip().splitlines()[-1]
        assert f"GossamerError: rank {rank} lost rank " in last
        assert "at step 3: " in last
    assert not any("terminate called" in worker.err or "lost rank -1" in worker.err for worker in results)
    assert "lost rank 1 at step 3" in results[0].err + results[2].err


def test_a_fast_worker_may_leave_before_a_slow_one_has_its_last_rows(tmp_path):
    workers.run_ok(3, [*DRIVER, tmp_path, "leave_early"], timeout=60)


def test_a_job_that_was_killed_goes_on_from_the_last_step_that_all_have(tmp_path):
    doomed = workers.start(2, [*DRIVER, tmp_path, "killed"])
    newest = tmp_path / "job" / "step-000000009.rank-0-of-2.ckpt"
    deadline = time.monotonic() + 60
    while (doomed[1].poll() is None or not newest.exists()) and time.monotonic() < deadline:
        time.sleep(0.01)
    doomed[0].kill()
    workers.finish(doomed)
    assert sorted(path.name for path in (tmp_path / "job").glob("*.ckpt")) == [
        "step-000000003.rank-0-of-2.ckpt",
        "step-000000003.rank-1-of-2.ckpt",
        "step-000000006.rank-0-of-2.ckpt",
        "step-000000006.rank-1-of-2.ckpt",
        "step-000000009.rank-0-of-2.ckpt",
    ]
    results = workers.run_ok(2, [*DRIVER, tmp_path, "resumed"], timeout=60)
    assert all("went on from 6" in worker.out for worker in results)


@pytest.mark.parametrize(
    ("world", "local", "expected"),
    [
        (16, 4, "alternating-exponential-ring:per_node=4"),
        (4, 2, "alternating-exponential-ring:per_node=2"),
        (12, 4, "one-peer-exponential"),  # three hosts: no power of two
        (4, 4, "one-peer-exponential"),  # one host
        (4, 1, "one-peer-exponential"),
        (7, 2, "one-peer-exponential"),  # hosts of different size
        (1, 1, "one-peer-exponential"),
        (None, None, "one-peer-exponential"),
    ],
)
def test_the_default_graph_goes_by_what_torchrun_says_of_the_hosts(world, local, expected, monkeypatch):
    for key, value in (("WORLD_SIZE", world), ("LOCAL_WORLD_SIZE", local)):
        if value is None:
            monkeypatch.delenv(key, raising=False)
        else:
            monkeypatch.setenv(key, str(value))
    assert _per_host("auto") == expected
    assert _per_host("ring") == "ring"
    assert schedule(_per_host("auto"), world or 1).describe() == expected
