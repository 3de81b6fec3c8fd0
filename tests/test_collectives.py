"""Real workers under ``gossamer launch`` that die, pause or are cut off around collectives; models that are closed. What the workers do is
in collective_driver.py; every interleaving of the rules behind it is for test_simulator.py."""

import json
import os
import re
import signal
import subprocess
import time

import pytest

from tests import workers
from tests.commands import in_fork
from tests.workers import ROOT

DRIVER = ["-m", "tests.collective_driver"]


def start(folder, case, n, *options):
    env = os.environ | {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", "OMP_NUM_THREADS": "1"}
    command = ["launch", "-n", n, *options, *DRIVER, folder, case]
    return in_fork(*command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def run(folder, case, n, *options):
    job = start(folder, case, n, *options)
    out = job.communicate(timeout=120)[0]
    return job.returncode, out, records(folder)


def records(folder):
    return {int(path.stem.removeprefix("rank-")): json.loads(path.read_text()) for path in folder.glob("rank-*.json")}


def test_means_checkpoints_and_leaders_come_through_deaths(tmp_path):
    code, out, seen = run(tmp_path, "deaths", 4)
    assert code == 0, out
    assert sorted(seen) == [1, 3], out
    for record in seen.values():
        assert record["members"] == [1, 3]
        for mean, members in record["means"]:
            assert mean == sum(2**rank for rank in members) / len(members), (
                out
            )  # of exactly the members, as they are right after it
    assert seen[1]["means"] == seen[3]["means"]
    assert seen[1]["sum"] == seen[3]["sum"]
    assert [rank for rank, record in seen.items() if record["leads"]] == [1]
    kept = sorted(path.name for path in (tmp_path / "kept").glob("step-000000040*"))
    assert kept == [f"step-000000040.rank-{k}-of-3.ckpt" for k in range(3)]  # a whole set, of the three that lived


def test_an_evicted_worker_has_no_result(tmp_path):
    _, out, seen = run(tmp_path, "evicted", 2, "--evict-after", "3")
    assert seen[1] == {"members": [1], "finite": True}, out
    assert "went on without it" in seen[0]["evicted"], out


@pytest.mark.parametrize("launcher", ["torchrun", "launch"])
def test_closed_and_dropped_models_leave_no_thread_and_no_descriptor(launcher, tmp_path):
    if launcher == "launch":
        code, out, seen = run(tmp_path, "wraps", 2)
        assert code == 0, out
    else:
        workers.run_ok(2, [*DRIVER, tmp_path, "wraps"], timeout=120)
        seen = records(tmp_path)
    for record in seen.values():
        descriptors, threads = zip(*record["seen"], strict=True)
        assert max(descriptors[1:]) <= descriptors[0], descriptors
        assert set(threads) == {0}, threads


def test_a_silent_store_holds_no_worker_beyond_its_timeout(tmp_path):
    job = start(tmp_path, "silent", 2)
    try:
        deadline = time.monotonic() + 60
        while len(list(tmp_path.glob("ready-*"))) < 2:
            assert time.monotonic() < deadline
            assert job.poll() is None, job.communicate()[0]
            time.sleep(0.05)
        os.kill(job.pid, signal.SIGSTOP)  # the launcher, and the store in it
        (tmp_path / "stopped").write_text("")
        while len(list(tmp_path.glob("silent-*.json"))) < 2:
            assert time.monotonic() < deadline + 40
            time.sleep(0.05)
        time.sleep(0.2)
    finally:
        os.kill(job.pid, signal.SIGCONT)
        out = job.communicate(timeout=60)[0]
    for path in tmp_path.glob("silent-*.json"):
        record = json.loads(path.read_text())
        assert re.search("the store has not answered", record["error"]), (record, out)
        assert record["seconds"] < 20


@pytest.mark.parametrize("launcher", ["torchrun", "launch"])
def test_different_collectives_do_not_pair(launcher, tmp_path):
    if launcher == "launch":
        seen = run(tmp_path, "mixed", 2)[2]
    else:
        workers.run(2, [*DRIVER, tmp_path, "mixed"], timeout=60)
        seen = records(tmp_path)
    errors = [record["error"] for record in seen.values() if record["error"]]
    # Under gossamer launch one of them says so and ends; then the other is the only one left, and has its average.
    assert len(errors) == 2 or launcher == "launch", seen
    assert any("average_()" in error for error in errors), seen
