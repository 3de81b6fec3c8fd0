"""DBench on Ray and on Slurm: the same results as on this machine, when nodes die and when jobs are preempted."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from gossamer.dbench import bench, work
from gossamer.dbench import spec as specs
from tests.commands import ROOT
from tests.test_engines import RAW, comparable, own_task

ray = pytest.importorskip("ray")
submitit = pytest.importorskip("submitit")

from ray.cluster_utils import Cluster  # noqa: E402

from gossamer.errors import GossamerError  # noqa: E402
from gossamer.integrations.ray import RayExecutor  # noqa: E402
from gossamer.integrations.slurm import SlurmExecutor  # noqa: E402


@pytest.fixture(scope="module")
def here(tmp_path_factory):
    out = tmp_path_factory.mktemp("here")
    bench(specs.build(RAW), out, task=own_task(), quiet=True)
    return out


def parent(pid):
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def kill_when_busy(out, cluster, node, killed):
    """The whole node, once a cell runs on it."""
    raylet = node.all_processes["raylet"][0].process.pid
    while not killed:
        for said in work.said(out).values():
            try:
                on_node = parent(int(said["worker"].rpartition(" ")[2])) == raylet
            except FileNotFoundError:
                continue
            if on_node and said["step"] > 5:
                killed.append(said)
                cluster.remove_node(node, allow_graceful=False)
                return
        time.sleep(0.002)


def test_ray_loses_a_node_and_no_cell(here, tmp_path, capfd):
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    node = cluster.add_node(num_cpus=1)
    killed = []
    killer = threading.Thread(target=kill_when_busy, args=(tmp_path, cluster, node, killed), daemon=True)
    try:
        killer.start()
        on = f"ray:{cluster.address}"
        outcome = bench(specs.build(RAW), tmp_path, task=own_task(), on=on, checkpoint_seconds=0)
    finally:
        cluster.shutdown()
    assert killed
    assert outcome.complete
    assert comparable(tmp_path) == comparable(here)
    said = capfd.readouterr().err
    assert said.count("its worker is lost") == 1
    assert len([line for line in said.splitlines() if re.match(r"\[\d/6\]", line)]) == 6  # none twice


def test_ray_of_ones_own_stays_on_loopback_and_a_killed_bench_goes_on(tmp_path):
    spec, whole, out = tmp_path / "spec.toml", tmp_path / "whole", tmp_path / "out"
    spec.write_text(SPEC)
    bench(specs.load(spec), whole, jobs=1, quiet=True)
    command = [sys.executable, "-m", "gossamer", "bench", str(spec), "--out", str(out), "--on", "ray"]
    process = subprocess.Popen([*command, "--checkpoint-seconds", "0"], stderr=subprocess.PIPE, text=True, cwd=ROOT)
    assert "[1/" in process.stderr.readline()
    family = descendants(process.pid)
    assert len(family) > 3
    listening = subprocess.run(["ss", "-Hltnp"], capture_output=True, text=True, check=True).stdout.splitlines()
    mine = [line.split()[3] for line in listening if any(f"pid={pid}," in line for pid in family)]
    assert mine
    assert [address for address in mine if "127.0.0.1" not in address] == []
    process.send_signal(signal.SIGKILL)
    process.wait()
    again = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=200)
    assert again.returncode == 0, again.stderr
    assert comparable(out) == comparable(whole)
    process = subprocess.Popen(
        [*command[:-3], str(tmp_path / "stopped"), *command[-2:]], stderr=subprocess.PIPE, text=True, cwd=ROOT
    )
    process.stderr.readline()
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=100)
    assert process.returncode == 130, errors
    assert "Give the same command again to go on" in errors
    assert "Traceback" not in errors


SPEC = """
name = "small"
replicas = [4]
methods = ["centralized", "ring"]
seeds = [0, 1]
backend = "tape"
task = { name = "digits/mlp", epochs = 20, batch = 8 }
optimizer = { lr = 0.3 }
"""


def descendants(pid):
    """It, and all that were started by it."""
    table = [path for path in Path("/proc").iterdir() if path.name.isdigit()]
    parents = {}
    for path in table:
        try:
            parents[int(path.name)] = parent(int(path.name))
        except FileNotFoundError:
            continue
    found = {pid}
    while more := {child for child, up in parents.items() if up in found} - found:
        found |= more
    return found


def test_ray_gives_cpus_and_takes_back_what_is_cancelled(monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")  # a cluster of other work, which is not joined
    executor = RayExecutor(cpus=1)
    try:
        first = [executor.submit(time.sleep, 0.5) for _ in range(os.cpu_count() + 1)]
        last = executor.submit(os.getpid)
        assert last.cancel()
        assert [future.result(timeout=100) for future in first] == [None] * len(first)
        with pytest.raises(ZeroDivisionError):
            executor.submit(divmod, 1, 0).result(timeout=100)
    finally:
        executor.shutdown()
    assert not ray.is_initialized()


def test_slurm_by_submitits_executor_for_this_machine(here, tmp_path):
    raw = RAW | {"methods": ["ring"]}  # each job is a process that loads torch
    assert bench(specs.build(raw), tmp_path, task=own_task(), on="slurm:cluster=local,time=10", quiet=True).complete
    assert comparable(tmp_path) == [row for row in comparable(here) if row["method"] == "ring"]


def test_what_slurm_refuses_is_one_error(tmp_path, monkeypatch):
    for name in ("srun", "sbatch", "scancel"):
        command = tmp_path / name
        command.write_text("#!/bin/sh\necho 'sbatch: error: invalid partition specified: nope' >&2\nexit 1\n")
        command.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(GossamerError, match="^Slurm takes no jobs: .*invalid partition specified: nope"):
        bench(specs.build(RAW), tmp_path / "out", task=own_task(), on="slurm:partition=nope", quiet=True)
    assert (tmp_path / "out" / "slurm").stat().st_mode & 0o777 == 0o700
    with pytest.raises(GossamerError, match=r"^--on slurm:cluster=nope: AutoExecutor doesn't know any executor named nope$"):
        bench(specs.build(RAW), tmp_path / "out", task=own_task(), on="slurm:cluster=nope", quiet=True)


def slow(folder):
    """Ends at its second call."""
    (folder / str(os.getpid())).touch()
    while len(list(folder.iterdir())) < 2:
        time.sleep(0.05)
    return "done"


def test_a_preempted_job_is_queued_again(tmp_path):
    executor = SlurmExecutor(tmp_path / "jobs", cluster="local", timeout_min=5)
    calls = tmp_path / "calls"
    calls.mkdir()
    try:
        future = executor.submit(slow, calls)
        while not (begun := list(calls.iterdir())):
            time.sleep(0.05)
        os.kill(int(begun[0].name), signal.SIGUSR2)  # what Slurm sends
        assert future.result(timeout=100) == "done"
    finally:
        executor.shutdown()
    assert len(list(calls.iterdir())) == 2


def test_torch_trainer_of_ray_train(tmp_path):
    """examples/ray_train.py, on loopback."""
    done = subprocess.run(
        [sys.executable, "examples/ray_train.py", str(tmp_path)], capture_output=True, text=True, cwd=ROOT, timeout=200
    )
    assert done.returncode == 0, done.stderr[-3000:]
    said = json.loads(done.stdout.strip().splitlines()[-1])
    assert said["workers"] == 2
    assert said["loss"] < 0.5
    assert said["apart"] <= 1e-6
