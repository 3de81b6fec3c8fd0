"""The graph ``all-reduce``, which averages gradients as torch's DDP does."""

import time

import torch
from torch import nn

from tests.pool import on_workers
from tests.world import close, flat, gan, loss_of, small


def against_ddp(world, steps, make, graph="all-reduce", module=small, tolerance=1e-5, **options):
    """The same loop with DDP and with the library."""
    ours = world.model(module(), graph, **options)
    theirs = nn.parallel.DistributedDataParallel(module())
    optimizer, other = make(ours.parameters()), make(theirs.parameters())
    ours.gossip(optimizer)
    for step in range(steps):
        for model, o in ((ours, optimizer), (theirs, other)):
            o.zero_grad()
            loss_of(model, world.batch(step)).backward()
            o.step()
    close(flat(ours), flat(theirs), tolerance)
    assert world.same(flat(ours)) or graph != "all-reduce"
    assert (flat(ours) != flat(module())).any()


@on_workers(3)
def test_a_complete_graph_that_adapts_then_combines_is_ddp(world):
    for amount in (0.0, 0.9):
        against_ddp(world, 50, lambda p, m=amount: torch.optim.SGD(p, 0.05, momentum=m), "complete", order="atc")


@on_workers(2)
def test_all_reduce_is_ddp(world):
    against_ddp(world, 50, lambda p: torch.optim.SGD(p, 0.05))
    against_ddp(world, 50, lambda p: torch.optim.SGD(p, 0.05, momentum=0.9, weight_decay=1e-3))
    against_ddp(world, 50, lambda p: torch.optim.Adam(p, 0.01), tolerance=1e-4)


@on_workers(2)
def test_all_reduce_averages_before_clipping_when_asked(world):
    ours, theirs = world.model(graph="all-reduce"), nn.parallel.DistributedDataParallel(small())
    optimizer, other = (torch.optim.SGD(m.parameters(), 0.5) for m in (ours, theirs))
    ours.gossip(optimizer)
    for step in range(5):
        for model, o in ((ours, optimizer), (theirs, other)):
            o.zero_grad()
            for part in range(2):  # two backwards in a step
                loss_of(model, world.batch(2 * step + part)).backward()
            if model is ours:
                model.average_gradients()
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            o.step()
    close(flat(ours), flat(theirs), 1e-6)


@on_workers(3)
def test_all_reduce_gives_all_workers_the_same_gradients_when_some_have_none(world):
    """Rank 0 has none for the first layer, rank 1 a zero, rank 2 has none too; no rank has one for the last bias."""
    model = world.model(graph="all-reduce")
    optimizer = torch.optim.SGD(model.parameters(), 0.1, weight_decay=0.5)
    model.gossip(optimizer)
    first, last = model.module[0], model.module[2]
    last.weight.grad = torch.full_like(last.weight, float(world.rank))
    first.weight.grad = torch.zeros_like(first.weight) if world.rank == 1 else None
    bias = last.bias.detach().clone()
    optimizer.step()
    assert world.same(flat(model))
    close(last.weight.grad, torch.ones_like(last.weight))
    assert first.weight.grad is not None
    assert last.bias.grad is None
    assert torch.equal(last.bias, bias)  # no weight decay where no rank has a gradient


@on_workers(3)
def test_all_reduce_with_several_optimizers_averages_each_ones_gradients(world):
    model = world.model(gan(), "all-reduce")
    first = torch.optim.Adam(model.critic.parameters(), 0.01)
    last = torch.optim.SGD(model.generator.parameters(), 0.1)
    model.gossip(first, last)
    for step in range(4):
        for o in (first, last):
            o.zero_grad()
            loss_of(model, world.batch(step)).backward()
            o.step()
    assert world.same(flat(model))
    assert model.steps == 4


@on_workers(2)
def test_a_step_that_does_not_come_leaves_nothing_behind(world):
    """With all-reduce: gradients that were averaged and thrown away, and two optimizers that clip in turn."""
    model = world.model(graph="all-reduce")
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model.gossip(optimizer)
    for step in range(4):
        optimizer.zero_grad()
        loss_of(model, world.batch(step)).backward()
        if step == 1:
            model.average_gradients()
            continue
        optimizer.step()
    assert world.same(flat(model))
    model = world.model(graph="all-reduce")
    first, second = (torch.optim.SGD(part.parameters(), 0.1) for part in (model.module[0], model.module[2]))
    model.gossip(first, second)
    for step in range(3):
        for k, optimizer in enumerate((first, second)):
            optimizer.zero_grad()
            loss_of(model.module, world.batch(2 * step + k)).backward()  # not by way of the wrapper
            model.average_gradients()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
    assert world.same(flat(model))


@on_workers(2)
def test_all_reduce_with_a_scaler_and_clipping_may_be_uneven(world):
    for clips in (False, True):
        model = world.model(graph="all-reduce")
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        scaler = None if clips else torch.amp.GradScaler("cpu", init_scale=4.0)
        model.gossip(optimizer, scaler=scaler)
        with model.uneven():
            for step in range(5 if world.rank == 0 else 60):
                optimizer.zero_grad()
                loss = loss_of(model, world.batch(step))
                if scaler is None:
                    loss.backward()
                    model.average_gradients()
                    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                    optimizer.step()
                else:
                    scaler.scale(loss).backward()
                    scaler.step(optimizer)
                    scaler.update()
                time.sleep(0.002)
        assert world.same(flat(model))
