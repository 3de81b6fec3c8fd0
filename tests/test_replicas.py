"""Replicas: all backends compute the same gradients, buffers stay per replica, and what can't work is refused."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from gossamer.data.tasks import cross_entropy
from gossamer.errors import GossamerError
from gossamer.rows.backends import Backend
from gossamer.rows.replicas import Replicas, split
from tests.models import Cnn, Dropout, GroupNormCnn, Lstm, Tied, mlp, task


def batch(r, b=5, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(r, b, 8, 8, generator=generator), torch.randint(0, 10, (r, b), generator=generator)


def plain_gradients(build, replicas, i, x, y):
    """Replica i's gradient by an ordinary module and an ordinary backward pass."""
    module = build()
    with replicas.replica(i) as source:
        module.load_state_dict(source.state_dict())
    loss = F.cross_entropy(module(x), y)
    loss.backward()
    return loss, {name: p.grad for name, p in module.named_parameters()}, dict(module.named_buffers())


BACKENDS = ["loop", "vmap", "vmap:4", "auto", "tape", "tape:4"]
CASES = [(build, backend) for build in (mlp, Cnn, GroupNormCnn, Tied) for backend in BACKENDS]
# torch has no batching rule for an LSTM's forward pass under autograd, so there is no tape; auto leaves it out (see below).
CASES += [(Lstm, backend) for backend in BACKENDS[:4]]


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize(("build", "backend"), CASES)
def test_gradients_equal_ordinary_modules(build, backend):
    replicas = Replicas(build, 6, init="different", seed=1, backend=backend)
    x, y = batch(6)
    expected = [plain_gradients(build, replicas, i, x[i], y[i]) for i in range(6)]
    losses = replicas.gradients(cross_entropy, (x, y))
    block = replicas.blocks[0]
    for i, (loss, grads, buffers) in enumerate(expected):
        torch.testing.assert_close(losses[i], loss.detach(), rtol=1e-5, atol=1e-6)
        for name, stacked in block.tensors(block.grad).items():
            torch.testing.assert_close(stacked[i], grads[name], rtol=1e-5, atol=1e-6)
        for name, stacked in replicas.buffers.items():
            torch.testing.assert_close(stacked[i], buffers[name], rtol=1e-5, atol=1e-6)


def test_loop_is_ordinary_pytorch_bit_for_bit():
    replicas = Replicas(Cnn, 3, init="different", backend="loop")
    x, y = batch(3)
    expected = [plain_gradients(Cnn, replicas, i, x[i], y[i]) for i in range(3)]
    replicas.gradients(cross_entropy, (x, y))
    for i, (_, grads, _) in enumerate(expected):
        for name, stacked in replicas.blocks[0].tensors(replicas.blocks[0].grad).items():
            assert torch.equal(stacked[i], grads[name])


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_auto_tries_several_and_leaves_out_what_cannot_run():
    replicas = Replicas(Lstm, 20, backend="auto")
    replicas.gradients(cross_entropy, batch(20))
    assert "loop" in replicas.timings
    assert any(name.startswith("vmap") for name in replicas.timings)
    assert not any(name.startswith("tape") for name in replicas.timings)
    assert str(replicas.backend) in replicas.timings
    chosen = replicas.backend
    replicas.gradients(cross_entropy, batch(20), 1)
    assert replicas.backend is chosen


def test_auto_leaves_buffers_and_the_callers_random_stream_alone():
    auto, loop = (Replicas(Cnn, 4, backend=b) for b in ("auto", "loop"))
    torch.manual_seed(5)
    auto.gradients(cross_entropy, batch(4))
    after = torch.rand(1)
    torch.manual_seed(5)
    assert torch.equal(after, torch.rand(1))
    loop.gradients(cross_entropy, batch(4))
    for name, stacked in loop.buffers.items():
        torch.testing.assert_close(auto.buffers[name], stacked)


def test_dropout_has_its_own_stream_per_replica_and_step():
    replicas = Replicas(Dropout, 4, backend="auto", seed=3)
    x, y = (t[:1].expand(4, *t.shape[1:]) for t in batch(1))  # all replicas see the same samples
    first = replicas.gradients(cross_entropy, (x, y), step=0)
    assert replicas.backend == Backend("loop")
    assert len(set(first.tolist())) == 4
    assert torch.equal(first, replicas.gradients(cross_entropy, (x, y), step=0))
    assert not torch.equal(first, replicas.gradients(cross_entropy, (x, y), step=1))
    # Rows 2 and 3 alone, as another process would hold them, draw the same numbers.
    other = Replicas(Dropout, 2, backend="loop", seed=3, first=2)
    for block, source in zip(other.blocks, replicas.blocks, strict=True):
        block.x.copy_(source.x[2:])
    assert torch.equal(first[2:], other.gradients(cross_entropy, (x[2:], y[2:]), step=0))


def test_vmap_is_allowed_for_dropout_when_asked():
    replicas = Replicas(Dropout, 8, backend="auto", vmap_randomness=True)
    replicas.gradients(cross_entropy, batch(8))
    assert len(replicas.timings) > 1


def test_starts_same_or_different():
    same, different = (Replicas(mlp, 5, init=init, seed=2) for init in ("same", "different"))
    assert (same.blocks[0].x == same.blocks[0].x[0]).all()
    assert not torch.equal(different.blocks[0].x[0], different.blocks[0].x[1])
    assert torch.equal(same.blocks[0].x[0], different.blocks[0].x[0])
    assert torch.equal(Replicas(mlp, 2, seed=2, first=3).blocks[0].x, same.blocks[0].x[:2])
    # Row 3 starts the same whichever process holds it.
    assert torch.equal(Replicas(mlp, 2, init="different", seed=2, first=3).blocks[0].x[0], different.blocks[0].x[3])


def test_a_given_module_keeps_its_values_and_rows_are_aligned():
    module = mlp()
    expected = {name: p.detach().clone() for name, p in module.named_parameters()}
    replicas = Replicas(module, 3)
    block = replicas.blocks[0]
    for name, stacked in block.tensors(block.x).items():
        assert torch.equal(stacked[2], expected[name])
        assert stacked.data_ptr() % 64 == 0
        assert stacked[1].data_ptr() % 64 == 0
    assert replicas.row_bytes == 4 * sum(p.numel() for p in expected.values())


def test_tied_frozen_channels_last_and_mixed_dtypes():
    tied = Replicas(Tied, 2)
    assert "second.weight" not in tied.slots
    module = Cnn()
    module.out.bias.requires_grad_(False)
    module.conv.to(memory_format=torch.channels_last)
    replicas = Replicas(module, 3, backend="loop")
    assert "out.bias" not in replicas.slots
    assert replicas.blocks[0].tensors(replicas.blocks[0].x)["conv.weight"][0].is_contiguous(memory_format=torch.channels_last)
    replicas.gradients(cross_entropy, batch(3))
    mixed = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.Linear(16, 10).double())
    replicas = Replicas(mixed, 3)
    assert [block.dtype for block in replicas.blocks] == [torch.float32, torch.float64]

    def loss(model, x, y):
        return F.cross_entropy(model[2](model[1](model[0](x)).double()), y)

    replicas.gradients(loss, batch(3))
    assert all(block.grad.abs().sum() > 0 for block in replicas.blocks)


@pytest.mark.parametrize("backend", ["loop", "vmap", "tape", "auto"])
def test_a_loss_may_use_the_model_in_any_way(backend):
    """A method, a part, a walk over its parameters: everything is computed with the replica's own parameters."""

    def loss(model, x, y):
        penalty = sum((p**2).sum() for p in model.parameters())
        return F.cross_entropy(model[3](model[2](model[1](model[0](x)))), y) + 0.1 * penalty + 0.1 * model[1].weight.mean()

    replicas, expected = (Replicas(mlp, 5, init="different", backend=b) for b in (backend, "loop"))
    replicas.gradients(loss, batch(5))
    expected.gradients(loss, batch(5))
    torch.testing.assert_close(replicas.blocks[0].grad, expected.blocks[0].grad, rtol=1e-5, atol=1e-6)
    modules = [mlp() for _ in range(5)]
    for i, module in enumerate(modules):
        with expected.replica(i) as source:
            module.load_state_dict(source.state_dict())
        loss(module, *(t[i] for t in batch(5))).backward()
        assert torch.equal(expected.row_gradients(i)[0], module[1].weight.grad)


class Counting(nn.Module):
    """Replaces a buffer instead of changing it, and shares another one with a part of itself."""

    def __init__(self):
        super().__init__()
        self.out = nn.Linear(64, 10)
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("shared", torch.zeros(()))
        self.out.register_buffer("shared", self.shared)

    def forward(self, x):
        self.seen = self.seen + 1
        self.shared += 1
        assert self.out.shared is self.shared
        return self.out(x.flatten(1))


def test_buffers_that_are_replaced_or_shared():
    replicas = Replicas(Counting, 3)
    for step in range(4):
        replicas.gradients(cross_entropy, batch(3), step)
    assert replicas.backend == Backend("loop")
    assert replicas.buffers["seen"].tolist() == [4, 4, 4]
    assert replicas.buffers["shared"].tolist() == [4, 4, 4]


def test_a_given_module_stays_its_owners():
    module = mlp()
    before = module[1].weight.detach().clone()
    replicas = Replicas(module, 2)
    replicas.blocks[0].x.zero_()
    assert torch.equal(module[1].weight, before)


def test_unused_parameters_get_a_zero_gradient():
    class Unused(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.unused = nn.Linear(64, 10), nn.Linear(3, 3)

        def forward(self, x):
            return self.used(x.flatten(1))

    for backend in ("loop", "vmap", "tape"):
        replicas = Replicas(Unused, 2, backend=backend)
        replicas.blocks[0].grad.fill_(9)
        replicas.gradients(cross_entropy, batch(2))
        grads = replicas.blocks[0].tensors(replicas.blocks[0].grad)
        assert grads["unused.weight"].abs().sum() == 0
        assert grads["used.weight"].abs().sum() > 0


def test_the_averaged_model_averages_parameters_and_buffers():
    replicas = Replicas(Cnn, 4, init="different", backend="loop")
    replicas.gradients(cross_entropy, batch(4))
    rows = []
    for i in range(4):
        with replicas.replica(i) as model:
            assert not model.training
            rows.append({name: t.clone() for name, t in model.state_dict().items()})
    with replicas.averaged() as model:
        for name, value in model.state_dict().items():
            stacked = torch.stack([row[name] for row in rows])
            expected = stacked.mean(0) if stacked.is_floating_point() else stacked[0]
            torch.testing.assert_close(value, expected)
    with replicas.replica(2) as model:  # and the replicas are as they were
        assert torch.equal(model.conv.weight, rows[2]["conv.weight"])
        assert torch.equal(model.norm.running_mean, rows[2]["norm.running_mean"])


class Entangled(nn.Module):
    def __init__(self):
        super().__init__()
        storage = torch.zeros(20)
        self.a, self.b = nn.Parameter(storage[:12]), nn.Parameter(storage[10:])


class Branching(nn.Module):
    def __init__(self):
        super().__init__()
        self.out = nn.Linear(64, 10)

    def forward(self, x):
        y = self.out(x.flatten(1))
        return y if y.sum().item() > 0 else -y


BAD = [
    (lambda: Replicas(nn.ReLU(), 2), "ReLU has no trainable parameters"),
    (lambda: Replicas(Entangled(), 2), "'a' and 'b' share memory"),
    (lambda: Replicas(mlp, 0), "r=0"),
    (lambda: Replicas(mlp(), 2, init="different"), "needs a function"),
    (lambda: Replicas(mlp, 2, init="random"), "init='random' is not known"),
    (lambda: Replicas(mlp, 2, backend="magic"), "backend 'magic' is not known"),
    (lambda: Replicas(mlp, 2, backend="vmap:0"), "backend 'vmap:0' is not known"),
    (lambda: Replicas(mlp, 2, backend="loop:4"), "backend 'loop:4' is not known"),
    (lambda: Replicas(mlp, 4).gradients(cross_entropy, batch(6)), r"\[6, 5, 8, 8\], which does not split over 4 replicas"),
    (lambda: Replicas(Branching, 4, backend="vmap").gradients(cross_entropy, batch(4)), "'vmap' can't run this model.*use 'loop'"),
    (lambda: split(task().train, 7), "640 samples, which do not split over 7"),
]  # fmt: skip


@pytest.mark.parametrize(("make", "message"), BAD)
def test_mistakes_are_named_in_one_line(make, message):
    with pytest.raises(GossamerError, match=message) as caught:
        make()
    assert "\n" not in str(caught.value)


def test_auto_falls_back_to_the_loop_for_a_model_that_branches_on_values():
    replicas = Replicas(Branching, 4)
    replicas.gradients(cross_entropy, batch(4))
    assert replicas.backend == Backend("loop")


def test_split():
    x, y = split(task().train, 8)
    assert x.shape == (8, 80, 8, 8)
    assert y.shape == (8, 80)
