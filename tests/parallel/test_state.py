"""Copies, compiled modules, ``state_dict()``."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from gossamer import GossamerError
from tests.pool import on_workers
from tests.world import close, flat, loss_of, small, train


@on_workers(1, 2)
def test_a_deep_copy_is_a_model_of_its_own(world):
    model = world.model()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model.gossip(optimizer)
    train(world, model, optimizer, 2)
    twin = copy.deepcopy(model)
    ema = torch.optim.swa_utils.AveragedModel(model)
    x = world.batch(0)[0]
    twin.train()
    assert torch.equal(twin(x), model(x))
    optimizer.step()
    train(world, model, optimizer, 2)
    ema.update_parameters(model)
    assert (flat(twin) != flat(model)).any()
    twin.load_state_dict(model.state_dict())
    assert torch.equal(flat(twin), flat(model))
    assert list(twin.state_dict()) == list(small().state_dict())
    for refused in (lambda: twin.gossip(optimizer), twin.average_, lambda: twin.mean(1.0), twin.average_gradients):
        with pytest.raises(GossamerError, match="copy"):
            refused()
    with pytest.raises(GossamerError, match="copy"), twin.consensus():
        pass


@on_workers(2)
def test_compiled_modules_work_inside_and_outside(world):
    made = []
    for how in ("plain", "inside", "outside", "aot"):
        bare = small()
        inner = {"inside": lambda m: torch.compile(m, backend="eager"), "aot": lambda m: torch.compile(m, backend="aot_eager")}
        model = world.model(inner.get(how, lambda m: m)(bare))
        called = torch.compile(model, backend="eager") if how == "outside" else model
        optimizer = torch.optim.SGD(called.parameters(), 0.1)
        called.gossip(optimizer)
        for step in range(4):
            optimizer.zero_grad()
            loss_of(called, world.batch(step)).backward()
            optimizer.step()
            with model.consensus():
                called.eval()
                consensus = called(world.batch(0)[0]).detach()
                close(
                    consensus, F.linear(torch.tanh(F.linear(world.batch(0)[0], *bare[0].parameters())), *bare[2].parameters())
                )
                called.train()
        assert list(model.state_dict()) == list(bare.state_dict()) == list(small().state_dict())
        model.load_state_dict({k: v.clone() for k, v in model.state_dict().items()})
        made.append(torch.cat([flat(model), consensus.flatten()]))
        assert model.steps == 4
    for other in made[1:]:
        close(other, made[0], 1e-6)


@on_workers(2)
def test_state_has_the_bare_modules_keys_also_inside_a_larger_module(world):
    model = world.model(seedless := small())
    assert list(model.state_dict()) == list(small().state_dict()) == [name for name, _ in model.named_parameters()]
    other = small(seed=9)
    seedless_before = flat(model).clone()
    other.load_state_dict(model.state_dict())
    assert torch.equal(flat(other), seedless_before)
    model.load_state_dict(small(seed=9).state_dict())
    assert torch.equal(flat(seedless), flat(small(seed=9)))
    with pytest.raises(RuntimeError, match="Missing key"):
        model.load_state_dict({})
    whole = nn.ModuleDict({"net": model, "rest": nn.Linear(2, 2)})
    plain = nn.ModuleDict({"net": small(), "rest": nn.Linear(2, 2)})
    assert list(whole.state_dict()) == list(plain.state_dict())
    whole.load_state_dict(plain.state_dict())
    assert torch.equal(flat(model), flat(plain["net"]))
    with pytest.raises(RuntimeError, match="Unexpected"):
        whole.load_state_dict({**plain.state_dict(), "net.other": torch.zeros(1)})
