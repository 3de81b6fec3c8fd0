"""Workers with different numbers of batches."""

import time

import pytest
import torch
from torch import nn

from gossamer import DecentralizedDataParallel, GossamerError
from tests import workers as launcher
from tests.pool import on_workers


def build(graph, seed=0, **options):
    torch.manual_seed(seed)
    model = DecentralizedDataParallel(nn.Linear(20, 10).double(), graph, timeout=30, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    model.gossip(optimizer)
    return model, optimizer


def step(model, optimizer):
    optimizer.zero_grad()
    model(torch.randn(4, 20, dtype=torch.float64)).square().mean().backward()
    optimizer.step()


def row(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def everyone(model):
    return model._mixer.gather(row(model)[None])


def trained(world, graph, steps, **options):
    """Each worker has its number of steps; in the end they are together again."""
    model, optimizer = build(graph, **options)
    with model.uneven():
        for _ in range(steps[world.rank]):
            step(model, optimizer)
            time.sleep(0.003)
    done = model._mixer.gather(torch.tensor([float(model.steps)]))
    assert (done == done[0]).all(), done
    assert done[0] >= max(steps)
    for _ in range(3):  # all are in the graph again
        step(model, optimizer)
    model.average_()
    rows = everyone(model)
    assert torch.allclose(rows, rows[0].expand_as(rows), atol=1e-12)
    assert torch.isfinite(rows).all()
    return model


@pytest.mark.parametrize(
    ("graph", "steps", "options"),
    [
        ("one-peer-exponential", [5, 40, 12, 45, 45], {}),
        ("one-peer-exponential", [30, 3, 3, 3, 3], {"wire": "bfloat16"}),
        ("exponential", [0, 10, 30, 30, 31], {"send_copy": True}),
        ("ring", [36, 7, 36, 7, 36], {"order": "atc", "local_steps": 2}),
        ("all-reduce", [5, 30, 5, 30, 30], {}),
    ],
)
@on_workers(5)
def test_workers_that_run_out_of_data_leave_and_come_together(world, graph, steps, options):
    trained(world, graph, steps, **options)


@pytest.mark.parametrize(
    "steps",
    [
        [5, 30, 5, 30, 30],
        [20, 21, 22, 20, 21],  # within the grace: no worker leaves
        [3, 90, 60, 3, 90],
    ],
)
@on_workers(5)
def test_replicas_of_all_reduce_stay_the_same(world, steps):
    """To the bit: parameters after the block, and after further steps, for which the optimizer's state has to be the same as well."""
    torch.manual_seed(0)
    model = DecentralizedDataParallel(nn.Linear(20, 10).double(), "all-reduce", timeout=30)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model.gossip(optimizer)
    torch.manual_seed(world.rank)
    with model.uneven():
        for _ in range(steps[world.rank]):
            step(model, optimizer)
            time.sleep(0.003)
    for _ in range(4):
        rows = everyone(model)
        assert (rows == rows[0]).all(), (rows - rows[0]).abs().max()
        step(model, optimizer)


@on_workers(5)
def test_the_same_number_changes_nothing(world):
    model = trained(world, "ring", [12] * world.size)
    assert model.steps == 15
    assert len(model.schedule.changes) == 1, model.schedule.changes


@on_workers(5)
def test_those_that_stay_keep_their_mean(world):
    """Nothing is trained (lr 0), so those that stay go to the mean of what they had when the graph changed."""
    rank, n = world.rank, world.size
    model, optimizer = build("one-peer-exponential", seed=rank, init="keep")
    optimizer.param_groups[0]["lr"] = 0.0
    before = everyone(model)
    with model.uneven():
        for _ in range(4 if rank == 0 else 120):
            step(model, optimizer)
            time.sleep(0.003)
        if rank:
            over = {change.graph for change in model.schedule.changes}
            assert f"one-peer-exponential over {n - 1}" in over, over
    rows = everyone(model)
    assert torch.allclose(rows, rows[1].expand_as(rows), atol=1e-9)  # they agree, and the one that left early took it over
    # Up to the change all n were mixed, and the mean of all was kept; then that of the n - 1.
    assert (rows[1] - before.mean(dim=0)).norm() < 0.2 * (before - before.mean(dim=0)).norm()


@on_workers(5)
def test_what_all_must_take_part_in_is_refused(world):
    model, optimizer = build("ring")
    with model.uneven():
        step(model, optimizer)
        for call in (lambda: model.mean(1.0), model.average_, lambda: model.consensus().__enter__()):
            with pytest.raises(GossamerError, match=r"inside uneven\(\) \(step 1\)"):
                call()
    assert model.mean(float(world.rank)) == (world.size - 1) / 2


@on_workers(5)
def test_twice(world):
    model, optimizer = build("complete")
    for steps in ([2, 9, 9, 30, 30], [30, 30, 2, 9, 9]):
        with model.uneven():
            for _ in range(steps[world.rank]):
                step(model, optimizer)
                time.sleep(0.003)
    model.average_()


FAILING = """
import os, time, tests.no_compiler, torch, torch.distributed as dist
from torch import nn
from gossamer import DecentralizedDataParallel, GossamerError

torch.set_num_threads(1)
dist.init_process_group("gloo")
model = DecentralizedDataParallel(nn.Linear(4, 2), "ring", timeout=TIMEOUT)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
model.gossip(optimizer)
try:
    with model.uneven():
        for k in range(2 if model.rank == 0 else 200):
            model(torch.randn(4, 4)).square().mean().backward()
            optimizer.step()
            time.sleep(0.01)
            if model.rank == 1 and model.schedule.changes[1:]:
                FAILURE
except GossamerError as error:
    print(error, flush=True)
os._exit(0)
"""


@pytest.mark.parametrize(
    ("failure", "timeout", "said"),
    [("raise ValueError", 60, "ended with an error"), ("os._exit(1)", 3, "no heartbeat for 3 s")],
    ids=["an exception", "the end of a process"],
)
def test_a_worker_that_has_left_does_not_wait_for_one_that_is_gone(failure, timeout, said):
    script = FAILING.replace("FAILURE", failure).replace("TIMEOUT", str(timeout))
    left = launcher.run(2, ["-c", script], timeout=60)[0]
    assert f"rank 0 can't go on in uneven(): rank 1 {said}" in left.out, left
