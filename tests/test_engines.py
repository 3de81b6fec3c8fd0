"""Cells on engines: workers that are lost, a person's own task, executors of other people, and what an earlier bench has left."""

import contextlib
import json
import os
import signal
import sys
import threading
import time
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset

from gossamer import Metric, Task
from gossamer.dbench import bench, engines, work
from gossamer.dbench import spec as specs
from gossamer.dbench.results import results
from gossamer.dbench.store import FILE, Store
from gossamer.errors import GossamerError
from tests.commands import inside
from tests.models import task

RAW = {
    "name": "engines",
    "replicas": [4],
    "methods": ["centralized", "ring", "ada"],
    "seeds": [0, 1],
    "backend": "tape",
    "task": {"name": "own", "epochs": 6, "batch": 8},
    "profile": {"every": 5},
}
BUILT = []


def comparable(out):
    return [{key: value for key, value in row.items() if key != "seconds"} for row in results(Store(out / FILE))]


def own_task():
    """Nothing of it can be imported: pickle could not send it."""

    class Pairs(Dataset):
        def __init__(self, samples, seed):
            self.x = torch.randn(samples, 6, generator=torch.Generator().manual_seed(seed))

        def __len__(self):
            return len(self.x)

        def __getitem__(self, k):
            return self.x[k], (self.x[k] ** 2).sum()

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))

        def forward(self, x):
            return self.body(x).squeeze(-1)

    error = Metric("error", lambda model, x, y: (model(x) - y).abs(), higher_is_better=False)
    return Task("own", Net, Pairs(960, 0), Pairs(64, 1), lambda model, x, y: ((model(x) - y) ** 2).mean(), error)


@pytest.fixture(scope="module")
def here(tmp_path_factory):
    out = tmp_path_factory.mktemp("here")
    bench(specs.build(RAW), out, task=own_task(), quiet=True)
    return out


def kill_one(out, killed, ended):
    """The first worker that is seen at work."""
    while not ended.is_set():
        for said in work.said(out).values():
            if 5 < said["step"] < said["steps"]:
                killed.append(said["worker"])
                os.kill(int(said["worker"].rpartition(" ")[2]), signal.SIGKILL)
                return
        time.sleep(0.002)


def test_an_own_task_runs_side_by_side_and_a_killed_worker_costs_its_cell_alone(here, tmp_path, capfd):
    killed, ended = [], threading.Event()
    killer = threading.Thread(target=kill_one, args=(tmp_path, killed, ended))
    killer.start()
    outcome = bench(specs.build(RAW), tmp_path, task=own_task(), jobs=2, checkpoint_seconds=0)
    ended.set()
    killer.join()
    assert killed
    assert outcome.complete
    assert comparable(tmp_path) == comparable(here)
    said = capfd.readouterr().err
    assert said.count("its worker is lost") == 1
    assert len([line for line in said.splitlines() if line.startswith("[")]) == 6  # none twice
    assert [path.name for path in (tmp_path / "cells").iterdir()] == ["bench.json"]
    assert list((tmp_path / "checkpoints").iterdir()) == []


def test_an_executor_of_ones_own(here, tmp_path):
    with ThreadPoolExecutor(1) as thread:
        assert bench(specs.build(RAW), tmp_path, task=own_task(), on=thread, quiet=True).complete
        assert thread.submit(abs, -1).result() == 1  # it is not ours to end
    assert comparable(tmp_path) == comparable(here)


class Losing(Executor):
    """Does the work, and loses the answer: as often as it is told for each cell."""

    def __init__(self, times):
        self.times, self.lost = times, {}

    def submit(self, call, *arguments):
        answer, future = call(*arguments), Future()
        cell = arguments[1]
        self.lost[cell] = self.lost.get(cell, 0) + 1
        if self.lost[cell] <= self.times:
            future.set_exception(ConnectionError("the node is gone"))
        else:
            future.set_result(answer)
        return future


def build():
    BUILT.append(1)
    return task().build()


def test_a_cell_that_was_finished_by_a_lost_worker_is_not_run_again(tmp_path):
    raw = RAW | {"methods": ["ring"], "task": {"name": "toy", "epochs": 1, "batch": 8}}
    toy = task()
    counting = Task(toy.name, build, toy.train, toy.test)
    built = []
    for times in (0, 2):
        BUILT.clear()
        assert bench(specs.build(raw), tmp_path / str(times), task=counting, on=Losing(times), quiet=True).complete
        built.append(len(BUILT))
    assert built[0] == built[1]
    assert comparable(tmp_path / "0") == comparable(tmp_path / "2")
    with pytest.raises(GossamerError, match="its worker ended by itself 3 times .the node is gone.; that can mean too little"):
        bench(specs.build(raw), tmp_path / "3", task=counting, on=Losing(3), quiet=True)
    # Both are finished all the same: the next bench takes what their workers have left, and runs nothing.
    assert bench(specs.build(raw), tmp_path / "3", task=counting, on=Losing(9), quiet=True).complete
    assert comparable(tmp_path / "3") == comparable(tmp_path / "0")


class Refusing(Executor):
    """Fails with the first seed. Meanwhile there is a file of another store."""

    def __init__(self, out, error):
        self.out, self.error, self.asked = out, error, []

    def submit(self, call, *arguments):
        future, cell = Future(), arguments[1]
        self.asked.append(cell.seed)
        (self.out / "cells" / "99.progress").write_text('{"step": 1}')
        if cell.seed == 0:
            future.set_exception(self.error)
        else:
            future.set_result(call(*arguments))
        return future


def test_a_cell_that_is_given_up_lets_the_others_finish(tmp_path):
    raw = RAW | {"methods": ["ring"], "task": {"name": "toy", "epochs": 1, "batch": 8}}
    losing, refusing = (Refusing(tmp_path, error) for error in (ConnectionError("gone"), GossamerError("no such partition")))
    with pytest.raises(GossamerError, match="seed 0: its worker ended by itself 3 times .gone."):
        bench(specs.build(raw), tmp_path, task=task(), on=losing, quiet=True)
    assert losing.asked == [0, 1, 0, 0]
    assert [run.status == "done" for run in Store(tmp_path / FILE).runs()] == [False, True]
    with pytest.raises(GossamerError, match="^no such partition$"):
        bench(specs.build(raw), tmp_path, task=task(), on=refusing, quiet=True)
    assert refusing.asked == [0]


def stuck(folder):
    (folder / "stuck").touch()
    time.sleep(100)


def test_a_second_ctrl_c_ends_a_stuck_worker(tmp_path):
    context = work.Context(specs.build(RAW), tmp_path, None, "cpu", 10.0)
    with contextlib.suppress(KeyboardInterrupt), engines.Where("local", jobs=2).executor(2, 2, context) as executor:
        future = executor.submit(stuck, tmp_path)
        while not (tmp_path / "stuck").exists():
            assert not future.done()
            time.sleep(0.01)
        raise KeyboardInterrupt
    assert isinstance(future.exception(), BrokenProcessPool)


@pytest.mark.parametrize(
    ("text", "minutes"), [("90", 90), ("90:30", 90), ("4:00:00", 240), ("1-12", 2160), ("1-12:30", 2190), ("1-0:30:00", 1470)]
)
def test_times_are_those_of_slurm(text, minutes):
    assert engines._minutes(text) == minutes


def test_workers_of_an_earlier_bench_stop(tmp_path):
    """Their bench was killed, and another one has begun."""
    (tmp_path / "cells").mkdir()
    work.tell(tmp_path, "another", stop=False)
    context = work.Context(specs.build(RAW), tmp_path, task(), "cpu", 10.0, store="s", bench="one")
    cell = specs.Cell("ring", 4, 0)
    assert work.work(context.packed(), cell, 1, "tape") == work.Answer(False)
    work.tell(tmp_path, "one", stop=False)
    assert work.work(context.packed(), cell, 1, "tape").finished
    work.tell(tmp_path, "one", stop=True)
    assert work.work(context.packed(), cell, 2, "tape") == work.Answer(False)


def test_each_worker_has_a_device_of_its_own(tmp_path):
    """Two names of one CPU stand for two GPUs."""
    raw = RAW | {"task": {"name": "toy", "epochs": 2, "batch": 8}}
    assert bench(specs.build(raw), tmp_path, task=task(), devices=["cpu:0", "cpu"], quiet=True).complete
    used = [json.loads(run.machine)["device"] for run in Store(tmp_path / FILE).runs()]
    assert set(used) == {"cpu:0", "cpu"}


def test_what_can_not_be_sent_is_said_before_anything_runs(tmp_path):
    toy = task()
    lock = threading.Lock()
    locked = Task("toy", toy.build, toy.train, toy.test, lambda *batch: lock and None)
    with pytest.raises(GossamerError, match="task 'own' can't be sent to workers: cannot pickle '_thread.lock' object; open"):
        bench(specs.build(RAW), tmp_path, task=locked, jobs=2, quiet=True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--on", "loca"], "there is no engine 'loca'; did you mean 'local'"),
        (["--on", "ray:head:6379,gpu=1"], "--on ray:head:6379,gpu=1: ray has no option 'gpu'; did you mean 'gpus'"),
        (["--on", "slurm:time=1:00:x"], "--on slurm:time=1:00:x: time='1:00:x' is not right"),
        (["--on", "local:4"], "--on local:4: it takes no options; --jobs says how many"),
        (["--on", "ray", "--jobs", "2"], "--jobs and --devices are for cells on this machine"),
        (["--jobs", "0"], "jobs=0 is out of range"),
        (["--jobs", "0", "--dry-run"], "jobs=0 is out of range"),
        (["--on", "loca", "--dry-run"], "there is no engine 'loca'; did you mean 'local'"),
        (["--device", "nonsense", "--dry-run"], "device 'nonsense' can't be used here"),
        (["--devices", "cpu,nonsense"], "device 'nonsense' can't be used here"),
    ],
)
def test_mistakes_are_one_line(options, message, tmp_path):
    done = inside("bench", "quickstart", "--out", tmp_path, *options)
    assert done.returncode == 2
    assert message in done.stderr
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / FILE).exists()


@pytest.mark.parametrize(("engine", "package"), [("ray", "ray"), ("ray:head:6379,gpus=0.5", "ray"), ("slurm", "submitit")])
def test_an_engine_that_is_not_installed_says_what_to_install(engine, package, tmp_path, monkeypatch):
    name = engine.partition(":")[0]
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.delitem(sys.modules, f"gossamer.integrations.{name}", raising=False)
    done = inside("bench", "quickstart", "seeds=[0]", "backend='loop'", "--out", tmp_path, "--on", engine)
    assert done.returncode == 2
    assert done.stderr == (
        f"gossamer: gossamer.integrations.{name} needs {package}, which is not installed: pip install 'gossamer[{name}]'\n"
    )
    assert not (tmp_path / FILE).exists()
