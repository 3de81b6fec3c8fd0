"""Outer steps and gradients in few bits in the library: alike on all workers, resumed in the middle of an exchange, with uneven data."""

import pytest
import torch

from gossamer import GossamerError
from tests.pool import on_workers
from tests.world import close, flat, gan, loss_of, small, train


def made(world, method, dtype=torch.float32, **options):
    model = world.model(small(dtype), method, **options)
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    model.gossip(optimizer)
    return model, optimizer


@on_workers(3)
@pytest.mark.parametrize(
    "method", ["diloco:H=4,delay=2,wire=4bits,fragments=2", "noloco:H=4,delay=3", "slowmo:H=4,wire=8bits,moments=mean"]
)
def test_a_run_resumed_in_the_middle_of_a_period_or_an_exchange_is_the_same(world, method):
    model, optimizer = made(world, method)
    train(world, model, optimizer, 15)
    for last in (4, 5, 7):
        folder = world.folder / str(last)
        first, optimizer = made(world, method)
        train(world, first, optimizer, last)
        first.save(folder)
        train(world, first, optimizer, 15 - last, last)
        again, optimizer = made(world, method)
        assert again.load(folder)
        train(world, again, optimizer, 15 - last, last)
        assert torch.equal(flat(first), flat(model)), last
        assert torch.equal(flat(again), flat(model)), last


@on_workers(3)
@pytest.mark.parametrize("wire", ["float32", "bfloat16", "8bit", "4bit"])
def test_after_an_outer_step_all_workers_are_the_same(world, wire):
    model, optimizer = made(world, "diloco:H=3", wire=wire)
    train(world, model, optimizer, 5)
    assert not world.same(flat(model))
    train(world, model, optimizer, 1, 5)
    assert world.same(flat(model))
    assert model._driver.now.state.keys() == {"anchor", "momentum"} | ({"lost"} if wire != "float32" else set())


@on_workers(3)
def test_no_step_waits_for_an_exchange_that_is_due_later(world):
    """The peers send half a second late: the steps before the due one have been done by then."""
    import time

    model, optimizer = made(world, "diloco:H=4,delay=3")
    train(world, model, optimizer, 3)
    if world.rank:
        time.sleep(0.5)
    train(world, model, optimizer, 3, 3)  # those of steps 3, 4 and 5
    transfer = model._driver.now.crossing["outer.0"]
    if not world.rank:
        assert not all(part._flight.done.is_set() for parts in transfer._parts for part in parts)
    train(world, model, optimizer, 1, 6)
    assert not model._driver.now.crossing


@on_workers(3)
@pytest.mark.parametrize(("wire", "units"), [("8bit", 1 / 32), ("4bit", 4 / 7)])
def test_gradients_in_few_bits_are_the_mean_and_the_same_on_all(world, wire, units):
    model = world.model(small(), "all-reduce", wire=wire)
    model.gossip(torch.optim.SGD(model.parameters(), 0.1))
    loss_of(model, world.batch(0)).backward()
    found = torch.cat([p.grad.flatten() for p in model.parameters()])
    assert world.same(found)
    alone = small()
    loss_of(alone, world.batch(0)).backward()
    rows = world.gather(torch.cat([p.grad.flatten() for p in alone.parameters()]))
    assert 0 < float((found - rows.mean(0)).abs().max()) <= 2 * units * float(rows.abs().max())


@on_workers(3)
@pytest.mark.parametrize("method", ["all-reduce:wire=4bits", "all-reduce:wire=8bits,feedback=true"])
def test_in_few_bits_too_a_parameter_gets_a_gradient_if_it_has_one_on_any_worker(world, method):
    """What no worker trains keeps no gradient, however few bits there are for saying so."""
    model = world.model(gan(), method)
    model.gossip(torch.optim.SGD(model.parameters(), 0.1))
    x, y = world.batch(0)
    if world.rank == 1:
        torch.nn.functional.cross_entropy(model.module.critic(x), y).backward()
    else:
        (model.module.critic.weight.square().sum() * 0).backward()
    generator, critic = model.module.generator, model.module.critic
    assert all(p.grad is None for p in generator.parameters())
    assert critic.weight.grad.abs().max() > 0
    assert critic.bias.grad.abs().max() > 0
    assert world.same(critic.bias.grad)


@on_workers(3)
def test_uneven_data_under_outer_steps_ends_with_one_anchor(world):
    model, optimizer = made(world, "diloco:H=3,delay=1", dtype=torch.float64)
    with model.uneven():
        train(world, model, optimizer, 20 if world.rank else 5)
    assert world.same(torch.tensor(model.steps))
    anchor = torch.cat([t.flatten() for t in model._driver.now.state["anchor"].tensors])
    assert world.same(anchor)
    train(world, model, optimizer, 6 - model.steps % 3 + 1, model.steps)
    model.average_()
    close(flat(model), world.rows(model).mean(0))


@on_workers(2)
def test_a_worker_whose_movement_is_not_finite_has_diverged_and_the_others_do_not_take_it_over(world):
    model, optimizer = made(world, "diloco:H=2")
    train(world, model, optimizer, 1)
    if world.rank:
        with torch.no_grad():
            model.module[0].weight.fill_(float("nan"))
        with pytest.raises(GossamerError, match="rank 1: parameter '0.weight' is not finite at step 1"):
            train(world, model, optimizer, 1, 1)
    else:
        train(world, model, optimizer, 1, 1)
    if not world.rank:
        assert flat(model).isfinite().all()
