"""torch's optimizers, one or several, with their ways to be called."""

import pytest
import torch
from torch import nn

import gossamer
from gossamer import GossamerError
from tests.pool import on_workers
from tests.world import close, flat, gan, loss_of, small, train

OPTIMIZERS = (
    "SGD",
    "Adam",
    "AdamW",
    "NAdam",
    "RAdam",
    "RMSprop",
    "Adagrad",
    "Adadelta",
    "Adamax",
    "ASGD",
    "Rprop",
    "Adafactor",
    "AccumAdam",
    "AccumAdamW",
)


@pytest.mark.parametrize("name", OPTIMIZERS)
@on_workers(2)
def test_every_elementwise_optimizer_of_torch_works(world, name):
    model = world.model()
    kind = getattr(gossamer if name.startswith("Accum") else torch.optim, name)
    optimizer = kind(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.02, total_steps=20, cycle_momentum=False)
    model.gossip(optimizer)
    for step in range(3):
        train(world, model, optimizer, 1, step)
        scheduler.step()
    rows = world.rows(model)
    assert torch.isfinite(rows).all()
    assert (rows[0] != rows[1]).any()
    assert (rows[0] - rows[1]).abs().max() < 0.5
    assert model.steps == 3


@on_workers(2)
def test_decentralized_adam_mixes_parameters_and_keeps_moments(world):
    """x <- W x - update(own gradient at the unmixed x), for each worker, here by hand for both of them."""
    for kind, options in ((torch.optim.AdamW, {"betas": (0.974, 0.999)}), (gossamer.AccumAdamW, {"accum_iter": 3})):
        model = world.model(graph="alternating-exponential-ring")  # two workers of one host: the mean
        optimizer = kind(gossamer.decay_groups(model, 0.1), lr=0.01, **options)
        model.gossip(optimizer)
        both = [small(), small()]
        optimizers = [kind(gossamer.decay_groups(m, 0.1), lr=0.01, **options) for m in both]
        for step in range(7):
            train(world, model, optimizer, 1, step)
            for rank, (m, o) in enumerate(zip(both, optimizers, strict=True)):
                o.zero_grad()
                loss_of(m, world.batch(step, rank)).backward()
            with torch.no_grad():
                for pair in zip(*(m.parameters() for m in both), strict=True):
                    mean = torch.stack(pair).mean(0)
                    for p in pair:
                        p.copy_(mean)
            for o in optimizers:
                o.step()
        close(world.rows(model), torch.stack([flat(m) for m in both]), 1e-6)
        assert (flat(both[0]) != flat(both[1])).any()


@on_workers(2, 3)
def test_accumulated_gradients_count_as_one_step(world):
    for local_steps in (1, 2):
        seen = []
        model = world.model(local_steps=local_steps)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        model.gossip(optimizer, profile_every=1, on_profile=seen.append)
        for step in range(4):
            optimizer.zero_grad()
            for part in range(1 + world.rank):  # not even the same number everywhere
                (loss_of(model, world.batch(10 * step + part)) / (1 + world.rank)).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        assert model.steps == 4
        assert [p.step for p in seen] == [0, 1, 2, 3]
        assert all(p.norms.shape == (world.size, 4) for p in seen)


@on_workers(2)
def test_two_backwards_are_one_of_the_sum(world):
    made = []
    for halves in (True, False):
        model = world.model(graph="one-peer-exponential")
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        model.gossip(optimizer)
        for step in range(5):
            optimizer.zero_grad()
            x, y = world.batch(step)
            for part in (slice(0, 2), slice(2, 4)) if halves else (slice(0, 4),):
                (loss_of(model, (x[part], y[part])) * (0.5 if halves else 1)).backward()
            optimizer.step()
        made.append(flat(model))
    close(*made, 1e-6)


@on_workers(2, 3)
def test_several_optimizers_average_once_in_the_last_ones_step(world):
    for order in ("awc", "atc"):
        model = world.model(gan(), order=order)
        first = torch.optim.SGD(model.critic.parameters(), 0.1)
        last = torch.optim.SGD(model.generator.parameters(), 0.1)
        model.gossip(first, last)
        bare = [gan() for _ in range(world.size)]
        for step in range(4):
            for o in (first, last):
                o.zero_grad()
                loss_of(model, world.batch(step)).backward()
                o.step()
            # By hand: n is 2 or 3, where a ring is the mean.
            old = torch.stack([flat(m) for m in bare]).mean(0)
            for rank, m in enumerate(bare):
                start = flat(m).clone()
                loss_of(m, world.batch(step, rank)).backward()
                with torch.no_grad():
                    for p in m.critic.parameters():
                        p.sub_(p.grad, alpha=0.1)
                m.zero_grad()
                loss_of(m, world.batch(step, rank)).backward()
                with torch.no_grad():
                    for p in m.generator.parameters():
                        p.sub_(p.grad, alpha=0.1)
                    m.zero_grad()
                    if order == "awc":
                        nn.utils.vector_to_parameters(flat(m) - start + old, m.parameters())
            if order == "atc":
                mean = torch.stack([flat(m) for m in bare]).mean(0)
                for m in bare:
                    nn.utils.vector_to_parameters(mean.clone(), m.parameters())
        close(flat(model), flat(bare[world.rank]), 1e-5)
        assert model.steps == 4


@on_workers(2)
@pytest.mark.parametrize("graph", ["ring", "all-reduce", "ada-auto"])
def test_a_closure_does_what_the_same_without_it_does(world, graph):
    """As Lightning calls ``step()``. ring: awc, where the closure runs first."""
    ended = []
    for closed in (False, True):
        model = world.model(graph=graph)
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        model.gossip(optimizer)
        for step in range(4):

            def closure(model=model, optimizer=optimizer, step=step):
                optimizer.zero_grad()
                loss = loss_of(model, world.batch(step))
                loss.backward()
                return loss

            if closed and step == 2:
                before = closure()
                assert optimizer.step(lambda before=before: before) is before  # it evaluates nothing
            elif closed:
                assert optimizer.step(closure).item() > 0
            else:
                closure()
                optimizer.step()
        assert model.steps == 4
        ended.append(flat(model))
    close(*ended, 0.0)


@on_workers(2)
def test_an_optimizer_that_evaluates_the_loss_often_is_ddps_or_is_refused(world):
    ours, theirs = world.model(graph="all-reduce"), nn.parallel.DistributedDataParallel(small())
    early = world.model(graph="ring")
    optimizers = [torch.optim.LBFGS(m.parameters(), lr=0.1, max_iter=3) for m in (ours, theirs, early)]
    ours.gossip(optimizers[0])
    early.gossip(optimizers[2])

    def closure(model, optimizer):
        optimizer.zero_grad()
        loss = loss_of(model, world.batch(0))
        loss.backward()
        return loss

    for _ in range(3):
        for model, optimizer in zip((ours, theirs), optimizers, strict=False):
            optimizer.step(lambda m=model, o=optimizer: closure(m, o))
    close(flat(ours), flat(theirs), 1e-5)
    assert world.same(flat(ours))
    with pytest.raises(GossamerError, match=r"LBFGS.step\(closure\) asks for the loss after .*'awc'.*graph='all-reduce'"):
        optimizers[2].step(closure=lambda: closure(early, optimizers[2]))
    mixed = world.model(graph="ring", order="atc")
    optimizer = torch.optim.LBFGS(mixed.parameters(), lr=0.1, max_iter=3)
    mixed.gossip(optimizer)
    optimizer.step(lambda: closure(mixed, optimizer))
    rows = world.rows(mixed)
    close(rows[0], rows[1])  # n=2: a ring is the mean


@on_workers(2)
def test_an_optimizer_inside_another_object_is_found(world):
    """accelerate's subclass of Optimizer sets up nothing of it; Lightning's is no subclass."""

    class Prepared(torch.optim.Optimizer):
        def __init__(self, optimizer):
            self.optimizer = optimizer
            self.step = optimizer.step

    class Light:
        def __init__(self, optimizer):
            self.optimizer = optimizer

    model = world.model(init="keep", module=small(seed=world.rank), order="atc")
    inner = torch.optim.SGD(model.parameters(), 0.1)
    prepared = Prepared(inner)
    model.gossip(prepared)
    loss_of(model, world.batch(0)).backward()
    prepared.step()
    rows = world.rows(model)
    close(rows[0], rows[1])  # they began apart; n=2: a ring is the mean
    model.gossip(Light(inner))
    with pytest.raises(GossamerError, match="argument 0 is a Adam_"):
        model.gossip(type("Adam_", (), {"optimizer": 3})())
