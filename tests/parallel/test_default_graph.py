"""The graph ``auto``, which the library takes by default: gradients as DDP averages them, in 8 bits where the network is waited for."""

import pytest
import torch

from gossamer import DecentralizedDataParallel, GossamerError
from gossamer.dbench import spec as specs
from gossamer.methods import Averaging
from gossamer.methods.policies import auto
from gossamer.parallel.checks import with_graph
from gossamer.schedules import schedule
from tests.parallel.test_all_reduce import against_ddp
from tests.pool import on_workers
from tests.world import flat, small, train

TRIAL = 2 * auto._STEPS


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
def test_the_graph_of_a_method_goes_by_what_torchrun_says_of_the_hosts(world, local, expected, monkeypatch):
    for key, value in (("WORLD_SIZE", world), ("LOCAL_WORLD_SIZE", local)):
        if value is None:
            monkeypatch.delenv(key, raising=False)
        else:
            monkeypatch.setenv(key, str(value))
    for how in (Averaging.of("auto", "qgm"), Averaging.of("auto", None, every=4)):
        assert schedule(with_graph(how).graph, world or 1).describe() == expected
    assert with_graph(Averaging.of("ring", "atc")).graph == "ring"
    assert with_graph(Averaging.of("auto", None)).graph == "auto"
    assert with_graph(Averaging.of("auto", None, "8bit")).describe() == "all-reduce:wire=8bits"
    assert with_graph(Averaging.of("auto", "diloco")).describe() == "diloco"


def test_what_is_asked_for_beside_it_is_never_dropped():
    assert with_graph(Averaging.of("Auto", "qgm")).graph == "one-peer-exponential"
    assert with_graph(Averaging.of("AUTO", None, "8bit")).describe() == "all-reduce:wire=8bits"
    for asked in ({"method": "qgm"}, {"local_steps": 8}, {"wire": "bfloat16"}):
        with pytest.raises(GossamerError, match="graph 'auto' is the library's default.* Leave the graph out"):
            DecentralizedDataParallel(small(), auto.Auto(1), **asked)
    for text in ("auto", "auto, qgm", "Auto, H=8"):
        spec = {"name": "s", "replicas": [2], "methods": [text], "task": {"name": "digits/mlp", "epochs": 1, "batch": 10}}
        with pytest.raises(GossamerError, match="graph 'auto' is the library's default"):
            specs.build(spec).check()


def test_a_trial_that_was_not_measured_is_tried_again_at_once():
    policy, end = auto.Auto(2), auto._FIRST_STEP + TRIAL - 1
    assert policy.agree(end, []) == ""
    assert policy.trial == end + 1
    times = [0.01] * auto._STEPS + [0.02] * auto._STEPS + [0.1] * TRIAL
    assert "in float32, as with DDP" in policy.agree(end + TRIAL, [times, times])
    assert policy.trial == auto._LATER * (end + TRIAL + 1)


@on_workers(2)
def test_replicas_that_are_kept_must_start_the_same(world):
    for graph in ("auto", "diloco:H=2"):
        wrapped(world, graph=graph, init="keep")
        with pytest.raises(GossamerError, match="must start the same; use init='broadcast'.* on rank 0; .* on rank 1"):
            wrapped(world, module=small(seed=world.rank), graph=graph, init="keep")


def sgd(parameters):
    return torch.optim.SGD(parameters, 0.05, momentum=0.9)


def measured(model, exact, coarse, step=0.1):
    """As if each step took so long, and its mean in float32 and in 8 bits so long on the worker that waits least."""
    clock, driver = model._driver.clock, model._driver

    def seconds():
        of_wire = coarse if model.method.wire == "8bits" else exact
        return step, of_wire + driver.rank * 0.5  # the others have waited for this one

    clock.step = seconds


def wrapped(world, make=sgd, module=None, graph="auto", **options):
    model = world.model(module, graph, **options)
    optimizer = make(model.parameters())
    model.gossip(optimizer)
    return model, optimizer


def muon(parameters):
    """Matrices only; biases by another optimizer are not what is asked here."""
    return torch.optim.Muon([p for p in parameters if p.ndim == 2], 0.02)


@on_workers(2, 3)
def test_the_default_is_ddp(world):
    for make in (sgd, lambda p: torch.optim.AdamW(p, 0.01), *([muon] if hasattr(torch.optim, "Muon") else [])):
        against_ddp(world, auto._FIRST_STEP, make, "auto", tolerance=1e-4)
    assert isinstance(DecentralizedDataParallel(small()).schedule, auto.Auto)


@on_workers(3)
def test_gradients_travel_in_8_bits_where_that_saves_time(world):
    """All workers decide the same at the same step, by the worker that waits least; and again when ten times as many steps are done."""
    for exact, coarse, chosen in ((0.08, 0.02, True), (0.08, 0.077, False), (0.02, 0.03, False)):
        model, optimizer = wrapped(world)
        measured(model, exact, coarse)
        seen = []
        for step in range(auto._FIRST_STEP + TRIAL + 3):
            train(world, model, optimizer, 1, step)
            seen.append(model.method.wire == "8bits")
            assert world.same(flat(model))
        assert seen == [False] * (auto._FIRST_STEP + auto._STEPS) + [True] * auto._STEPS + [chosen] * 3
        (start, change) = model.schedule.changes
        assert start.step == 0
        assert change.step == auto._FIRST_STEP + TRIAL
        words = "in 8 bits, with error feedback," if chosen else "in float32, as with DDP,"
        assert f"gradients of 3 workers travel {words} from step 26 on" in change.reason
        assert f"{exact * 1e3:.3g} ms in float32 and {coarse * 1e3:.3g} ms in 8 bits" in change.reason
        assert model.averages_gradients
    model.schedule.trial = model.steps  # the next trial
    measured(model, 0.08, 0.02)
    train(world, model, optimizer, TRIAL + 1)
    assert model.method.wire == "8bits"
    assert len(model.schedule.changes) == 3
    assert world.same(flat(model))


@on_workers(2)
def test_a_run_on_auto_goes_on_exactly_from_any_step(world):
    """In a trial, on each wire, and after it: with what rounding has lost, and what was measured."""
    model, optimizer = wrapped(world)
    measured(model, 0.08, 0.02)
    saved = (5, auto._FIRST_STEP + 3, auto._FIRST_STEP + auto._STEPS + 3, auto._FIRST_STEP + TRIAL + 2)
    for step in range(auto._FIRST_STEP + TRIAL + 4):
        if step in saved:
            model.save(world.folder / str(step))
        train(world, model, optimizer, 1, step)
    for step in saved:
        other, again = wrapped(world)
        assert other.load(world.folder / str(step))
        measured(other, 0.08, 0.02)
        train(world, other, again, model.steps - step, step)
        assert torch.equal(flat(other), flat(model)), step
        assert other.method == model.method
        assert [c.step for c in other.schedule.changes] == [c.step for c in model.schedule.changes]
    # Back to a step of another method.
    assert other.load(world.folder / str(saved[0]))
    assert other.method.wire == "float32"


@on_workers(2)
def test_a_checkpoint_of_the_default_before_says_how_to_go_on(world):
    model, optimizer = wrapped(world, graph="one-peer-exponential")
    train(world, model, optimizer, 1)
    model.save(world.folder)
    other, _ = wrapped(world)
    with pytest.raises(GossamerError, match=r"one-peer-exponential there, auto here.*graph='one-peer-exponential'"):
        other.load(world.folder)


@on_workers(3)
def test_workers_that_leave_in_a_trial_decide_as_the_others_later(world):
    model, optimizer = wrapped(world)
    measured(model, 0.08, 0.02)
    with model.uneven():
        train(world, model, optimizer, auto._FIRST_STEP + 4 if world.rank == 1 else auto._FIRST_STEP + TRIAL + 30)
    assert world.same(flat(model))
    train(world, model, optimizer, 3)
    assert world.same(flat(model))


@on_workers(2)
def test_one_line_says_what_was_chosen(world):
    said = []
    model, optimizer = wrapped(world)
    model.gossip(optimizer, log=lambda numbers, step: said.append((step, numbers.get("gossamer/method"))))
    measured(model, 0.08, 0.02)
    train(world, model, optimizer, auto._FIRST_STEP + TRIAL + 1)
    shown = [(step, method) for step, method in said if method]
    coarse, first = "all-reduce:wire=8bits,feedback=true", auto._FIRST_STEP + auto._STEPS
    assert shown == ([] if world.rank else [(0, "all-reduce"), (first, coarse)])
    assert "in 8 bits" in repr(model.schedule)
