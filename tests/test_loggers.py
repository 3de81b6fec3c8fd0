"""What all loggers share: a queue that never blocks, one line when something fails; and a bench that logs."""

import threading
import time

import pytest

from gossamer.dbench import bench
from gossamer.dbench import spec as specs
from gossamer.dbench.store import FILE, Store
from gossamer.errors import GossamerError
from gossamer.integrations import loggers
from gossamer.integrations.loggers import Logger, Named


class Kept(Logger):
    package = "json"

    def __init__(self, hold=None, fail=None):
        super().__init__()
        self.rows, self.hold, self.fail, self.ended = [], hold, fail, False

    def write(self, items):
        if self.hold is not None:
            assert self.hold.wait(60)
        if self.fail is not None:
            raise self.fail
        self.rows += items

    def shut(self):
        self.ended = True


def test_a_logger_that_stands_still_holds_nothing_up_and_says_what_it_left_out(monkeypatch):
    monkeypatch.setattr(loggers, "_ROOM", 20)
    hold = threading.Event()
    log = Kept(hold)

    def train():
        for step in range(1000):
            log({"a": step}, step)

    with pytest.warns(UserWarning, match="Kept is slower than training: numbers from step .* on are left out") as told:
        train()
    assert len(told) == 1
    assert 1000 - log.left_out <= 20 + loggers._AT_ONCE
    hold.set()
    with pytest.warns(UserWarning, match=f"the numbers of {log.left_out} steps were left out"):
        log.close()
    assert [step for _, step in log.rows] == list(range(1000 - log.left_out))
    assert log.ended
    log.close()  # once more is nothing


def test_what_is_queued_is_written_before_the_end_and_is_a_copy():
    log, numbers = Kept(), {"a": 1}
    log(numbers, 3)
    numbers["a"] = 2
    log.close()
    assert log.rows == [({"a": 1}, 3)]


def test_a_logger_that_fails_says_so_once_and_training_goes_on():
    log = Kept(fail=OSError("the disk is full\nand more"))

    def train():
        log({"a": 1}, 7)
        deadline = time.monotonic() + 30
        while not log._failed and time.monotonic() < deadline:
            time.sleep(0.01)
        log({"a": 1}, 8)
        log.close()

    with pytest.warns(UserWarning, match="Kept failed at step 7: the disk is full; nothing more is logged there") as told:
        train()
    assert len(told) == 1


def test_a_package_that_is_missing_is_named_with_what_installs_it():
    class Missing(Kept):
        package, install = "no_such_package", "no-such-package"

    with pytest.raises(
        GossamerError, match="Missing needs the package no_such_package; install it with: pip install no-such-package"
    ):
        Missing()
    with pytest.raises(GossamerError, match="there is no logger 'tensorbord'; there are tensorboard or tensorboard=FOLDER"):
        Named("tensorbord", "bench", None)


def test_a_bench_tells_a_logger_of_each_run_what_the_store_holds(tmp_path):
    raw = {
        "name": "logged",
        "replicas": [4],
        "methods": ["ring", "ada"],
        "seeds": [0],
        "backend": "tape",
        "task": {"name": "digits/mlp", "epochs": 3, "batch": 16},
        "profile": {"every": 10},
    }
    made = {}

    def log(name):
        made[name] = Kept()
        return made[name]

    bench(specs.build(raw), tmp_path, jobs=1, quiet=True, log=log)
    assert set(made) == {"ring-n4-seed0", "ada-n4-seed0"}
    store = Store(tmp_path / FILE)
    for run in store.runs():
        log = made[f"{run.method}-n4-seed0"]
        assert log.ended
        looks = {step: numbers for numbers, step in log.rows if "gossamer/gini" in numbers}
        assert {step: numbers["gossamer/consensus_distance"] for step, numbers in looks.items()} == {
            look.step: look.consensus_distance for look in store.profiles(run)
        }
        assert {step: numbers["gossamer/accuracy"] for numbers, step in log.rows if "gossamer/accuracy" in numbers} == {
            record.step: record.value for record in store.epochs(run.id)
        }
        assert [step for _, step in log.rows] == sorted(step for _, step in log.rows)
        graphs = [numbers["gossamer/graph"] for numbers in looks.values() if "gossamer/graph" in numbers]
        assert len(graphs) == (1 if run.method == "ring" else len({change.graph for change in store.changes(run.id)})), graphs
    store.close()
