"""Ends of links and processes."""

import threading
import time

import pytest
import torch
import torch.distributed as dist

from gossamer.members.store import open_link
from gossamer.transport import link as links
from tests import workers
from tests.pool import on_workers
from tests.world import TIMEOUT_SECONDS

DRIVER = ["-m", "tests.parallel.ends_driver"]


@on_workers(3)
def test_a_link_can_be_closed_when_some_have_closed_it_before(world):
    link = open_link(torch.device("cpu"), timeout=TIMEOUT_SECONDS)
    works = link.post([], [links.Message(2, 5, torch.empty(3))]) if world.rank == 0 else []
    woken = threading.Event()

    def wait():
        with pytest.raises(RuntimeError):
            link.wait(works[0][1])
        woken.set()

    if works:
        threading.Thread(target=wait, daemon=True).start()
    if world.rank == 1:
        link.close()
    dist.barrier()
    assert not woken.is_set()  # rank 2 is there, and silent
    dist.barrier()
    if world.rank == 0:
        link.close()
        assert woken.wait(10)
    dist.barrier()


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
