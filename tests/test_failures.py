"""Workers that fail and come back in one process: against a plain loop over separate models, through resume, in a spec and in a report."""

import copy
import io
import json
import math
import sqlite3
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st
from rich.console import Console
from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import Select

from gossamer import Ada, GossamerError, LearningRate, Recipe, Settings, Task, Trainer, graphs
from gossamer.data import seeds
from gossamer.data.sampling import sampler
from gossamer.dbench import analysis, bench, compare, failure_costs
from gossamer.dbench import spec as specs
from gossamer.dbench.cell import book, run_cell
from gossamer.dbench.failures import EventPart, FailuresPart
from gossamer.dbench.report import write
from gossamer.dbench.results import results
from gossamer.dbench.store import FILE, Store
from gossamer.members.outages import Attendance, Outage, donors
from gossamer.rows.replicas import Replicas
from gossamer.schedules import rebuilt, schedule
from tests.models import Cnn, Dropout, mlp, stopped_and_loaded, task
from tests.test_report import browser, driver, needs_browser, open_page, plotted  # noqa: F401  (fixtures)

# With 8 workers and 10 steps an epoch: alone, two at once, one whose neighbour just came back, one for good, one from the start.
MANY = (Outage(3, 0.2, 0.9), Outage(7, 0.4, 1.2), Outage(0, 0.4, 0.7), Outage(1, 0.7, 1.1), Outage(5, 1.3), Outage(6, 0.0, 0.1))


def settings(**changes):
    return Settings(**{"replicas": 8, "epochs": 2, "batch": 8, "backend": "loop", "outages": MANY} | changes)


def rows(trainer):
    return torch.cat([block.x for block in trainer.replicas.blocks], dim=1)


# --- The plain reference ---------------------------------------------------------------------------------------------------


def living(outages, n, t, per_epoch):
    ends = [(o.worker, round(o.at * per_epoch), math.inf if o.back is None else round(o.back * per_epoch)) for o in outages]
    return [w for w in range(n) if not any(w == worker and a <= t < b for worker, a, b in ends)]


def matrix(graph, m, t, epoch, epochs):
    """The graph of the living, the nearest to it if there is none, for Ada by its formula."""
    if graph == "ada":
        k = max(m - 1, 1) - int((max(m - 1, 1) - min(2, max(m - 1, 1))) / (0.8 * epochs) * epoch + 1e-9)
        graph = "complete" if k >= m - 1 else f"lattice:k={max(k, 2)}"
    try:
        return torch.from_numpy(graphs.parse(graph, m).matrix(t))
    except GossamerError:
        return torch.from_numpy(graphs.parse("one-peer-exponential", m).matrix(t))


def simulated(own: Task, made: Settings, graph: str):
    """A separate module with an optimizer of its own for each worker, in plain PyTorch. Returns the workers that are there at the end."""
    n, start = made.replicas, Replicas(own.build, made.replicas, init=made.init, seed=made.seed)
    order = sampler(made.partition, own.train, n, made.batch, made.seed)
    per_epoch = order.steps_per_epoch

    def optimizer_of(module):
        return made.optimizer.kind()(module.parameters(), lr=made.optimizer.lr, **made.optimizer.options)

    modules, optimizers = {}, {}
    for w in range(n):
        with start.replica(w) as module:
            modules[w] = copy.deepcopy(module).train()
        optimizers[w] = optimizer_of(modules[w])
    there = list(range(n))
    for t in range(per_epoch * made.epochs):
        before, there = there, living(made.outages, n, t, per_epoch)
        for w in (w for w in there if w not in before):
            donor = next(d for d in ((w + k) % n for k in range(1, n)) if d in before and d in there)
            modules[w] = copy.deepcopy(modules[donor])
            optimizers[w] = optimizer_of(modules[w])
            optimizers[w].load_state_dict(copy.deepcopy(optimizers[donor].state_dict()))
        batch = order.batch(t)
        for w in there:
            torch.manual_seed(seeds.derive(made.seed, t, w))
            optimizers[w].zero_grad()
            own.loss(modules[w], *(tensor[w] for tensor in batch)).backward()
            for group in optimizers[w].param_groups:
                group["lr"] = made.learning_rate.at(t, per_epoch * made.epochs, len(there))
        mixed = matrix(graph, len(there), t, t // per_epoch, made.epochs)

        @torch.no_grad()
        def average(of, weights=mixed, there=there):
            for tensors in zip(*(of(modules[w]) for w in there), strict=True):
                stacked = torch.stack([tensor.double() for tensor in tensors])
                for tensor, row in zip(tensors, torch.tensordot(weights, stacked, 1), strict=True):
                    tensor.copy_(row)

        if made.algorithm == "allreduce":
            average(lambda m: [p.grad for p in m.parameters()], torch.full_like(mixed, 1 / len(there)))
        if made.algorithm == "dsgd-awc":
            average(lambda m: list(m.parameters()))
        for w in there:
            optimizers[w].step()
        if made.algorithm == "dsgd-atc":
            average(lambda m: list(m.parameters()))
    return {w: modules[w] for w in there}


SGD = Recipe("sgd", 0.1, {"momentum": 0.9, "weight_decay": 1e-3})
# A bias before BatchNorm has no gradient but rounding errors, which a small eps would make steps of.
ADAM = Recipe("adam", 1e-3, {"eps": 1e-3})
CASES = [
    ("ring", "dsgd-atc", SGD, mlp, "loop"),
    ("ring", "dsgd-awc", ADAM, Cnn, "vmap:3"),
    ("ada", "dsgd-atc", SGD, Cnn, "tape"),
    ("torus", "dsgd-atc", Recipe("adamw", 1e-3, {"weight_decay": 0.1}), mlp, "tape:2"),
    ("one-peer-exponential", "dsgd-awc", SGD, Dropout, "loop"),
    ("exponential", "dsgd-atc", Recipe("rmsprop", 1e-3), mlp, "loop"),
    ("complete", "dsgd-atc", ADAM, mlp, "vmap"),
    ("hierarchical:per_node=2", "dsgd-awc", SGD, mlp, "tape"),
    ("base:k=1", "dsgd-atc", Recipe("adafactor", 1e-2), mlp, "loop"),
    ("complete", "allreduce", SGD, Cnn, "loop"),
]


def compared(own, made, graph):
    trainer = Trainer(own, made, graph)
    trainer.run()
    expected = simulated(own, made, graph)
    assert list(trainer.members) == list(expected)
    for k, module in enumerate(expected.values()):
        with trainer.replicas.replica(k) as mine:
            for name, value in module.state_dict().items():
                torch.testing.assert_close(
                    mine.state_dict()[name], value, rtol=2e-4, atol=2e-5, msg=lambda m, n=name: f"{n}: {m}"
                )
    return trainer


@pytest.mark.parametrize(("graph", "algorithm", "recipe", "build", "backend"), CASES)
def test_it_is_what_a_plain_loop_over_separate_models_does(graph, algorithm, recipe, build, backend):
    rate = LearningRate(recipe.lr, scaling="linear", reference=8)
    made = settings(algorithm=algorithm, optimizer=recipe, backend=backend, learning_rate=rate, partition="shards", seed=3)
    compared(task(build), replace(made, init="same" if algorithm == "allreduce" else "different"), graph)


@pytest.mark.parametrize(
    ("n", "outages"),
    [
        (2, (Outage(0, 0.5, 1.5),)),
        (3, (Outage(2, 0.1), Outage(0, 0.3, 1.0))),
        (5, (Outage(0, 0.2, 1.1), Outage(1, 0.4, 1.3), Outage(3, 0.6, 1.3), Outage(4, 0.8, 1.3))),
        (7, (Outage(6, 0.5), Outage(6, 0.2, 0.6), Outage(1, 0.5, 0.6))),  # two outages of one worker that overlap
        (1, ()),
    ],
)
@pytest.mark.parametrize("graph", ["ring", "ada"])
def test_few_workers_down_to_one_survivor(n, outages, graph):
    rate = LearningRate(0.1, scaling="sqrt", reference=2)
    made = settings(replicas=n, batch=80 // n, outages=outages, optimizer=SGD, learning_rate=rate, init="different")
    compared(task(), made, graph)


# --- What must hold --------------------------------------------------------------------------------------------------------


PARAMETERS = {"lattice": "lattice:k=3", "erdos-renyi": "erdos-renyi:p=0.7"}
NAMES = [PARAMETERS.get(name, name) for name in graphs.families() if name != "directed-random"]  # which is for push-sum


@pytest.mark.parametrize("name", [*NAMES, "ada"])
def test_the_mean_of_the_living_is_kept(name):
    """Nothing but averaging: no gradient."""
    trainer = Trainer(task(), settings(init="different", optimizer=Recipe("sgd", 1e-9)), name)
    trainer.replicas.gradients = lambda loss, batch, step: torch.zeros(trainer.replicas.r)
    while trainer.step < trainer.steps:
        if (
            trainer.step in trainer.attendance.turns
        ):  # as the next step will do it, so that the mean is that of the workers that are there
            trainer._take_part(trainer.attendance.members(trainer.step))
        before = rows(trainer).double().mean(0)
        trainer.run(until=trainer.step + 1)
        assert len(rows(trainer)) == len(trainer.members)
        torch.testing.assert_close(rows(trainer).double().mean(0), before, rtol=1e-5, atol=1e-6)


def test_who_is_away_has_no_say_and_its_data_is_not_seen():
    """Its samples are not numbers: if anything of it were used, nothing would be a number."""
    x, y = task().train
    shard = sampler("shards", task().train, 8, 8, 0).shards[3]
    poisoned = x.clone()
    poisoned[shard] = math.nan
    both = []
    for images in (x, poisoned):
        own = Task("toy", mlp, (images, y), task().test)
        trainer = Trainer(own, settings(partition="shards", outages=(Outage(3, 0.0),), profile_every=3), "exponential")
        trainer.run()
        both.append(trainer)
    assert torch.isfinite(rows(both[1])).all()
    assert torch.equal(rows(both[0]), rows(both[1]))
    assert both[0].history[-1].value == both[1].history[-1].value
    with pytest.raises(GossamerError, match="the loss of replica 3 is nan at step 5"):  # as soon as it is back
        Trainer(own, settings(partition="shards", outages=(Outage(3, 0.0, 0.5),)), "ring").run()
    with pytest.raises(GossamerError, match="the loss of replica 3 is nan at step 0"):  # rows are named by their workers
        Trainer(own, settings(partition="shards", outages=(Outage(1, 0.0),)), "ring").run()


def test_measures_are_of_the_living():
    looks = []
    trainer = Trainer(task(), settings(init="different", profile_every=1), "ring", on_profile=looks.append)
    trainer.run()
    assert [len(look.norms) for look in looks] == [len(living(MANY, 8, t, 10)) for t in range(20)]
    x = rows(trainer).double()
    spread = float((x - x.mean(0)).square().sum(1).mean().sqrt())
    assert trainer.history[-1].consensus_distance == pytest.approx(spread, rel=1e-5)
    with trainer.averaged() as model:
        flat = torch.cat([p.flatten() for p in model.parameters()])
    assert len(trainer.members) == 7
    torch.testing.assert_close(flat.double().sum(), x.mean(0).sum(), rtol=1e-5, atol=1e-5)


RESUME = [
    ("dsgd-atc", "ada", SGD, Cnn, "auto"),
    ("dsgd-awc", "torus", Recipe("accumadamw", 1e-3, {"accum_iter": 4}, clip=1.0, spare_norms=True), Cnn, "vmap:4"),
    ("dsgd-atc", "random-matching", Recipe("adafactor", 1e-2), mlp, "tape"),
    ("allreduce", "complete", ADAM, Dropout, "loop"),
]


@pytest.mark.parametrize("stop", [8, 12])  # in the next step nobody leaves, one comes back
@pytest.mark.parametrize(("algorithm", "graph", "recipe", "build", "backend"), RESUME)
def test_a_run_stopped_in_an_outage_goes_on_bit_for_bit(tmp_path, algorithm, graph, recipe, build, backend, stop):
    made = settings(algorithm=algorithm, optimizer=recipe, backend=backend, profile_every=3)
    first, second = stopped_and_loaded(lambda: Trainer(task(build), made, graph), stop, tmp_path / "a.ckpt")
    assert list(second.members) == living(MANY, 8, stop - 1, 10)
    second.run()
    assert second.members == first.members == (0, 1, 2, 3, 4, 6, 7)
    assert torch.equal(rows(first), rows(second))
    for name, stacked in first.replicas.buffers.items():
        assert torch.equal(stacked, second.replicas.buffers[name])
    assert (second.bytes, second.schedule.changes) == (first.bytes, first.schedule.changes)
    assert [replace(e, seconds=0) for e in second.history] == [replace(e, seconds=0) for e in first.history]


def test_other_outages_are_another_run(tmp_path):
    trainer = Trainer(task(), settings(), "ring")
    trainer.run(until=5)
    trainer.save(tmp_path / "a.ckpt")
    with pytest.raises(GossamerError, match="other settings: outages"):
        Trainer(task(), settings(outages=MANY[:2]), "ring").load(tmp_path / "a.ckpt")
    with pytest.raises(GossamerError, match="other settings: outages"):
        Trainer(task(), settings(outages=()), "ring").load(tmp_path / "a.ckpt")


def test_a_graph_that_does_not_exist_for_those_who_are_left_is_replaced_and_logged():
    trainer = Trainer(task(), settings(outages=(Outage(3, 0.5, 1.0),)), "torus")
    trainer.run()
    assert [(c.step, c.graph) for c in trainer.schedule.changes] == [(0, "torus"), (5, "one-peer-exponential"), (10, "torus")]
    assert trainer.schedule.changes[1].reason.startswith("torus: n=7 is prime")
    assert [record.graph for record in trainer.history] == ["one-peer-exponential", "torus"]


def test_ada_is_rebuilt_as_ada():
    assert rebuilt(schedule("ada", 8), 6)[0].describe() == "ada:k0=5,reach=0.8,k_min=2"
    assert rebuilt(schedule("ada", 8), 12)[0].describe() == "ada:k0=11,reach=0.8,k_min=2"
    assert rebuilt(Ada(12, k0=6, gamma=0.5, k_min=4), 8)[0].describe() == "ada:k0=6,gamma=0.5,k_min=4"
    assert rebuilt(Ada(12, k0=8, k_min=6), 5)[0].describe() == "ada:k0=4,reach=0.8,k_min=4"
    for n in range(1, 9):
        made, note = rebuilt(Ada(8, k0=6, k_min=5), n)
        assert (note, made.n, type(made)) == ("", n, Ada)
        assert made.graph(0, 3, 4).n == n


OUTAGES = st.builds(Outage, st.integers(0, 4), st.floats(0, 3), st.none() | st.floats(0.01, 4).map(lambda x: round(x, 3))).map(
    lambda o: o if o.back is None else replace(o, back=o.at + o.back)
)


@given(st.lists(OUTAGES, max_size=6), st.integers(1, 9))
@examples(max_examples=200, deadline=None)
def test_attendance_leaves_somebody_who_can_go_on_or_says_so(outages, per_epoch):
    outages = [o for o in outages if o.back is None or round(o.back * per_epoch) > round(o.at * per_epoch)]
    steps = range(-1, 8 * per_epoch)
    if not all({*living(outages, 5, t, per_epoch)} & {*living(outages, 5, t + 1, per_epoch)} for t in steps):
        with pytest.raises(GossamerError, match="no worker of n=5 is left"):
            Attendance(5, outages, per_epoch)
        return
    there = Attendance(5, outages, per_epoch)
    before = there.members(-1)
    assert before == (0, 1, 2, 3, 4)
    for step in range(8 * per_epoch):
        now = there.members(step)
        assert list(now) == living(outages, 5, step, per_epoch)
        assert now == before or step in there.turns
        for newcomer, donor in donors(before, now).items():
            assert newcomer not in before
            assert donor in before
            assert donor in now
        assert set(donors(before, now)) == set(now) - set(before)
        before = now


def test_several_who_come_back_ask_different_ones():
    assert donors((0, 2, 5), (0, 1, 2, 4, 5, 7)) == {1: 2, 4: 5, 7: 0}


# --- In a spec -------------------------------------------------------------------------------------------------------------

BASE = {
    "name": "failing",
    "replicas": [6, 8],
    "methods": ["ring", "torus"],
    "seeds": [0, 1],
    "backend": "tape",
    "task": {"name": "toy", "epochs": 4, "batch": 16},
    "optimizer": {"lr": 0.1},
    "profile": {"every": 5},
    "failures": {
        "none": {},
        "some": {"events": [{"workers": [3, 1], "at": 1.0, "back": 2.6}, {"share": 0.3, "at": 3}]},
        "flaky": {"per_epoch": 0.3, "away": 0.5},
    },
}


def test_failures_are_an_axis_of_the_grid_and_the_same_for_all_methods():
    spec = specs.build(BASE)
    assert len(spec.cells()) == 2 * 2 * 2 * 3
    assert specs.build(spec.model_dump(mode="json")) == spec
    assert str(specs.Cell("ring", 8, 1, "some")) == "ring, n=8, seed 1, some"
    for seed in (0, 1):
        away = {spec.settings(specs.Cell(m, 8, seed, "some")).outages for m in ("ring", "torus")}
        assert len(away) == 1
        assert [(o.worker, o.at, o.back) for o in away.pop()][:2] == [(3, 1.0, 2.6), (1, 1.0, 2.6)]
    assert spec.settings(specs.Cell("ring", 8, 0, "none")).outages == ()
    chosen = {tuple(o.worker for o in FailuresPart(events=(EventPart(share=0.1, at=1),)).outages(40, s, 9)) for s in range(9)}
    assert {len(workers) for workers in chosen} == {4}
    assert len(chosen) == 9
    assert len(FailuresPart(events=(EventPart(share=0.01, at=1),)).outages(40, 0, 9)) == 1


def event(**what):
    return {"a": {"events": [what]}}


@pytest.mark.parametrize(
    ("failures", "message"),
    [
        (event(workers=[6], at=1), "failures.a.events.0.workers: there is no worker 6 with replicas=6; they are 0 to 5"),
        (event(workers=[0, 1, 2, 3, 4, 5], at=1), "failures.a.events.0: of n=6 nobody is left at epoch 1"),
        (event(workers=[1, 1], at=1), "failures.a.events.0: workers = .1, 1.: .*each at most once"),
        (event(workers=[1], at=4), "failures.a.events.0.at: epoch 4 is not before the end of training; task.epochs is 4"),
        (event(workers=[1], at=2, back=2), "failures.a.events.0: back = 2 is not after at = 2"),
        (event(workers=[1], share=0.1, at=2), "failures.a.events.0: give workers = .* or share = 0.1"),
        (event(at=2), "failures.a.events.0: give workers = .* or share = 0.1"),
        (event(share=0.1, when=2), "failures.a.events.0.when is not a known key; known are workers, share, at, back"),
        (event(share=2.0, at=2), "failures.a.events.0.share: .*less than 1"),
        (event(workers=[1], at=-1), "failures.a.events.0.at: .*greater than or equal to 0"),
        ({"a": {"event": []}}, "failures.a.event is not a known key; did you mean 'events'"),
        ({"a": {}}, "failures.a: no worker fails in it; give events or per_epoch, or name it none"),
        ({"none": {"per_epoch": 0.1}}, "failures.none is the name of the runs in which no worker fails"),
        ({"a": {"away": 1.0}}, "failures.a: away is for workers that fail by chance; give per_epoch"),
        ({"a": {"per_epoch": 0.0}}, "failures.a.per_epoch: .*greater than 0"),
        # Those who come back at the moment when the others fail have nobody to take over from.
        ({"a": {"events": [{"workers": [0, 1, 2], "at": 1, "back": 2}, {"workers": [3, 4, 5], "at": 2}]}}, "events.1: of n=6 nobody is left at epoch 2"),
        ([], "failures: "),
    ],
)  # fmt: skip
def test_mistakes_are_named_with_their_key(failures, message):
    with pytest.raises(GossamerError, match=message) as caught:
        specs.build(BASE | {"failures": failures, "replicas": [6]})
    assert "\n" not in str(caught.value)


@given(st.integers(1, 12), st.integers(0, 99), st.floats(0.01, 1), st.none() | st.floats(0.1, 3), st.booleans())
@examples(max_examples=100, deadline=None)
def test_chance_never_takes_the_last_one(n, seed, per_epoch, away, also):
    events = (EventPart(share=0.9, at=1.5, back=3.0),) if also else ()
    part = FailuresPart(events=events, per_epoch=per_epoch, away=away)
    outages = part.outages(n, seed, 5)
    assert outages == part.outages(n, seed, 5)
    for time in [0.0, *(o.at for o in outages)]:
        away_now = {o.worker for o in outages if o.at <= time and (o.back is None or time < o.back)}
        assert len(away_now) < n


def test_processes_that_share_the_replicas_are_refused(tmp_path):
    two = SimpleNamespace(size=2, rank=0)
    with pytest.raises(
        GossamerError, match="^failures: workers can leave and come back in one process only.* without torchrun"
    ):
        bench(specs.build(BASE), tmp_path / "out", task=task(), exchange=two)
    assert not (tmp_path / "out").exists()
    with pytest.raises(GossamerError, match="^failures: workers can leave and come back in one process only"):
        Trainer(task(), settings(), "ring", exchange=two)


# --- In a bench and its report ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def output(tmp_path_factory):
    out = tmp_path_factory.mktemp("failing")
    bench(specs.build(BASE), out, task=task(), quiet=True)
    write(out)
    return out


def test_a_bench_runs_the_whole_grid_and_results_say_which(output, tmp_path):
    found = results(Store(output / FILE))
    assert {(row["status"], row["failures"]) for row in found} == {("done", name) for name in BASE["failures"]}
    calm = {(r["method"], r["replicas"], r["seed"]): r["value"] for r in found if r["failures"] == "none"}
    alone = BASE | {"failures": {}, "methods": ["torus"], "seeds": [1]}
    bench(specs.build(alone), tmp_path, task=task(), quiet=True)
    for row in results(Store(tmp_path / FILE)):
        assert row["value"] == calm[row["method"], row["replicas"], row["seed"]]
    store = Store(output / FILE)
    run = store.find(specs.Cell("ring", 8, 1, "some"))
    assert [len(look.norms) for look in store.profiles(run)] == [
        len(living(store.spec().outages(run.cell), 8, s, 5)) for s in range(0, 20, 5)
    ]
    assert len(analysis.load(store)[-1].steps) == 4


def test_a_cell_stopped_in_an_outage_goes_on(output, tmp_path):
    spec, cell = specs.build(BASE), specs.Cell("torus", 8, 1, "some")
    store = Store.create(tmp_path / FILE, spec, ("accuracy", True), {})
    finished = []
    for steps in (7, 3, 100):
        calls = iter(range(steps))
        stop = lambda calls=calls: next(calls, None) is None  # noqa: E731  (asked once per step)
        run = store.find(cell).id
        here = book(tmp_path, store.identity(), run, None)
        here.records.path.parent.mkdir(exist_ok=True)
        finished.append(run_cell(here, spec, cell, task(), "cpu", 100.0, lambda *_: None, stop))
    assert finished == [False, False, True]
    store.take(run, here.records.read())
    whole = Store(output / FILE)
    mine, other = store.find(cell), whole.find(cell)
    apart = {"id": 0, "seconds": 0, "processor_seconds": 0, "machine": ""}
    assert replace(mine, **apart) == replace(other, **apart)
    assert [(p.step, p.norms.tolist()) for p in store.profiles(mine)] == [
        (p.step, p.norms.tolist()) for p in whole.profiles(other)
    ]


def test_the_toll_is_counted_right(output):
    runs = analysis.load(Store(output / FILE))
    by = {(r.run.method, r.run.seed, r.run.failures): r for r in runs if r.run.replicas == 8}
    found = next(t for t in failure_costs.failure_costs(runs, "some") if (t.method, t.replicas) == ("torus", 8))
    values = {(s, f): [e.value for e in by["torus", s, f].epochs] for s in (0, 1) for f in ("none", "some")}
    assert found.before.mean == pytest.approx(sum(values[s, "some"][0] for s in (0, 1)) / 2)
    assert found.worst.mean == pytest.approx(sum(min(values[s, "some"][1:]) for s in (0, 1)) / 2)
    assert found.end.mean == pytest.approx(sum(values[s, "some"][-1] for s in (0, 1)) / 2)
    assert found.cost_end.mean == pytest.approx(sum(values[s, "none"][-1] - values[s, "some"][-1] for s in (0, 1)) / 2)
    lost = [c - f for s in (0, 1) for c, f in zip(values[s, "none"][1:], values[s, "some"][1:], strict=True)]
    assert found.cost_meanwhile.mean == pytest.approx(sum(lost) / 6)
    lower = next(t for t in failure_costs.failure_costs(runs, "some", False) if (t.method, t.replicas) == ("torus", 8))
    assert lower.cost_end.mean == -found.cost_end.mean
    assert lower.worst.mean == pytest.approx(sum(max(values[s, "some"][1:]) for s in (0, 1)) / 2)


@pytest.mark.parametrize(
    ("outages", "expected"),
    [
        ((Outage(0, 2.0, 4.0),), [2, 3]),
        ((Outage(0, 2.3, 4.0),), [2, 3]),
        ((Outage(0, 2.3, 2.4),), [2]),  # over before the epoch is, which shows what it did all the same
        ((Outage(0, 2.0), Outage(1, 3.0, 4.0)), [2, 3, 4, 5]),
        ((Outage(0, 0.0, 1.9),), [0]),
        ((Outage(0, 5.0, 9.0),), [5]),
    ],
)
def test_which_epochs_saw_the_outage(outages, expected):
    run = SimpleNamespace(outages=outages)
    assert list(range(6))[failure_costs._span(run)] == expected


def test_the_report_shows_the_failures(output):
    page = (output / "report.html").read_text()
    assert "Through the failures" in page
    section = page[page.index("<section id='failure-costs'>") :]
    section = section[: section.index("</section>")]
    assert section.count("<tr><th>torus</th>") == 4
    assert "n=8: 2 of 8 workers away from epoch 1 until epoch 2.6; 2 of 8 workers away from epoch 3 for good" in section
    assert "each worker fails with probability 0.3 per epoch, for 0.5 epochs" in section
    assert "of the runs in which no worker fails" in page
    figure = json.loads(page.split("const figures = ")[1].split(";\n")[0])[0]
    assert figure["id"] == "failures"
    assert figure["selectors"] == {
        "failures": ["some", "flaky"],
        "replicas": ["8", "6"],
        "show": ["accuracy", "consensus distance"],
    }
    shade = figure["variants"][0]["data"][0]
    assert (shade["x"], shade["y"]) == ([0, 1, 2.6, 3, 4], [0, 2, 0, 2, 2])
    assert shade["text"][1] == "from epoch 1: workers 1, 3 away"
    assert shade["text"][2] == "from epoch 2.6: all are there"
    runs = analysis.load(Store(output / FILE))
    lines = {trace["name"]: trace["y"] for trace in figure["variants"][0]["data"]}
    for name, failures in (("ring", "some"), ("ring, no worker fails", "none")):
        cell = analysis.select(failure_costs.among(runs, failures), "ring", 8)
        assert lines[name] == pytest.approx([sum(r.epochs[e].value for r in cell) / 2 for e in range(4)], rel=1e-4)
    others = {
        trace.get("name")
        for f in json.loads(page.split("const figures = ")[1].split(";\n")[0])[1:]
        for v in f["variants"]
        for trace in v["data"]
    }
    assert "ring, no worker fails" not in others


def test_a_report_without_undisturbed_runs_says_so(tmp_path):
    bench(
        specs.build(BASE | {"failures": event(workers=[5], at=1), "replicas": [6], "seeds": [0]}),
        tmp_path,
        task=task(),
        quiet=True,
    )
    page = write(tmp_path).read_text()
    assert "an empty table [failures.none] in the spec makes them" in page
    assert "with failures “a”" in page
    assert "torus with 5 workers was one-peer-exponential; torus: n=5 is prime" in page


def test_outputs_with_failures_are_compared(output):
    console = Console(width=200, file=io.StringIO())
    console.print(compare.table(Store(output / FILE), Store(output / FILE)))
    assert console.file.getvalue().count("identical") == 2 * 2 * 3
    assert "ring, flaky" in console.file.getvalue()


def test_a_store_from_before_failures_can_be_read(tmp_path):
    raw = BASE | {"failures": {}, "replicas": [6], "seeds": [0]}
    bench(specs.build(raw), tmp_path, task=task(), quiet=True)
    with sqlite3.connect(tmp_path / FILE) as db:
        columns = [row[1] for row in db.execute("PRAGMA table_info(runs)") if row[1] != "failures"]
        db.execute(f"CREATE TABLE old AS SELECT {', '.join(columns)} FROM runs")
        db.execute("DROP TABLE runs")
        db.execute("ALTER TABLE old RENAME TO runs")
        db.execute("PRAGMA user_version = 1")
        spec = json.loads(db.execute("SELECT value FROM meta WHERE key = 'spec'").fetchone()[0])
        del spec["failures"]
        db.execute("UPDATE meta SET value = ? WHERE key = 'spec'", (json.dumps(spec),))
        db.execute("UPDATE runs SET status = 'pending' WHERE method = 'ring'")
    assert bench(specs.build(raw), tmp_path, task=task(), quiet=True).complete
    assert {row["failures"] for row in results(Store(tmp_path / FILE))} == {"none"}
    assert "Through the failures" not in write(tmp_path).read_text()


def test_the_shipped_spec_is_what_it_promises():
    spec = specs.load("losing-ten-percent")
    assert list(spec.failures) == ["none", "for-a-while", "for-good"]
    assert [len(spec.outages(specs.Cell("ring", n, 0, "for-good"))) / n for n in spec.replicas] == [0.1] * len(spec.replicas)
    for method in spec.methods:  # no graph is replaced by another
        for n in spec.replicas:
            assert rebuilt(schedule(method.topology, n), round(0.9 * n))[1] == ""


@needs_browser
def test_the_figure_is_drawn(browser, output):  # noqa: F811
    open_page(browser, output)
    assert [entry for entry in browser.get_log("browser") if entry["level"] in ("SEVERE", "WARNING")] == []
    before = plotted(browser, "failures")
    assert before["workers away"][1] == [0, 2, 0, 2, 2]
    assert browser.execute_script("return document.querySelectorAll('#failures .trace path').length") > 5
    layers = "return [...document.querySelectorAll('#failures .scatterlayer')].map(l => l.querySelectorAll('.trace').length)"
    assert browser.execute_script(layers) == [1, 4]  # the curves lie over the shade
    section = browser.find_element(By.ID, "failures").find_element(By.XPATH, "..")
    choices = [Select(box) for box in section.find_elements(By.TAG_NAME, "select")]
    choices[0].select_by_visible_text("flaky")
    choices[2].select_by_visible_text("consensus distance")
    after = plotted(browser, "failures")
    assert after["workers away"] != before["workers away"]
    assert after["ring"][1] != before["ring"][1]
