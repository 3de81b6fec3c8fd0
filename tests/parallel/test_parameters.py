"""Parameters of all kinds."""

import copy

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import nn

import gossamer
from tests.pool import on_workers
from tests.world import close, flat, loss_of, small, train


class Kinds(nn.Module):
    """Tied, frozen and half-precision parameters, channels_last, buffers of several dtypes."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 3, padding=1).to(memory_format=torch.channels_last)
        self.norm = nn.BatchNorm2d(4)
        self.first = nn.Linear(16, 16, bias=False)
        self.second = nn.Linear(16, 16, bias=False)
        self.second.weight = self.first.weight
        self.rough = nn.Linear(16, 16).to(torch.bfloat16)
        self.fine = nn.Linear(16, 3).double()
        self.frozen = nn.Linear(3, 3)
        self.frozen.requires_grad_(False)
        self.scalar = nn.Parameter(torch.tensor(1.0))
        self.unused = nn.Parameter(torch.randn(3))
        self.register_buffer("mask", torch.rand(5) > 0.5)
        self.register_buffer("table", torch.randint(100, (3, 2)))
        self.register_buffer("spread", torch.randn(1).expand(4))
        self.register_buffer("nothing", None)
        self.register_buffer("empty", torch.zeros(0))
        self.register_buffer("phases", torch.randn(2, dtype=torch.complex64))

    def forward(self, x):
        x = self.norm(self.conv(x.to(memory_format=torch.channels_last))).mean((2, 3)).repeat(1, 4) * self.scalar
        x = self.rough(torch.tanh(self.second(self.first(x))).bfloat16())
        return self.frozen(self.fine(x.double()).float())


def kinds(seed=0):
    torch.manual_seed(seed)
    return Kinds()


def image(world, step):
    generator = torch.Generator().manual_seed(1000 * step + world.rank)
    return torch.randn(4, 2, 5, 5, generator=generator), torch.randint(3, (4,), generator=generator)


@on_workers(1, 2, 3)
def test_at_the_start_all_workers_get_rank_0s_values(world):
    bare = kinds(seed=world.rank)
    kept = copy.deepcopy(bare).state_dict()
    model = world.model(bare)
    expected = kinds(seed=0).state_dict()
    state = model.state_dict()
    assert list(state) == list(expected)
    for name, value in expected.items():
        assert torch.equal(state[name], value), name
    assert bare.conv.weight.is_contiguous(memory_format=torch.channels_last)
    assert bare.second.weight is bare.first.weight
    other = world.model(kinds(seed=world.rank), init="keep")
    for name, value in kept.items():
        assert torch.equal(other.state_dict()[name], value), name


@on_workers(2, 3)
def test_parameters_of_all_kinds_are_averaged(world):
    for order in ("awc", "atc"):
        model = world.model(kinds(), order=order)
        optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
        model.gossip(optimizer)
        frozen = model.module.frozen.weight.detach().clone()
        for step in range(6):
            if step == 3:
                model.module.frozen.requires_grad_(True)  # late
                model.module.scalar.requires_grad_(False)
            optimizer.zero_grad()
            x, y = image(world, step)
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            if step == 2:
                assert torch.equal(model.module.frozen.weight, frozen)
        assert (model.module.frozen.weight != frozen).any()
        assert model.module.second.weight is model.module.first.weight
        model.average_()
        for name, p in model.named_parameters():
            assert torch.isfinite(p).all(), name
            assert world.same(p.detach().contiguous().double()), name
        assert model.module.conv.weight.is_contiguous(memory_format=torch.channels_last)


@on_workers(2, 3)
def test_a_frozen_parameter_that_is_trained_later_is_averaged_from_then_on(world):
    for order in ("awc", "atc"):
        module = small(torch.float64)
        module[0].requires_grad_(False)
        model = world.model(module, order=order)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        model.gossip(optimizer)
        train(world, model, optimizer, 2)
        module[0].requires_grad_(True)
        train(world, model, optimizer, 2, start=2)
        rows = world.gather(module[0].weight.detach())
        bare = [copy.deepcopy(small(torch.float64)) for _ in range(world.size)]
        for step in range(4):  # a ring of 2 or 3 is the mean
            before = torch.stack([flat(m) for m in bare]).mean(0)
            for rank, m in enumerate(bare):
                start = flat(m).clone()
                loss_of(m, world.batch(step, rank, torch.float64)).backward()
                with torch.no_grad():
                    for p in m.parameters() if step >= 2 else m[2].parameters():
                        p.sub_(p.grad, alpha=0.1)
                    m.zero_grad()
                    if order == "awc":
                        nn.utils.vector_to_parameters(flat(m) - start + before, m.parameters())
            if order == "atc":
                mean = torch.stack([flat(m) for m in bare]).mean(0)
                for m in bare:
                    nn.utils.vector_to_parameters(mean.clone(), m.parameters())
        close(rows, torch.stack([m[0].weight.detach() for m in bare]), 1e-9)


@on_workers(2)
def test_parameters_without_a_gradient_are_averaged_all_the_same(world):
    model = world.model(small(seed=world.rank), init="keep", order="awc")
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model.gossip(optimizer)
    means = world.rows(model).mean(0)
    if world.rank == 0:
        loss_of(model, world.batch(0)).backward()
        model.module[0].weight.grad = None
    optimizer.step()  # rank 1: no forward, no gradient
    close(model.module[0].weight.detach().flatten(), means[:30], 1e-6)
    assert model.steps == 1


@on_workers(2)
@pytest.mark.parametrize("method", ["d2", "gut:mu=0.1,beta=0.5", "choco", "tracking", "push-sum"])
def test_a_methods_state_does_not_spoil_parameters_that_are_trained_later(world, method):
    """With next to no learning rate they stay what they were."""
    module = small(torch.float64)
    module[0].requires_grad_(False)
    model = world.model(module, "ring", method=method)
    optimizer = torch.optim.SGD(model.parameters(), 1e-9)
    model.gossip(optimizer)
    before = module[0].weight.detach().clone()
    train(world, model, optimizer, 3)
    module[0].requires_grad_(True)
    train(world, model, optimizer, 3, start=3)
    close(module[0].weight.detach(), before, 1e-3)  # CHOCO rounds


@on_workers(2)
def test_a_mean_counts_what_was_unfrozen_since_the_last_step(world):
    for gossips in (True, False):
        for what in ("average_", "consensus", "save"):
            module = small()
            module[0].requires_grad_(False)
            model = world.model(module, order="atc")
            if gossips:
                model.gossip(torch.optim.SGD(model.parameters(), 0.1))
            module.requires_grad_(True)
            with torch.no_grad():
                module[0].weight.fill_(float(world.rank))
            if what == "consensus":
                with model.consensus():
                    assert (module[0].weight == 0.5).all()
                assert (module[0].weight == world.rank).all()
            elif what == "average_":
                model.average_()
                assert (module[0].weight == 0.5).all()
            else:
                model.save(world.folder / str(gossips))
                saved = load_file(world.folder / str(gossips) / "averaged.safetensors")
                assert (saved["0.weight"] == 0.5).all()


class Rooted(nn.Module):
    """Parameters and buffers of its own, beside its parts."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6))
        self.place = nn.Parameter(torch.zeros(6))
        self.register_buffer("table", torch.zeros(6), persistent=False)

    def forward(self, x):
        return self.body(x + self.place + self.table)


@on_workers(1, 2)
@pytest.mark.parametrize("compiled", [False, True])
def test_names_of_parameters_and_of_modules_agree(world, compiled):
    """Code that makes parameter groups joins the two, or walks children; all of it sees the bare module's names."""
    bare = Rooted()
    model = world.model(torch.compile(bare, backend="eager") if compiled else bare)

    def walked(module):
        below = [f"{name}.{rest}" for name, child in module.named_children() for rest in walked(child)]
        return below + list(module._parameters)

    names = [name for name, _ in bare.named_parameters()]
    assert [name for name, _ in model.named_parameters()] == names
    assert sorted(walked(model)) == sorted(names)
    joined = {
        f"{where}.{name}" if where else name
        for where, m in model.named_modules()
        for name, _ in m.named_parameters(recurse=False)
    }
    assert joined == set(names)
    assert {name for name, _ in model.named_modules()} == {name for name, _ in bare.named_modules()}
    assert set(model.modules()) == {model, *bare.modules()}
    outer = nn.Sequential(model)
    assert list(dict(outer.named_parameters())) == [f"0.{name}" for name in names]
    assert list(outer.state_dict()) == [f"0.{name}" for name in names]
    outer.load_state_dict({key: torch.full_like(value, 2.0) for key, value in outer.state_dict().items()})
    assert (flat(model) == 2.0).all()
    with pytest.raises(RuntimeError, match="Missing key.*body.0.bias"):
        outer.load_state_dict({key: value for key, value in outer.state_dict().items() if not key.endswith("0.bias")})
    model.eval()
    assert not any(m.training for m in bare.modules())
    seen = []
    model.apply(seen.append)
    assert {*bare.modules(), model} <= set(seen)
    optimizer = torch.optim.SGD(gossamer.decay_groups(model, 0.1), 0.1)
    assert [len(group["params"]) for group in optimizer.param_groups] == [1, 4]
