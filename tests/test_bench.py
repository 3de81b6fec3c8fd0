"""The bench: results, resume after real SIGKILLs, one writer at a time, and what goes wrong."""

import io
import json
import os
import random
import re
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from contextlib import closing, suppress
from pathlib import Path

import pytest
import torch
from rich.console import Console

from gossamer import cli
from gossamer.apps import tasks
from gossamer.dbench import analysis, bench
from gossamer.dbench import spec as specs
from gossamer.dbench.report import write
from gossamer.dbench.results import as_csv, as_table, results
from gossamer.dbench.store import FILE, Store
from gossamer.errors import GossamerError
from gossamer.methods import Method
from gossamer.rows.replicas import Replicas
from tests import bench_driver
from tests.commands import ROOT, forked, gossamer, in_fork, inside
from tests.models import task
from tests.test_methods import registered

SPEC = """
name = "small"
replicas = [4, 8]
methods = ["centralized", "ring", "ada"]
seeds = [0, 1]
backend = "tape"

[task]
name = "digits/mlp"
epochs = 4
batch = 8

[optimizer]
lr = 0.3
options = { momentum = 0.9 }

[profile]
every = 5
"""


@pytest.fixture(scope="module")
def spec_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("spec") / "small.toml"
    path.write_text(SPEC)
    return path


@pytest.fixture(scope="module")
def uninterrupted(spec_file, tmp_path_factory):
    """One whole run of the grid, by the command line with two jobs."""
    out = tmp_path_factory.mktemp("whole") / "out"
    done = gossamer("bench", spec_file, "--out", out, "--jobs", 2)
    assert done.returncode == 0, done.stderr
    assert f"12 of 12 runs are finished. The report: {out / 'report.html'}" in done.stdout
    return out


def comparable(out):
    """What `results --json` says, but for seconds."""
    answer = inside("results", out, "--json")
    assert answer.returncode == 0, answer.stderr
    return [{key: value for key, value in row.items() if key != "seconds"} for row in json.loads(answer.stdout)]


def test_results_have_the_documented_keys(uninterrupted):
    rows = comparable(uninterrupted)
    assert len(rows) == 12
    row = next(r for r in rows if (r["method"], r["replicas"], r["seed"]) == ("ada", 8, 1))
    assert row["status"] == "done"
    assert row["metric"] == "accuracy"
    assert 0.5 < row["value"] <= 1
    assert row["value_worst"] <= row["value_mean"]
    assert row["steps"] == 22 * 4
    assert row["bytes_per_replica"] == round(1.75 * 4 * (64 * 64 + 64 + 64 * 10 + 10)) * 88
    assert set(row["dispersion"]) == {"at_10_percent", "at_100_percent"}
    assert set(row["dispersion"]["at_10_percent"]) == {"gini", "iod", "cv", "qcd"}
    central = next(r for r in rows if r["method"] == "centralized")
    assert set(central["dispersion"]["at_100_percent"].values()) == {0.0}
    documented = (ROOT / "docs" / "results.md").read_text()
    assert all(f"`{key}`" in documented for key in [*row, "seconds"])
    lines = inside("results", uninterrupted, "--csv").stdout.splitlines()
    assert len(lines) == 13
    assert "dispersion_at_10_percent_gini" in lines[0]
    table = io.StringIO()
    Console(file=table, width=80).print(as_table(results(Store(uninterrupted / FILE)), with_failures=False))
    assert all(word in table.getvalue() for word in ("replicas", "accuracy", "worst", "MB", "seconds", "centralized"))
    assert "…" not in table.getvalue()  # nothing is cut off


def test_the_store_keeps_history_profiles_events_and_machine(uninterrupted):
    store = Store(uninterrupted / FILE)
    run = store.find(specs.Cell("ada", 8, 0))
    assert [e.epoch for e in store.epochs(run.id)] == list(range(4))
    looks = store.profiles(run)
    assert [p.step for p in looks] == list(range(0, 88, 5))
    assert looks[3].norms.shape == (8, 4)
    assert run.tensors == ("1.weight", "3.weight", "1.bias", "3.bias")
    assert store.changes(run.id)[0].graph == "complete"
    assert len(store.changes(run.id)) > 2
    assert json.loads(run.machine)["torch"] == torch.__version__
    assert {"cpu", "cores", "git", "python", "device"} <= set(json.loads(run.machine))
    assert run.backend == "tape"
    assert run.threads == 1
    assert list((uninterrupted / "checkpoints").iterdir()) == []


def test_jobs_do_not_change_results(spec_file, uninterrupted, tmp_path):
    bench(specs.load(spec_file), tmp_path / "out", jobs=1, quiet=True)
    assert comparable(tmp_path / "out") == comparable(uninterrupted)


def test_finished_runs_are_not_repeated_and_a_changed_spec_is_refused(spec_file, uninterrupted, tmp_path):
    out = tmp_path / "out"
    shutil.copytree(uninterrupted, out)
    before = (out / FILE).read_bytes()
    again = inside("bench", spec_file, "--out", out)
    assert again.returncode == 0
    assert "12 of 12 runs are already there" in again.stderr
    assert (out / FILE).read_bytes() == before
    other = tmp_path / "other.toml"
    other.write_text(SPEC.replace("lr = 0.3", "lr = 0.4"))
    refused = inside("bench", other, "--out", out)
    assert refused.returncode == 2
    assert "optimizer.lr: 0.3 there, 0.4 here" in refused.stderr
    assert "Traceback" not in refused.stderr


def test_killed_again_and_again_and_rerun_gives_the_same_results(spec_file, uninterrupted, tmp_path):
    """Two kills in the middle of a write, two at random moments; then the command is given once more."""
    out, marker = tmp_path / "out", tmp_path / "marker"
    chance = random.Random(5)
    for where, count in (("checkpoint", 2), ("commit", 3)):
        process = forked(bench_driver.main, spec_file, out, where, count, marker)
        deadline = time.monotonic() + 120
        while not marker.exists() and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.02)
        assert process.poll() is None, "the bench ended before it was killed"
        process.send_signal(signal.SIGKILL)
        process.wait()
        marker.unlink()
    kills = 0
    for _ in range(2):
        command = ["bench", spec_file, "--out", out, "--jobs", 2, "--checkpoint-seconds", 0]
        process = in_fork(*command, stderr=subprocess.PIPE)
        process.stderr.readline()  # "k of 12 runs are already there", or the first finished run
        time.sleep(chance.uniform(0.0, 4.0))
        kills += process.poll() is None
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert kills >= 1
    last = inside("bench", spec_file, "--out", out, "--jobs", 1)
    assert last.returncode == 0, last.stderr
    assert comparable(out) == comparable(uninterrupted)
    assert sqlite3.connect(out / FILE).execute("PRAGMA integrity_check").fetchone() == ("ok",)


def children(pid):
    """Of all its threads."""
    return [child for path in Path(f"/proc/{pid}/task").glob("*/children") for child in path.read_text().split()]


def test_ctrl_c_while_workers_start(spec_file, tmp_path):
    """They import torch for seconds; an interrupt in that time must not look like a failure."""
    command = ["bench", spec_file, "--out", tmp_path / "out", "--jobs", 2]
    process = in_fork(*command, stderr=subprocess.PIPE, start_new_session=True)
    while len(children(process.pid)) < 3:  # and one of multiprocessing's own
        time.sleep(0.02)
    time.sleep(0.3)
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert "Traceback" not in errors


def test_a_checkpoint_that_outlived_its_store_is_not_trusted(spec_file, uninterrupted, tmp_path):
    out = tmp_path / "out"
    command = ["bench", spec_file, "--out", out, "--jobs", 1, "--checkpoint-seconds", 0.1]
    process = in_fork(*command, stderr=subprocess.PIPE)
    process.stderr.readline()
    while not list((out / "checkpoints").glob("*.ckpt")):
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.wait()
    saved = next((out / "checkpoints").glob("*.ckpt"))
    keep = saved.read_bytes()
    for file in out.glob("dbench.sqlite*"):
        file.unlink()
    store = Store.create(out / FILE, specs.load(spec_file), ("accuracy", True), _shapes())
    assert not saved.exists()  # a new store begins without old checkpoints …
    saved.write_bytes(keep)  # … and one that turns up all the same is not resumed
    store.close()
    assert inside("bench", spec_file, "--out", out, "--jobs", 1).returncode == 0
    assert comparable(out) == comparable(uninterrupted)


def _shapes():
    made = tasks.make("digits/mlp")
    return {"name": made.name, "train": [list(t.shape) for t in made.train], "test": [list(t.shape) for t in made.test]}


def test_ctrl_c_saves_and_the_next_call_goes_on(spec_file, uninterrupted, tmp_path):
    out = tmp_path / "out"
    for jobs in (1, 2):
        command = ["bench", spec_file, "--out", out, "--jobs", jobs]
        process = in_fork(*command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)
        process.stderr.readline()
        os.killpg(process.pid, signal.SIGINT)
        _, errors = process.communicate(timeout=60)
        assert process.returncode == 130, errors
        assert "Give the same command again to go on" in errors
        assert "Traceback" not in errors
    assert inside("bench", spec_file, "--out", out, "--jobs", 1).returncode == 0
    assert comparable(out) == comparable(uninterrupted)


def test_a_second_bench_on_the_same_folder_is_refused_with_the_pid(spec_file, tmp_path):
    out = tmp_path / "out"
    first = in_fork("bench", spec_file, "--out", out, "--jobs", 1, stderr=subprocess.PIPE)
    first.stderr.readline()
    second = inside("bench", spec_file, "--out", out)  # at once: the first one does not take long
    assert second.returncode == 2
    meanwhile = inside("results", out, "--json")  # the store can be read while the bench writes
    assert meanwhile.returncode == 0
    assert len(json.loads(meanwhile.stdout)) == 12
    assert f"another gossamer bench (pid {first.pid}) is writing to" in second.stderr
    first.send_signal(signal.SIGKILL)
    first.wait()
    assert Store(out / FILE).meta("spec")["name"] == "small"


def test_workers_end_when_the_bench_is_killed(spec_file, tmp_path):
    process = in_fork("bench", spec_file, "--out", tmp_path / "out", "--jobs", 2, stderr=subprocess.PIPE)
    process.stderr.readline()
    started = children(process.pid)
    assert len(started) >= 2
    process.send_signal(signal.SIGKILL)
    process.wait()
    deadline = time.monotonic() + 10
    while any(
        Path(f"/proc/{child}/status").exists() and "zombie" not in Path(f"/proc/{child}/status").read_text()
        for child in started
    ):
        assert time.monotonic() < deadline, "a worker outlived the bench"
        time.sleep(0.05)


@pytest.mark.skipif(os.geteuid() != 0, reason="a small disk of one's own needs root")
def test_a_full_disk_is_named_and_finished_runs_are_kept(spec_file, uninterrupted, tmp_path):
    """A real one: a small file system, which a big file fills once a run is finished. With space again, the same command finishes."""
    disk, out = tmp_path / "disk", tmp_path / "disk" / "out"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=20m", "tmpfs", disk], capture_output=True).returncode:
        pytest.skip("file systems can't be mounted here")
    try:
        command = ["bench", spec_file, "--out", out, "--jobs", 1, "--checkpoint-seconds", 0.1]
        process = in_fork(*command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        process.stderr.readline()  # from here on the store is there
        finished = False
        while not finished:
            assert process.poll() is None, process.communicate()[1]
            time.sleep(0.01)
            with closing(Store(out / FILE)) as store:  # sqlite3 itself closes it at some later garbage collection
                finished = any(run.status == "done" for run in store.runs())
        with suppress(OSError), (disk / "ballast").open("wb", buffering=0) as ballast:
            while ballast.write(bytes(4096)):
                pass
        _, errors = process.communicate(timeout=100)
        assert process.returncode == 2, errors
        assert "can't be written" in errors
        assert "Traceback" not in errors
        (disk / "ballast").unlink()
        again = inside("bench", spec_file, "--out", out, "--jobs", 1)
        assert again.returncode == 0, again.stderr
        assert int(re.search(r"(\d+) of 12 runs are already there", again.stderr).group(1)) >= 1
        assert comparable(out) == comparable(uninterrupted)
    finally:
        subprocess.run(["umount", "--lazy", disk], check=True)  # something may hold it for a moment still


def test_a_store_without_space_says_so(uninterrupted, tmp_path):
    out = tmp_path / "out"
    shutil.copytree(uninterrupted, out)
    store = Store(out / FILE)
    store._db.execute(
        f"PRAGMA max_page_count = {store._db.execute('PRAGMA page_count').fetchone()[0]}"
    )  # as if no page were left
    with pytest.raises(GossamerError, match="disk is full; finished runs are kept"):
        store.set_meta("filler", "x" * 10_000_000)
    assert len([r for r in store.runs() if r.status == "done"]) == 12


def test_own_task_from_python(tmp_path):
    raw = {
        "name": "mine",
        "replicas": [4],
        "methods": ["centralized", "ring", {"name": "wild", "graph": "ring", "lr": 1e9}],
        "task": {"name": "digits/mlp", "epochs": 3, "batch": 8},
    }
    outcome = bench(specs.build(raw), tmp_path, task=task(), quiet=True)
    assert outcome.complete
    rows = {row["method"]: row for row in results(Store(tmp_path / FILE))}
    assert rows["ring"]["value"] > 0.1
    assert rows["wild"]["status"] == "diverged"
    assert rows["wild"]["value"] is None
    assert "replica" in rows["wild"]["message"]
    assert as_csv(list(rows.values())).count("\n") == 4


def test_a_grid_may_grow_and_what_is_finished_stays(tmp_path):
    raw = {"name": "mine", "replicas": [4], "methods": ["ring"], "seeds": [1], "task": {"name": "toy", "epochs": 1, "batch": 8}}
    bench(specs.build(raw), tmp_path / "grown", task=task(), quiet=True)
    (before,) = Store(tmp_path / "grown" / FILE).runs()
    more = raw | {"replicas": [2, 4], "methods": ["complete", "ring"], "seeds": [0, 1]}
    for folder in ("grown", "whole"):
        outcome = bench(specs.build(more), tmp_path / folder, task=task(), quiet=True)
        assert outcome.complete
        assert outcome.total == 8
    grown, whole = ({run.cell: run for run in Store(tmp_path / folder / FILE).runs()} for folder in ("grown", "whole"))
    assert {cell: run.value for cell, run in grown.items()} == {cell: run.value for cell, run in whole.items()}
    assert grown[before.cell] == before  # not run again
    for less in (raw, more | {"methods": ["complete"]}, more | {"seeds": [0, 2]}):
        with pytest.raises(GossamerError, match="results of another spec"):
            bench(specs.build(less), tmp_path / "grown", task=task(), quiet=True)


def test_another_task_in_the_same_folder_is_refused(tmp_path):
    raw = {"name": "mine", "replicas": [4], "methods": ["ring"], "task": {"name": "toy", "epochs": 1, "batch": 8}}
    bench(specs.build(raw), tmp_path, task=task(), quiet=True)
    with pytest.raises(GossamerError, match="results of another task .*name: 'toy' there, 'other' here"):
        bench(specs.build(raw), tmp_path, task=task(name="other"), quiet=True)
    with pytest.raises(GossamerError, match="results of another task .*train"):
        bench(specs.build(raw), tmp_path, task=task(samples=320), quiet=True)


def test_ctrl_c_while_replicas_are_evaluated(tmp_path, monkeypatch):
    raw = {
        "name": "slow",
        "replicas": [4],
        "methods": ["ring"],
        "backend": "tape",
        "task": {"name": "toy", "epochs": 2, "batch": 8},
        "profile": {"every": 5},
    }
    rows, alike = [], Replicas.alike
    for interrupted in (False, True):
        out = tmp_path / str(interrupted)
        with monkeypatch.context() as patch:
            if interrupted:  # when the second replica's turn comes
                patch.setattr(Replicas, "alike", lambda *a: os.kill(os.getpid(), signal.SIGINT) or alike(*a))
                assert not bench(specs.build(raw), out, task=task(), jobs=1, quiet=True).complete
        assert bench(specs.build(raw), out, task=task(), jobs=1, quiet=True).complete
        rows.append([{k: v for k, v in row.items() if k != "seconds"} for row in results(Store(out / FILE))])
    assert rows[0] == rows[1]


def test_brackets_in_names_and_a_run_that_grows_out_of_bounds(tmp_path):
    """Divergence must not depend on when checkpoints are made, and must not pass for agreement of the replicas."""
    raw = {
        "name": "wild",
        "replicas": [4],
        "backend": "tape",  # both times the same one
        "methods": ["ring", "complete", {"name": "wild [/x]", "graph": "ring", "lr": 1e30}],
        "task": {"name": "toy", "epochs": 2, "batch": 8},
        "profile": {"every": 1},
    }
    rows = []
    for seconds in (0.0, 100.0):
        out = tmp_path / str(seconds)
        bench(specs.build(raw), out, task=task(), checkpoint_seconds=seconds)
        rows.append([{k: v for k, v in row.items() if k != "seconds"} for row in results(Store(out / FILE))])
        write(out)
        assert inside("results", out).returncode == 0
    assert rows[0] == rows[1]
    wild = rows[0][2]
    assert wild["status"] == "diverged"
    assert wild["connections"] == 2
    runs = analysis.load(Store(out / FILE))
    _, ranks = analysis.ranks_over_time(runs, 4, "gini")
    assert ranks["wild [/x]"][-1] == 3  # last, not first
    assert analysis.metric_against_connections(runs, 4).seeds == 1


def test_auto_is_timed_once_per_scale_and_kept(tmp_path):
    raw = {
        "name": "auto",
        "replicas": [3],
        "methods": ["ring", "complete"],
        "task": {"name": "digits/mlp", "epochs": 1, "batch": 50},
    }
    bench(specs.build(raw), tmp_path, task=task(), quiet=True)
    store = Store(tmp_path / FILE)
    assert {run.backend for run in store.runs()} == {store.meta("backend:3")}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["bench", "nonsense"], "there is no spec 'nonsense'"),
        (["bench", "quickstart", "--out", "/proc/nowhere"], "can't be made"),
        (["bench", "quickstart", "--jobs", "0"], "jobs=0 is out of range"),
        (["bench", "SMALL", "--out", "UNFINISHED", "--no-resume"], "holds results already"),
        (["report", "EMPTY"], "there is no DBench output in"),
        (["results", "EMPTY"], "there is no DBench output in"),
        (["compare", "EMPTY", "EMPTY"], "there is no DBench output in"),
        (["report", "CORRUPT"], "is damaged or not a DBench store"),
        (["results", "FOREIGN"], "is not a DBench store, but some other SQLite file"),
        (["results", "OLD"], "has schema version 0; this Gossamer reads version 3"),
        (["report", "UNFINISHED"], "no finished run yet"),
        (["bench", "quickstart", "--out", "FRESH", "--device", "nonsense"], "device 'nonsense' can't be used here"),
        (["bench", "TYPO", "--out", "FRESH"], "momentun"),
        (["bench", "GREEDY", "--out", "FRESH"], "do not split over 8 replicas × batch 1000"),
        (["graph", "rnig"], "did you mean 'ring'"),
        (["graph", "torus", "-n", "7"], "n=7 is prime"),
        (["bench", "NO_DATA"], "Fashion-MNIST is not in .*; get it with: gossamer data get fashion-mnist"),
    ],
)
def test_mistakes_are_one_line_and_exit_code_2(arguments, message, tmp_path):
    for name in ("EMPTY", "CORRUPT", "FOREIGN", "OLD", "UNFINISHED"):
        (tmp_path / name).mkdir()
    (tmp_path / "CORRUPT" / FILE).write_bytes(b"SQLite format 3\0" + b"garbage" * 300)
    sqlite3.connect(tmp_path / "FOREIGN" / FILE).execute("CREATE TABLE t (x)")
    sqlite3.connect(tmp_path / "OLD" / FILE).executescript(f"PRAGMA application_id = {0x676F7373}; CREATE TABLE t (x)")
    Store.create(tmp_path / "UNFINISHED" / FILE, specs.parse(SPEC), ("accuracy", True), {}).close()
    (tmp_path / "SMALL").write_text(SPEC)
    (tmp_path / "TYPO").write_text(SPEC.replace("momentum", "momentun"))
    (tmp_path / "GREEDY").write_text(SPEC.replace("batch = 8", "batch = 1000").replace("[4, 8]", "[8]"))
    (tmp_path / "NO_DATA").write_text(SPEC.replace('"digits/mlp"', f'"fashion-mnist/mlp"\ndata = "{tmp_path}"'))
    done = inside(*[tmp_path / a if a.isupper() else a for a in arguments])
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert re.search(message, done.stderr)
    assert not (tmp_path / "FRESH" / FILE).exists()  # nothing stands in the way of the corrected command


def test_ctrl_c_before_anything_has_begun_is_not_silent(monkeypatch, tmp_path):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "load", interrupted)
    stopped = inside("bench", "quickstart", "--out", tmp_path)
    assert (stopped.returncode, stopped.stderr) == (130, "gossamer: interrupted; finished runs are kept\n")


def test_compare_tells_noise_from_difference(uninterrupted, tmp_path):
    same = inside("compare", uninterrupted, uninterrupted)
    assert same.stdout.count("identical") == 6
    assert "same machine and versions" in same.stdout
    worse = tmp_path / "worse"
    shutil.copytree(uninterrupted, worse)
    db = sqlite3.connect(worse / FILE)
    db.execute("UPDATE runs SET value = value - 0.2 - seed / 1000.0 WHERE method = 'ring'")
    db.execute("UPDATE runs SET value = value + 0.01 * (2 * seed - 1) WHERE method = 'ada'")
    db.commit()
    db.execute("UPDATE runs SET status = 'diverged', value = NULL WHERE method = 'centralized' AND replicas = 4 AND seed = 1")
    db.execute("UPDATE runs SET status = 'running' WHERE method = 'centralized' AND replicas = 8")
    db.commit()
    text = inside("compare", uninterrupted, worse).stdout
    assert text.count("differs") == 3
    assert text.count("within noise") == 2
    assert "differs: 0 diverged in A, 1 in B" in text
    assert "not finished in B" in text


def test_compare_of_two_settings_of_one_method_says_shortly_what_differs(tmp_path):
    raw = {
        "name": "mine",
        "replicas": [4],
        "methods": ["ring"],
        "seeds": [0, 1, 2],
        "task": {"name": "toy", "epochs": 1, "batch": 8},
    }
    faster = raw | {"optimizer": {"lr": 0.2}, "methods": [{"name": "ring", "options": {"momentum": 0.9}}, "complete"]}
    for name, grid, made in (("a", raw, task()), ("b", faster, task()), ("other", raw, task(samples=320))):
        bench(specs.build(grid), tmp_path / name, task=made, quiet=True)
    text = " ".join(inside("compare", tmp_path / "a", tmp_path / "b").stdout.split())
    assert "optimizer.lr: 0.1 there, 0.2 here" in text
    assert "methods.ring.options.momentum: None there, 0.9 here" in text
    assert "methods: 'complete' is not there" in text
    assert re.search(r"ring +4 +0\.\d+ ± ", text.replace("│", " "))
    refused = inside("compare", tmp_path / "a", tmp_path / "other")
    assert (refused.returncode, refused.stderr.count("\n")) == (2, 1)
    assert "are of different tasks: task.train: [[640, 8, 8], [640]] there" in refused.stderr


def test_a_run_that_diverges_is_said_and_is_not_success(tmp_path):
    (tmp_path / "wild.toml").write_text(SPEC.replace("lr = 0.3", "lr = 1e30").replace('"centralized", "ring", "ada"', '"ring"'))
    done = inside("bench", tmp_path / "wild.toml", "--out", tmp_path / "out", "--jobs", 1, "--quiet")
    assert done.returncode == 1
    assert "4 of 4 runs are finished, 4 of them diverged. The report:" in done.stdout
    assert re.search("gossamer: ring, n=4, seed 0 diverged: .*replica", done.stderr)
    page = (tmp_path / "out" / "report.html").read_text()
    assert "4 of 4 runs diverged (ring at n=4, ring at n=8)" in page
    assert "Accuracy by epoch" not in page  # no empty axes


def test_results_of_an_own_method_are_opened_where_it_is_not_known(tmp_path):
    """The method's state is counted in bytes and in checkpoints: tests/test_methods.py, tests/test_checkpoints.py."""
    with registered():

        class Halfway(Method):
            name = "halfway-of-ones-own"

            def after_update(self, s):
                transfer = s.mix(s.x)
                s.look()
                transfer.into(s.x)

        raw = {"name": "own", "replicas": [4], "methods": ["ring"], "algorithm": "halfway-of-ones-own"}
        bench(specs.build(raw | {"task": {"name": "toy", "epochs": 1, "batch": 8}}), tmp_path, task=task(), quiet=True)
    with pytest.raises(GossamerError, match="halfway-of-ones-own"):
        specs.build(raw | {"task": {"name": "toy", "epochs": 1, "batch": 8}})
    for command in (["results", tmp_path, "--json"], ["report", tmp_path], ["compare", tmp_path, tmp_path]):
        done = inside(*command)
        assert done.returncode == 0, done.stderr


def test_a_grid_that_no_memory_holds_says_how_large_it_is(tmp_path):
    text = SPEC.replace("[4, 8]", "[100000]").replace("[task]", "[task]\noptions = { hidden = [4096, 4096] }")
    (tmp_path / "huge.toml").write_text(text)
    done = inside("bench", tmp_path / "huge.toml", "--out", tmp_path / "out")
    assert done.returncode == 2
    assert re.search(
        r"100,000 replicas of a model of 68.* MB need 20,5.. GB at least, and this machine has .* at most \d+ rep", done.stderr
    )
    assert not (tmp_path / "out" / FILE).exists()


def test_no_column_is_lost_in_a_pipe(uninterrupted):
    for command in (
        ["results", uninterrupted],
        ["compare", uninterrupted, uninterrupted],
        ["plan", "office-1g", "--params", "25k"],
    ):
        if command[0] == "plan":
            command += ["--workers", "32", "--figure", uninterrupted / "plan.html"]
        done = subprocess.run(
            [sys.executable, "-m", "gossamer", *map(str, command)],
            capture_output=True,
            text=True,
            env=os.environ | {"COLUMNS": "60"},
        )
        assert done.returncode == 0, done.stderr
        for word in {"results": "seconds", "compare": "verdict", "plan": "wait"}[command[0]].split():
            assert word in done.stdout
        assert "…" not in done.stdout


def test_graph_command_prints_and_draws(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert "A picture of it: runs/ring-4.svg" in inside("graph", "ring", "-n", "4").stdout
    assert [path.name for path in tmp_path.iterdir()] == ["runs"]  # nothing lies about
    done = inside("graph", "one-peer-exponential", "-n", "8", "--picture", tmp_path / "g.svg")
    assert done.returncode == 0
    assert "1 model sizes per replica" in done.stdout
    assert (tmp_path / "g.svg").read_text().count("<circle") == 8
