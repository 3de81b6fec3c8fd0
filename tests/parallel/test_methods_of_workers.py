"""Every method in the library: as in the Trainer, with its state in checkpoints, and what it refuses."""

import pytest
import torch

from gossamer import GossamerError, Recipe, Settings, Trainer
from gossamer.data.tasks import Task
from gossamer.methods import method
from tests.models import OWN_METHODS
from tests.pool import on_workers
from tests.world import close, flat, gan, loss_of, small, train

LR, MOMENTUM, STEPS = 0.1, 0.9, 12
NAMES = [name for name in OWN_METHODS if not method(name).does("merge")]  # a merge is average_() here: see below


OUTER = [
    "diloco:H=3,delay=1",
    "local:H=3,moments=mean",
    "diloco:H=4,delay=2,moments=shared",
    "noloco:H=3,delay=2",
    "slowmo:H=4 in bfloat16",
    "all-reduce in bfloat16",
]


@on_workers(4)
@pytest.mark.parametrize("name", [*NAMES, *OUTER, "atc in bfloat16", "push-sum in bfloat16", "choco over hosts"])
def test_the_library_and_the_trainer_give_the_same_parameters(world, name):
    generator = torch.Generator().manual_seed(3)
    data = torch.randn(64, 6, generator=generator).double(), torch.randint(3, (64,), generator=generator)
    task = Task("toy", lambda: small(torch.float64), data, data)
    (name, _, wire), hosts = name.removesuffix(" over hosts").partition(" in "), name.endswith(" over hosts")
    rule = method(name)
    momentum = {"momentum": MOMENTUM} if rule.optimizer == "any" else {}
    graph = "ring" if rule.static else "directed-random" if rule.sums == "columns" else "one-peer-exponential"
    graph = "one-peer-ring" if name == "decentlam" else "complete" if rule.graphless else graph
    graph = "hierarchical:per_node=2" if hosts else graph
    # In 8 bits, 64 numbers that lie together share an exponent, and biases lie elsewhere in a Trainer's row.
    text, wire = f"{name}:wire=bfloat16" if getattr(rule, "wire", "") == "8bits" else name, wire or "float32"
    adam = rule.optimizer == "Adam" or getattr(rule, "moments", "") == "shared"
    recipe = Recipe("adam", 0.01) if adam else Recipe("sgd", LR, momentum)
    settings = Settings(4, 4, 4, algorithm=text, optimizer=recipe, backend="loop", wire=wire)
    trainer = Trainer(task, settings, graph)
    model = world.model(small(torch.float64), graph, method=text, wire=wire)
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


@on_workers(4)
@pytest.mark.parametrize("name", ["atc", "awc", "qgm"])
def test_a_merge_is_refused_and_what_the_advice_says_gives_the_same_parameters(world, name):
    with pytest.raises(GossamerError, match=f"method '{name} [+] merge'.*leave out merge, and call model.average_\\(\\) after"):
        world.model(small(torch.float64), "ring", method=f"{name} + merge")
    generator = torch.Generator().manual_seed(3)
    data = torch.randn(64, 6, generator=generator).double(), torch.randint(3, (64,), generator=generator)
    settings = Settings(4, 2, 4, algorithm=f"{name} + merge", optimizer=Recipe("sgd", LR), backend="loop")
    trainer = Trainer(Task("toy", lambda: small(torch.float64), data, data), settings, "ring")
    model = world.model(small(torch.float64), "ring", method=name)
    optimizer = torch.optim.SGD(model.parameters(), LR)
    model.gossip(optimizer)
    for step in range(trainer.steps):
        x, y = trainer.batches.batch(step, world.rank, 1)
        optimizer.zero_grad()
        loss_of(model, (x[0], y[0])).backward()
        optimizer.step()
    before = flat(model)
    model.average_()
    trainer.run()
    views = trainer.replicas.blocks[0].tensors(trainer.replicas.blocks[0].x)
    for parameter, p in model.named_parameters():
        assert float((p.detach() - views[parameter][world.rank]).abs().max()) <= 1e-10, parameter
    assert not torch.equal(flat(model), before)


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


@on_workers(4)
@pytest.mark.parametrize("name", ["choco", "d2", "tracking"])
def test_a_resume_at_a_change_of_graph_is_a_change_of_graph(world, name):
    """The graph is complete in the first epoch, and a ring from step 3 on."""
    folder = world.folder / name

    def made():
        model = world.model(small(torch.float64), "ada:k0=3,reach=0.5", method=name, epochs=2, steps_per_epoch=3)
        optimizer = torch.optim.SGD(model.parameters(), LR)
        model.gossip(optimizer)
        return model, optimizer

    for last in (3, 4):
        model, optimizer = made()
        train(world, model, optimizer, last)
        model.save(folder)
        train(world, model, optimizer, 6 - last, last)
        again, optimizer = made()
        assert again.load(folder)
        if last == 3:
            again.save(folder)  # before any step: it is still a checkpoint of step 3
            assert again.load(folder)
        train(world, again, optimizer, 6 - last, last)
        assert torch.equal(flat(again), flat(model)), last


def half(world, name, frozen):
    """A model whose last layer is frozen or not."""
    module = small(torch.float64)
    module[2].requires_grad_(not frozen)
    model = world.model(module, "ring", method=name)
    optimizer = torch.optim.SGD(model.parameters(), LR)
    model.gossip(optimizer)
    return model, optimizer


@on_workers(2)
@pytest.mark.parametrize("name", ["qgm", "choco:wire=bfloat16", "push-sum", "d2", "tracking + control:target=0.1"])
def test_a_run_that_has_unfrozen_parameters_is_resumed(world, name):
    model, optimizer = half(world, name, frozen=True)
    train(world, model, optimizer, 2)
    model.module[2].requires_grad_(True)
    train(world, model, optimizer, 2, 2)
    model.save(world.folder)
    train(world, model, optimizer, 3, 4)
    # As the script of before does: frozen when it was wrapped, not when it is loaded.
    again, optimizer = half(world, name, frozen=True)
    again.module[2].requires_grad_(True)
    assert again.load(world.folder)
    train(world, again, optimizer, 3, 4)
    assert torch.equal(flat(again), flat(model))
    # Never frozen: all parameters are in one row. Codes apart, this is the same.
    again, optimizer = half(world, name, frozen=False)
    assert again.load(world.folder)
    train(world, again, optimizer, 3, 4)
    close(flat(again), flat(model), 1e-9)
    # Still frozen: where would their state go?
    again, _ = half(world, name, frozen=True)
    before = flat(again).clone()
    with pytest.raises(GossamerError, match="parameter '2.weight' was trained there and is frozen here; call requires_grad_"):
        again.load(world.folder)
    assert torch.equal(flat(again), before)


@on_workers(2)
@pytest.mark.parametrize("name", ["qgm", "choco:wire=bfloat16", "d2"])
def test_parameters_that_were_frozen_in_a_checkpoint_begin_anew(world, name):
    """As if they had been unfrozen in that step."""
    model, optimizer = half(world, name, frozen=True)
    train(world, model, optimizer, 3)
    model.save(world.folder)
    model.module[2].requires_grad_(True)
    train(world, model, optimizer, 3, 3)
    again, optimizer = half(world, name, frozen=False)
    assert again.load(world.folder)
    train(world, again, optimizer, 3, 3)
    close(flat(again), flat(model), 1e-9)


@on_workers(2)
def test_control_gives_no_parameter_a_gradient(world):
    model = world.model(small(torch.float64), "ring", method="atc + control:target=0,rounds=1")
    optimizer = torch.optim.SGD(model.parameters(), LR, weight_decay=0.1)
    model.gossip(optimizer)
    before = model.module[0].weight.detach().clone()
    for step in range(3):
        optimizer.zero_grad()
        hidden = world.batch(step, dtype=torch.float64)[0][:, :5]
        model.train()
        model(world.batch(step, dtype=torch.float64)[0])  # a forward of all, of which nothing is trained
        model.module[2](hidden).square().mean().backward()
        optimizer.step()
        assert model.module[0].weight.grad is None
    close(model.module[0].weight, before, 1e-12)  # no decay either


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
