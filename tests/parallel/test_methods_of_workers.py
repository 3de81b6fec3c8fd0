"""Every method in the library: as in the Trainer, with its state in checkpoints, and what it refuses."""

import pytest
import torch

from gossamer import GossamerError, Recipe, Settings, Trainer
from gossamer.data.tasks import Task
from gossamer.methods import METHODS, method
from tests.pool import on_workers
from tests.world import flat, gan, loss_of, small, train

LR, MOMENTUM, STEPS = 0.1, 0.9, 12


@on_workers(4)
@pytest.mark.parametrize("name", [*sorted(METHODS.makers), "atc in bfloat16", "push-sum in bfloat16"])
def test_the_library_and_the_trainer_give_the_same_parameters(world, name):
    generator = torch.Generator().manual_seed(3)
    data = torch.randn(64, 6, generator=generator).double(), torch.randint(3, (64,), generator=generator)
    task = Task("toy", lambda: small(torch.float64), data, data)
    name, _, wire = name.partition(" in ")
    rule = method(name)
    momentum = {"momentum": MOMENTUM} if rule.optimizer == "any" else {}
    graph = "ring" if rule.static else "directed-random" if rule.sums == "columns" else "one-peer-exponential"
    # In 8 bits, 64 numbers that lie together share an exponent, and biases lie elsewhere in a Trainer's row.
    text, wire = f"{name}:wire=bfloat16" if getattr(rule, "wire", "") == "8bits" else name, wire or "float32"
    recipe = Recipe("adam", 0.01) if rule.optimizer == "Adam" else Recipe("sgd", LR, momentum)
    settings = Settings(4, 4, 4, algorithm=text, optimizer=recipe, backend="loop", wire=wire)
    trainer = Trainer(task, settings, graph)
    model = world.model(small(torch.float64), graph, method=text, wire=wire)
    adam = rule.optimizer == "Adam"
    optimizer = torch.optim.Adam(model.parameters(), 0.01) if adam else torch.optim.SGD(model.parameters(), LR, **momentum)
    model.gossip(optimizer)
    for step in range(STEPS):
        x, y = trainer.batches.batch(step, world.rank, 1)
        optimizer.zero_grad()
        loss_of(model, (x[0], y[0])).backward()
        optimizer.step()
    trainer.run(until=STEPS)
    views = trainer.replicas.blocks[0].tensors(trainer.replicas.blocks[0].x)
    for parameter, p in model.named_parameters():
        difference = float((p.detach() - views[parameter][world.rank]).abs().max())
        assert difference <= 1e-10, f"{parameter}: differ by {difference}"


@on_workers(2)
def test_several_optimizers_are_refused_by_a_method_that_changes_gradients(world):
    model = world.model(gan(), "ring", method="qgm")
    optimizers = [torch.optim.SGD(part.parameters(), 0.1) for part in (model.critic, model.generator)]
    model.gossip(*optimizers)
    loss_of(model, world.batch(0)).backward()
    optimizers[0].step()
    with pytest.raises(
        GossamerError, match="method 'qgm' changes the gradients of a whole step.*give gossip\\(\\) one optimizer"
    ):
        optimizers[1].step()


@on_workers(2)
def test_a_methods_own_state_is_in_the_checkpoint(world):
    for name in ("qgm", "tracking", "push-sum", "choco"):
        made = []
        for resumed in (False, True):
            model = world.model(small(torch.float64), "ring", method=name)
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
            model.gossip(optimizer)
            if resumed:
                assert model.load(world.folder / name)
            train(world, model, optimizer, 6 - model.steps, model.steps)
            if not resumed:
                made.append(flat(model))
                model = world.model(small(torch.float64), "ring", method=name)
                optimizer = torch.optim.SGD(model.parameters(), 0.1)
                model.gossip(optimizer)
                train(world, model, optimizer, 3)
                model.save(world.folder / name)
        assert torch.equal(made[0], flat(model)), name
        other = world.model(small(torch.float64), "ring", method="atc")
        other.gossip(torch.optim.SGD(other.parameters(), 0.1))
        with pytest.raises(GossamerError, match="methods/|order"):
            other.load(world.folder / name)


@on_workers(2)
def test_parameters_that_are_trained_later_get_a_state_too(world):
    model = world.model(small(torch.float64), "ring", method="qgm")
    model.module[2].requires_grad_(False)
    model = world.model(model.module, "ring", method="qgm")
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model.gossip(optimizer)
    train(world, model, optimizer, 2)
    model.module[2].requires_grad_(True)
    before = model.module[2].weight.clone()
    train(world, model, optimizer, 3, 2)
    assert (model.module[2].weight != before).any()
    rows = world.rows(model)  # two workers: a ring is the mean, up to rounding
    assert float((rows[0] - rows[1]).abs().max()) < 1e-12
    assert float((model.module[2].weight - before).abs().max()) < 1  # as far as three steps go


@on_workers(2)
def test_gradients_of_parameters_that_are_trained_later_are_averaged_at_once(world):
    module = small(torch.float64)
    module[2].requires_grad_(False)
    model = world.model(module, "all-reduce")
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model.gossip(optimizer)
    train(world, model, optimizer, 2)
    module[2].requires_grad_(True)
    train(world, model, optimizer, 1, 2)
    assert world.same(flat(model))


@on_workers(2)
def test_a_fused_optimizer_under_a_scaler_is_refused_by_a_method_that_changes_gradients(world):
    model = world.model(small(), "ring", method="qgm")
    optimizer = torch.optim.SGD(model.parameters(), 0.1, fused=True)
    scaler = torch.amp.GradScaler("cpu")
    model.gossip(optimizer, scaler=scaler)
    scaler.scale(loss_of(model, world.batch(0))).backward()
    with pytest.raises(GossamerError, match="fused=False"):
        scaler.step(optimizer)


@on_workers(2)
def test_what_a_backward_inside_consensus_adds_is_averaged_too(world):
    model = world.model(small(), "all-reduce")
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model.gossip(optimizer)
    loss_of(model, world.batch(0)).backward()
    with model.consensus():
        loss_of(model, world.batch(1)).backward()
    optimizer.step()
    assert world.same(flat(model))
