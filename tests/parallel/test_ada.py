"""The graphs ``ada`` and ``ada-auto``, which change with time."""

import copy
import math

import pytest
import torch
from torch import nn

import gossamer
from gossamer import GossamerError, Recipe, Settings, Trainer
from gossamer.data.tasks import Task
from gossamer.optim import momentum
from tests.pool import on_workers
from tests.world import SGD, SGD_RECIPE, close, flat, loss_of, train


@on_workers(4)
def test_ada_thins_out_its_graph(world):
    with pytest.raises(GossamerError, match="steps_per_epoch"):
        world.model(graph="ada")
    model = world.model(graph="ada:reach=0.5", epochs=4, steps_per_epoch=2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model.gossip(optimizer)
    train(world, model, optimizer, 10)
    assert model.schedule.changes[0].graph == "complete"
    assert len(model.schedule.changes) > 1


@on_workers(2, 3, 4)
def test_ada_that_decides_by_itself_decides_as_in_one_process(world):
    steps, n = 60, world.size
    generator = torch.Generator().manual_seed(3)
    data = torch.randn(64, 6, generator=generator).double(), torch.randint(3, (64,), generator=generator)

    def toy():  # without biases: they would lie elsewhere in a row, and what is rounded up depends on the place
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 5, bias=False), nn.Tanh(), nn.Linear(5, 3, bias=False)).double()

    task = Task("toy", toy, data, data)
    for order in ("awc", "atc"):
        rate = gossamer.LearningRate(0.1, shape=gossamer.WarmupCosine())
        epochs = math.ceil(steps / (64 // (4 * n)))
        settings = Settings(
            n, epochs, 4, algorithm=f"dsgd-{order}", optimizer=Recipe("sgd", **SGD_RECIPE), learning_rate=rate, backend="loop"
        )
        eager = "ada-auto:tolerance=0.65"  # changes its mind in few steps
        trainer = Trainer(task, settings, eager)
        model = world.model(toy(), eager, order=order)
        optimizer = torch.optim.SGD(model.parameters(), **SGD)
        model.gossip(optimizer)
        for step in range(steps):
            x, y = trainer.batches.batch(step, world.rank, 1)
            optimizer.param_groups[0]["lr"] = trainer.learning_rate.at(step, trainer.steps, n)
            optimizer.zero_grad()
            loss_of(model, (x[0], y[0])).backward()
            optimizer.step()
        trainer.run(until=steps)
        views = trainer.replicas.blocks[0].tensors(trainer.replicas.blocks[0].x)
        for name, p in model.named_parameters():
            close(p, views[name][world.rank], 1e-10)
        assert [(c.step, c.graph) for c in model.schedule.changes] == [(c.step, c.graph) for c in trainer.schedule.changes]
        assert len(model.schedule.changes) > 2
    with pytest.raises(GossamerError, match="local_steps=4: 'ada-auto' decides by itself"):
        world.model(graph="ada-auto", local_steps=4)


def rare(model):
    """ada-auto, as it is late in a training: with averages in every second step."""
    ada = model.schedule
    ada.level, ada.until = 1, 10**9
    assert ada.levels[1].every == 2
    return model


@on_workers(2, 3)
def test_what_a_person_does_to_parameters_does_not_become_momentum(world):
    for order in ("awc", "atc"):
        model = rare(world.model(graph="ada-auto", order=order))
        optimizer = torch.optim.SGD(model.parameters(), **SGD)
        model.gossip(optimizer)

        def still(model=model, optimizer=optimizer):
            """A step without a gradient."""
            model(world.batch(0)[0])
            for p in model.parameters():
                p.grad = torch.zeros_like(p)
            optimizer.step()

        for _ in range(4):
            still()
        with model.consensus():
            pass
        assert not model._flat.touched  # evaluation is no jump
        with torch.no_grad():
            for p in model.parameters():
                p.add_(1.0)
        there = flat(model).clone()
        assert model._flat.touched
        for _ in range(8):
            still()
        close(flat(model), there, 0.05)  # 1 % of the jump, once; as momentum it would go on for 5 times as far
        nn.utils.vector_to_parameters(there - 1.0, model.parameters())  # gives them other memory
        for _ in range(8):
            still()
        close(flat(model), there - 1.0, 0.05)


@on_workers(2)
def test_nor_does_it_if_a_scaler_skips_the_step_that_follows(world):
    for order in ("awc", "atc"):
        model = rare(world.model(graph="ada-auto", order=order))
        optimizer = torch.optim.SGD(model.parameters(), **SGD)
        scaler = torch.amp.GradScaler("cpu", init_scale=1.0, growth_interval=100)
        model.gossip(optimizer, scaler=scaler)

        def step(value, model=model, optimizer=optimizer, scaler=scaler):
            loss = model(world.batch(0)[0]).sum()
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            for p in model.parameters():
                p.grad = torch.full_like(p, value)
            scaler.step(optimizer)
            scaler.update()

        for _ in range(4):
            step(0.0)
        with torch.no_grad():
            for p in model.parameters():
                p.add_(1.0)
        there = flat(model).clone()
        step(math.inf)
        for _ in range(7):
            step(0.0)
        close(flat(model), there, 0.05)


@on_workers(2, 3)
def test_good_parameters_can_be_loaded_after_bad_ones(world):
    """With means in 8 bits as with others."""
    for order in ("awc", "atc"):
        model = world.model(graph="ada-auto", order=order, check_finite=False)
        optimizer = torch.optim.SGD(model.parameters(), **SGD)
        model.gossip(optimizer)
        train(world, model, optimizer, 5)
        good = {key: value.clone() for key, value in model.state_dict().items()}
        kept = copy.deepcopy(optimizer.state_dict())
        with torch.no_grad():
            for p in model.parameters():
                p.fill_(math.nan if world.rank == 0 else 1.0)
        train(world, model, optimizer, 3, start=5)
        assert not flat(model).isfinite().any()
        model.load_state_dict(good)
        optimizer.load_state_dict(kept)
        train(world, model, optimizer, 4, start=8)
        assert flat(model).isfinite().all()


@on_workers(2, 3)
def test_ada_that_decides_by_itself_alone_for_a_while(world):
    """The last one of a stretch has no other to average with; afterwards all see the same again."""
    model = world.model(graph="ada-auto:tolerance=0.65")
    optimizer = torch.optim.SGD(model.parameters(), **SGD)
    model.gossip(optimizer)
    for _ in range(2):
        with model.uneven():
            train(world, model, optimizer, 14 if world.rank == world.size - 1 else 3, start=model.steps)
        train(world, model, optimizer, 16, start=model.steps)
    assert len(set(world.gather_objects((model.steps, model.schedule.level, model.schedule.patience)))) == 1
    model.schedule.patience += 10 * world.rank  # as if some had seen what others have not
    train(world, model, optimizer, 6, start=model.steps)
    assert len(set(world.gather_objects(model.schedule.patience))) == 1


@on_workers(1, 2)
def test_momentum_that_can_not_be_shared_is_refused_at_once_and_what_is_none_is_left_alone(world):
    model = world.model(graph="ada-auto")
    with pytest.raises(GossamerError, match="dampening=0.5 would make too small"):
        model.gossip(torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, dampening=0.5))
    weights = [p for p in model.parameters() if p.ndim == 2]
    optimizer = torch.optim.Muon(weights, lr=0.1, momentum=0.9)
    for p in weights:
        p.grad = torch.ones_like(p)
    optimizer.step()
    before = [optimizer.state[p]["momentum_buffer"].clone() for p in weights]
    momentum.share(optimizer, torch.zeros_like)
    assert all(torch.equal(optimizer.state[p]["momentum_buffer"], kept) for p, kept in zip(weights, before, strict=True))


@on_workers(2, 3)
def test_with_adam_gradients_are_averaged_in_8_bits(world):
    """Each worker's own moments would make each one's step too large and their mean too small."""
    model = world.model(graph="ada-auto")
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    model.gossip(optimizer)
    assert model.method.describe() == "all-reduce:wire=8bits,feedback=true"
    assert model.averages_gradients
    train(world, model, optimizer, 4)
    model.save(world.folder)
    train(world, model, optimizer, 4, 4)
    assert world.same(flat(model))
    assert "AdamW: gradients of all in each step" in model.schedule.changes[0].reason
    other = world.model(graph="ada-auto")
    again = torch.optim.AdamW(other.parameters(), 0.01)
    other.gossip(again)
    assert other.load(world.folder)
    train(world, other, again, 4, 4)
    assert torch.equal(flat(other), flat(model))
    chosen = world.model(graph="ada-auto", method="awc")
    chosen.gossip(torch.optim.AdamW(chosen.parameters(), 0.01))
    assert chosen.order == "awc"
