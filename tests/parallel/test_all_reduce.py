"""The graph ``all-reduce``, which averages gradients as torch's DDP does."""

import contextlib
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


@on_workers(2, 3)
def test_clipping_and_accumulation_see_what_ddp_shows(world):
    """all-reduce averages when backward ends, except under no_sync()."""
    for quiet in ("no_sync", "attribute", "never"):
        ours, theirs = world.model(small(), "all-reduce"), nn.parallel.DistributedDataParallel(small())
        pairs = [(model, torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)) for model in (ours, theirs)]
        ours.gossip(pairs[0][1])
        for step in range(6):
            norms = []
            for model, o in pairs:
                o.zero_grad()
                for part in range(3):
                    hold = quiet != "never" and part < 2
                    if quiet == "attribute":
                        model.require_backward_grad_sync = not hold
                    with model.no_sync() if quiet == "no_sync" and hold else contextlib.nullcontext():
                        loss_of(model, world.batch(10 * step + part)).backward()
                norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.1)))
                o.step()
            assert abs(norms[0] - norms[1]) < 1e-6, (quiet, step, norms)
        close(flat(ours), flat(theirs), 1e-6)
        assert world.same(flat(ours))
        assert ours.steps == 6
        ours.close()


@on_workers(2)
def test_under_no_sync_alone_gradients_are_ones_own(world):
    model = world.model(small(), "all-reduce")
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model.gossip(optimizer)
    bare = small()
    with model.no_sync():
        loss_of(model, world.batch(0)).backward()
    loss_of(bare, world.batch(0)).backward()
    close(model.module[0].weight.grad, bare[0].weight.grad)
    model.average_gradients()  # a person may still ask for it
    assert world.same(model.module[0].weight.grad)
    close(model.module[0].weight.grad, world.gather(bare[0].weight.grad).mean(0))


@on_workers(2)
def test_gradients_that_no_backward_has_made_are_averaged_in_step(world):
    model = world.model(small(), "all-reduce")
    optimizer = torch.optim.SGD(model.parameters(), 1.0)
    model.gossip(optimizer)
    start = flat(model).clone()
    for p in model.parameters():
        p.grad = torch.full_like(p, float(world.rank))
    optimizer.step()
    close(flat(model), start - 0.5)
