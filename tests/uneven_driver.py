"""Workers with different numbers of batches; each case asserts on every rank. One launch runs all of them."""

import sys
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn

from gossamer import DecentralizedDataParallel, GossamerError


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


def numbers_of_steps(graph, steps, **options):
    model, optimizer = build(graph, **options)
    rank = dist.get_rank()
    with model.uneven():
        for _ in range(steps[rank]):
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


def replicas_of_all_reduce_stay_the_same(steps):
    """To the bit: parameters after the block, and after further steps, for which the optimizer's state has to be the same as well."""
    torch.manual_seed(0)
    model = DecentralizedDataParallel(nn.Linear(20, 10).double(), "all-reduce", timeout=30)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model.gossip(optimizer)
    torch.manual_seed(dist.get_rank())
    with model.uneven():
        for _ in range(steps[dist.get_rank()]):
            step(model, optimizer)
            time.sleep(0.003)
    for _ in range(4):
        rows = everyone(model)
        assert (rows == rows[0]).all(), (rows - rows[0]).abs().max()
        step(model, optimizer)


def the_same_number_changes_nothing():
    model = numbers_of_steps("ring", [12] * dist.get_world_size())
    assert model.steps == 15
    assert len(model.schedule.changes) == 1, model.schedule.changes


def those_who_stay_keep_their_mean():
    """Nothing is trained (lr 0), so those who stay go to the mean of what they had when the graph changed."""
    rank, n = dist.get_rank(), dist.get_world_size()
    model, optimizer = build("one-peer-exponential", seed=dist.get_rank(), init="keep")
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
    assert torch.allclose(rows, rows[1].expand_as(rows), atol=1e-9)  # they agree, and who left early took it over
    # Up to the change all n were mixed, and the mean of all was kept; then that of the n - 1.
    assert (rows[1] - before.mean(dim=0)).norm() < 0.2 * (before - before.mean(dim=0)).norm()


def what_all_must_take_part_in_is_refused():
    model, optimizer = build("ring")
    with model.uneven():
        step(model, optimizer)
        for call in (lambda: model.mean(1.0), model.average_, lambda: model.consensus().__enter__()):
            with pytest.raises(GossamerError, match=r"inside uneven\(\) \(step 1\)"):
                call()
    assert model.mean(float(dist.get_rank())) == (dist.get_world_size() - 1) / 2


def twice():
    model, optimizer = build("complete")
    for steps in ([2, 9, 9, 30, 30], [30, 30, 2, 9, 9]):
        with model.uneven():
            for _ in range(steps[dist.get_rank()]):
                step(model, optimizer)
                time.sleep(0.003)
    model.average_()


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    the_same_number_changes_nothing()
    those_who_stay_keep_their_mean()
    what_all_must_take_part_in_is_refused()
    twice()
    numbers_of_steps("one-peer-exponential", [5, 40, 12, 45, 45])
    numbers_of_steps("one-peer-exponential", [30, 3, 3, 3, 3], wire="bfloat16")
    numbers_of_steps("exponential", [0, 10, 30, 30, 31], send_copy=True)
    numbers_of_steps("ring", [36, 7, 36, 7, 36], order="atc", local_steps=2)
    numbers_of_steps("all-reduce", [5, 30, 5, 30, 30])
    replicas_of_all_reduce_stay_the_same([5, 30, 5, 30, 30])
    replicas_of_all_reduce_stay_the_same([20, 21, 22, 20, 21])  # within the grace: no worker leaves
    replicas_of_all_reduce_stay_the_same([3, 90, 60, 3, 90])
    print("all done")


if __name__ == "__main__":
    sys.exit(main())
