"""What consensus control notes is kept at the steps of the profile, and drawn in the report."""

import shutil
import sqlite3

import pytest

from gossamer import Trainer
from gossamer.apps import tasks
from gossamer.dbench import analysis, bench
from gossamer.dbench import spec as specs
from gossamer.dbench.figures import figures
from gossamer.dbench.records import Record
from gossamer.dbench.report import write
from gossamer.dbench.spec import Cell
from gossamer.dbench.store import FILE, Store
from tests.test_old_files import OLD

CONTROLLED = "ring, atc + control:target=0.05,rounds=3"
IDS = {"control", "control-rounds"}
RAW = {
    "name": "controlled",
    "replicas": [4, 6],
    "methods": ["complete", CONTROLLED],
    "seeds": [0, 1],
    "backend": "loop",
    "task": {"name": "digits/mlp", "epochs": 2, "batch": 16, "partition": "dirichlet:alpha=0.3"},
    "optimizer": {"lr": 0.1},
    "profile": {"every": 3},
}


def run(folder, raw, **options):
    bench(specs.build(raw), folder, jobs=1, quiet=True, **options)
    return Store(folder / FILE)


def drawn(store):
    return {figure.id: figure for figure in figures(analysis.load(store), "accuracy", True)}


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return run(tmp_path_factory.mktemp("control"), RAW)


def noted(cell):
    """A run of its own, with all that control has noted in it."""
    spec = specs.build(RAW)
    trainer = Trainer(tasks.make("digits/mlp", None, {}, 16), spec.settings(cell), "ring")
    seen = {}
    trainer.now.on_note = lambda step, numbers: seen.setdefault(step, {}).update(numbers)
    trainer.run()
    assert len(seen) == trainer.steps
    return {step: numbers for step, numbers in seen.items() if step % 3 == 0}


def test_the_curves_are_those_of_the_run(store):
    made = drawn(store)
    assert made.keys() >= IDS
    spent = set()
    for k, n in enumerate((6, 4)):
        distance, rounds = (
            {(t["name"], t["text"]): t for t in made[id].variants[k]["data"]} for id in ("control", "control-rounds")
        )
        assert len(distance) == 4  # a run has two lines, and the legend one
        assert sum(t["showlegend"] for t in distance.values()) == 1
        for seed in (0, 1):
            expected = noted(Cell(CONTROLLED, n, seed))
            for lines, what, number in (
                (distance, CONTROLLED, "control_reached"),
                (distance, f"{CONTROLLED}: target", "control_target"),
                (rounds, CONTROLLED, "control_rounds"),
            ):
                line = lines[what, f"seed {seed}"]
                assert line["x"] == list(expected)
                assert line["y"] == pytest.approx([one[number] for one in expected.values()], rel=1e-4)
            spent |= {one["control_rounds"] for one in expected.values()}
        assert made["control"].selectors == {"replicas": ["6", "4"]}
    assert len(spent) > 1


def test_the_page_has_them_only_where_a_method_has_them(store, tmp_path):
    assert '"id":"control"' in write(store.path.parent).read_text()
    for name, change in (("none", {"methods": ["complete", "ring, atc"]}), ("no-looks", {"profile": {"every": 0}})):
        plain = run(tmp_path / name, RAW | {"replicas": [4], "seeds": [0]} | change)
        assert not drawn(plain).keys() & IDS
        assert '"id":"control' not in write(plain.path.parent).read_text()
        assert not plain._columns("numbers")


def test_a_run_with_many_checkpoints_has_the_same_rows(store, tmp_path):
    again = run(tmp_path, RAW | {"replicas": [4]}, checkpoint_seconds=0.0)
    for run_ in again.runs():
        assert again.numbers(run_.id) == store.numbers(store.find(run_.cell).id)
    controlled = again.find(Cell(CONTROLLED, 4, 0)).id
    assert again.numbers(controlled)
    again.take(controlled, Record({"machine": {}, "backend": "loop", "threads": 1, "tensors": []}))  # anew: nothing of it stays
    assert again.numbers(controlled) == []


def test_an_older_store_may_grow_by_a_method_with_control(tmp_path):
    shutil.copy(OLD / FILE, tmp_path / FILE)
    old = Store(tmp_path / FILE)
    assert all(old.numbers(run_.id) == [] for run_ in old.runs())
    spec = old.spec().model_dump(mode="json")
    grown = run(tmp_path, spec | {"methods": [*spec["methods"], "ring, atc + control"]})
    assert drawn(grown).keys() >= IDS
    with sqlite3.connect(tmp_path / FILE) as db:
        assert db.execute("PRAGMA user_version").fetchone() == (old._version,)
