"""DBench with each run's replicas spread over several processes, as under torchrun."""

import json
import time

import pytest

from gossamer.dbench.store import FILE, Store
from tests import workers
from tests.commands import inside, together

SPEC = """
name = "spread"
replicas = [6]
methods = ["centralized", "ring"]
seeds = [0]
backend = "loop"
[task]
name = "digits/mlp"
epochs = 3
batch = 8
[optimizer]
name = "sgd"
lr = 0.1
options = { momentum = 0.9 }
[profile]
every = 10
"""


def results(out):
    rows = json.loads(inside("results", out, "--json").stdout)
    for row in rows:
        for key in [k for k in row if "seconds" in k]:
            del row[key]
    return rows


def near(a, b):
    if isinstance(a, float) and isinstance(b, float):
        return a == pytest.approx(b, rel=1e-4, abs=1e-6)
    return a == b


@pytest.fixture(scope="module")
def spec(tmp_path_factory):
    path = tmp_path_factory.mktemp("spec") / "spread.toml"
    path.write_text(SPEC)
    return path


@pytest.fixture(scope="module")
def alone(spec, tmp_path_factory):
    out = tmp_path_factory.mktemp("alone") / "out"
    assert inside("bench", spec, "--out", out, "--jobs", 1, "--quiet").returncode == 0
    return results(out)


def command(spec, out):
    return ["bench", spec, "--out", out, "--checkpoint-seconds", "0.01"]


def bench(spec, out):
    return ["-m", "gossamer", *command(spec, out)]


def finished(pool, size, folder, spec, out):
    """In so many workers, to the end."""
    for worker in together(pool, size, folder, *command(spec, out)):
        assert worker.returncode == 0, worker.stderr


def test_three_processes_give_the_result_of_one(spec, alone, pool, tmp_path):
    finished(pool, 3, tmp_path, spec, tmp_path / "out")
    spread = results(tmp_path / "out")
    assert [row["method"] for row in spread] == ["centralized", "ring"]
    for one, many in zip(alone, spread, strict=True):
        for key in one:
            assert near(one[key], many[key]), (one["method"], key, one[key], many[key])
    assert (tmp_path / "out" / "report.html").exists()
    assert not list((tmp_path / "out" / "checkpoints").iterdir())


def test_a_search_finds_the_same_in_three_processes(pool, tmp_path):
    path = tmp_path / "search.toml"
    path.write_text(SPEC.replace("epochs = 3", "epochs = 1") + "[search]\nlr = [0.001, 0.2]\nseeds = [100]\n")
    assert inside("bench", path, "--out", tmp_path / "one", "--jobs", 1, "--quiet").returncode == 0
    finished(pool, 3, tmp_path, path, tmp_path / "three")
    one, three = ([(row["lr"], row["value"]) for row in results(tmp_path / out)] for out in ("one", "three"))
    assert [lr for lr, _ in one] == [0.2, 0.2]
    assert all(near(a, b) for x, y in zip(one, three, strict=True) for a, b in zip(x, y, strict=True))


def test_killed_as_a_whole_it_goes_on_and_ends_the_same(spec, alone, pool, tmp_path):
    out = tmp_path / "out"
    processes = workers.start(2, bench(spec, out))
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and not list(out.glob("checkpoints/*/*")):
        time.sleep(0.01)
    assert all(process.poll() is None for process in processes)
    for process in processes:
        process.kill()
    workers.finish(processes)
    assert any(run["status"] != "done" for run in results(out))
    finished(pool, 2, tmp_path, spec, out)
    for one, many in zip(alone, results(out), strict=True):
        assert all(near(one[key], many[key]) for key in one), (one, many)


def test_damaged_checkpoints_of_all_processes_begin_the_run_anew(spec, alone, pool, tmp_path):
    out = tmp_path / "out"
    processes = workers.start(2, bench(spec, out))
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and len(list(out.glob("checkpoints/*/*.ckpt"))) < 2:
        time.sleep(0.01)
    for process in processes:
        process.kill()
    workers.finish(processes)
    for path in out.glob("checkpoints/*/*rank-1-of-2.ckpt"):
        path.write_bytes(path.read_bytes()[:-4])
    finished(pool, 2, tmp_path, spec, out)
    for one, many in zip(alone, results(out), strict=True):
        assert all(near(one[key], many[key]) for key in one), (one, many)
    store = Store(out / FILE)
    notes = [text for run in store.runs() for _, text in store.notes(run.id)]
    assert len(notes) == 1
    assert "can't be read, and no other step is there for all 2" in notes[0]
    assert list(out.glob("checkpoints/*.damaged/*rank-1-of-2.ckpt"))


def test_a_number_of_replicas_that_does_not_divide_is_said_in_one_line(spec, pool, tmp_path):
    for worker in together(pool, 4, tmp_path, *command(spec, tmp_path / "out")):
        assert worker.returncode == 2
        assert "gossamer: 6 replicas do not split evenly over 4 processes" in worker.stderr
        assert "Traceback" not in worker.stderr


def test_an_output_folder_that_cannot_be_made_is_said_on_every_rank(spec, pool, tmp_path):
    for worker in together(pool, 2, tmp_path, *command(spec, "/proc/nowhere")):
        assert worker.returncode == 2
        assert "can't be made" in worker.stderr
