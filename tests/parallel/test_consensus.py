"""Means of parameters, buffers and other tensors: ``consensus()``, ``average_()``, ``mean()``."""

import contextlib

import pytest
import torch
from torch import nn

import gossamer
from gossamer import GossamerError
from tests.pool import on_workers
from tests.world import close, flat, in_flight, loss_of, norm, small, train


@on_workers(1, 2, 3)
def test_consensus_is_the_mean_of_parameters_and_buffers_and_is_restored(world):
    model = world.model(norm(), graph="one-peer-exponential")
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model.gossip(optimizer)
    train(world, model, optimizer, 3)
    own = {name: t.clone() for name, t in model.state_dict().items()}
    means = {name: world.gather(t.double()).mean(0) for name, t in own.items()}
    pointers = [p.data_ptr() for p in model.parameters()]
    with model.consensus() as same:
        assert same is model
        for name, t in model.state_dict().items():
            if t.is_floating_point():
                close(t, means[name], 1e-6)
            differs = world.gather((own[name] != t).any().int())  # one worker's own may be the mean, by chance
            alike = world.same(own[name])
            assert world.size == 1 or "num_batches" in name or differs.any() or alike, name
        with torch.no_grad():
            model.train()
            model(world.batch(9)[0])  # changes the averaged statistics only
            model.eval()
        with pytest.raises(GossamerError, match="inside consensus"):
            optimizer.step()
        with pytest.raises(GossamerError, match="consensus\\(\\) inside"), model.consensus():
            pass
    model.train()
    for name, t in model.state_dict().items():
        assert torch.equal(t, own[name]), name
    assert [p.data_ptr() for p in model.parameters()] == pointers
    assert model.steps == 3
    with contextlib.suppress(ValueError), model.consensus():
        raise ValueError
    assert all(torch.equal(t, own[name]) for name, t in model.state_dict().items())
    train(world, model, optimizer, 2, start=3)
    assert model.steps == 5


@on_workers(2)
def test_batch_norm_statistics_are_estimated_anew(world):
    model = world.model(norm(), graph="one-peer-exponential")
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model.gossip(optimizer)
    train(world, model, optimizer, 3)
    own = model.module.norm.running_mean.clone()
    batches = [world.batch(50 + k)[0] for k in range(3)]
    with model.consensus(reestimate=batches):
        inner = torch.stack([model.module.inner(b).mean(0) for b in batches]).mean(0).detach()
        close(model.module.norm.running_mean, world.gather(inner).mean(0), 1e-6)
        assert model.training
    assert torch.equal(model.module.norm.running_mean, own)


class Remembering(nn.Module):
    """Keeps its last output, which no other worker has."""

    local_buffers = frozenset({"last"})

    def __init__(self):
        super().__init__()
        self.inner, self.norm = nn.Linear(6, 3), nn.BatchNorm1d(3)
        self.register_buffer("last", torch.zeros(4, 3))

    def forward(self, x):
        y = self.norm(self.inner(x)) + 0.1 * self.last.clone()
        if self.training:
            self.last.copy_(y.detach())
        return y


@on_workers(2)
def test_local_buffers_stay_each_workers_own(world):
    torch.manual_seed(0)
    model = world.model(Remembering(), graph="one-peer-exponential")
    optimizer = gossamer.AccumAdam(model.parameters(), 0.1)
    model.gossip(optimizer)
    train(world, model, optimizer, 3)
    own = model.module.last.clone()
    assert not world.same(own)
    mean = world.gather(model.module.norm.running_mean).mean(0)
    with model.consensus():
        assert torch.equal(model.module.last, own)
        close(model.module.norm.running_mean, mean)
    with model.consensus(reestimate=[world.batch(50)[0]]):  # runs it in training mode, which must not reach what is kept
        assert not torch.equal(model.module.last, own)
    assert torch.equal(model.module.last, own)
    model.average_()
    assert torch.equal(model.module.last, own)
    assert world.same(model.module.norm.running_mean)


@on_workers(2)
def test_average_is_for_good(world):
    model = world.model(norm(), graph="one-peer-exponential")
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model.gossip(optimizer)
    train(world, model, optimizer, 3)
    means = {name: world.gather(t.double()).mean(0) for name, t in model.state_dict().items()}
    model.average_()
    for name, t in model.state_dict().items():
        if t.is_floating_point():
            close(t, means[name], 1e-6)
    bare = norm()
    bare.load_state_dict(model.state_dict())
    x = world.batch(7)[0]
    model.eval()
    assert torch.equal(model(x), bare.eval()(x))


@on_workers(2, 3)
def test_the_mean_of_a_tensor_may_be_taken_while_rows_are_on_their_way(world):
    for graph in ("one-peer-exponential", "complete"):
        model = world.model(graph=graph)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        model.gossip(optimizer)
        for step in range(3):
            optimizer.zero_grad()
            loss = loss_of(model, world.batch(step))
            loss.backward()
            assert in_flight(model)
            close(model.mean(loss), world.gather(loss.detach()).mean(), 1e-6)
            assert model.mean(float(world.rank)) == (world.size - 1) / 2
            with model.consensus():
                assert world.same(flat(model))
            optimizer.step()
        assert model.mean(torch.ones(2, 3)).shape == (2, 3)
        with pytest.raises(GossamerError, match="int64"):
            model.mean(torch.tensor(3))


@on_workers(2)
def test_evaluation_may_be_in_inference_mode(world):
    for graph in ("one-peer-exponential", "ada-auto"):
        model = world.model(graph=graph, init="keep", module=small(seed=world.rank))
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        model.gossip(optimizer)
        train(world, model, optimizer, 3)
        before = flat(model).clone()
        with torch.inference_mode():
            assert model.mean(float(world.rank)) == 0.5
            score = model.mean(loss_of(model.eval(), world.batch(0)))
            assert world.same(score.clone().reshape(1))
            with model.consensus():
                assert world.same(model(world.batch(0, rank=0)[0]).clone())
        assert torch.equal(flat(model), before)
        with torch.inference_mode():
            model.save(world.folder / f"inference-{graph}")
        train(world, model.train(), optimizer, 2, start=3)
        with torch.inference_mode():
            assert model.load(world.folder / f"inference-{graph}")
        assert torch.equal(flat(model), before)
        train(world, model, optimizer, 2, start=3)
        with torch.inference_mode():
            model.average_()
        assert world.same(flat(model))


@on_workers(3)
def test_consensus_that_one_rank_enters_alone_ends_in_an_error_on_all(world):
    model = world.model(timeout=5)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model.gossip(optimizer)
    train(world, model, optimizer, 2)

    def go():
        if world.rank == 1:
            with model.consensus():
                pass
        train(world, model, optimizer, 3, start=2)

    with pytest.raises(GossamerError, match=f"rank {world.rank} lost rank [012] (at step 2|in consensus)"):
        go()
