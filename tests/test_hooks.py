"""Hooks for torch's DDP: gradients in few bits are those of DDP up to the rounding, the same on all workers, and right on the average."""

import copy
import gc
import threading

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gossamer import GossamerError, hooks
from gossamer.rows import codec
from gossamer.rows.wires import WIRES, EightBits
from gossamer.transport.routes import columns
from tests.pool import on_workers

HOOKS = {"8bits": hooks.eight_bit, "4bits": hooks.four_bit}


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(20, 33), nn.Tanh(), nn.Linear(33, 3))


def batch(rank, step=0):
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(8, 20, generator=generator), torch.randint(3, (8,), generator=generator)


def loss(model, rank, step=0):
    inputs, labels = batch(rank, step)
    return nn.functional.cross_entropy(model(inputs), labels)


def gradient(model):
    return torch.cat([p.grad.flatten() for p in model.parameters()])


def hooked(hook=hooks.eight_bit, module=None, error_feedback=False, **options):
    model = DistributedDataParallel(network() if module is None else module, **options)
    state = hooks.state(error_feedback=error_feedback)
    model.register_comm_hook(state, hook)
    return model, state


def plain(rows, wire, step):
    """What the hook gives, number by number, without a network."""
    n, out = len(rows), torch.empty_like(rows[0])

    def rounded(row, turn):
        code, seen = torch.empty(wire.width(len(row)), dtype=wire.code), torch.empty_like(row)
        wire.encode(row, code, turn)
        wire.decode(code, seen)
        return seen

    for part in (columns(len(out), n, k, codec.SPAN) for k in range(n)):
        if part.stop > part.start:
            seen = [rounded(row[part], codec.turn(step, k)) for k, row in enumerate(rows)]
            out[part] = rounded(sum(seen[1:], seen[0]) / n, codec.turn(step, -1))
    return out


class Bucket:
    """A bucket of DDP, as a hook sees it."""

    def __init__(self, row):
        self.row = row

    def index(self):
        return 0

    def buffer(self):
        return self.row


@pytest.mark.parametrize("wire", list(HOOKS))
@pytest.mark.parametrize("width", [1, 64, 1000, 12345])
@on_workers(2, 3, 5)
def test_the_hook_gives_what_its_plain_form_gives(world, wire, width):
    rows = torch.randn(world.size, width, generator=torch.Generator().manual_seed(7))
    state = hooks.state()
    for step in range(2):
        row = rows[world.rank] * (step + 1)
        made = HOOKS[wire](state, Bucket(row.clone())).wait()
        assert torch.equal(made, plain(rows * (step + 1), WIRES[wire], step))
        assert world.same(made)


@on_workers(2, 4)
def test_the_rounding_is_right_on_the_average_and_bounded(world):
    rows = torch.randn(world.size, 640, generator=torch.Generator().manual_seed(3))
    mean, state, times = rows.mean(0), hooks.state(), 300
    made = torch.stack([hooks.eight_bit(state, Bucket(rows[world.rank].clone())).wait() for _ in range(times)])
    largest = rows.abs().amax()
    assert (made - mean).abs().max() <= 2 * largest / 64
    assert (made.mean(0) - mean).abs().max() <= 0.1 * largest / 64


@pytest.mark.parametrize("wire", ["8bits", "4bits"])
@on_workers(2, 3)
def test_error_feedback_loses_nothing_over_time(world, wire):
    """The sum of what was applied is the sum of the gradients, up to what one step may lose."""
    rows = torch.randn(world.size, 640, generator=torch.Generator().manual_seed(3))
    state, total = hooks.state(error_feedback=True), torch.zeros(640)
    for _ in range(50):
        total += HOOKS[wire](state, Bucket(rows[world.rank].clone())).wait()
    one_step = rows.abs().amax() / (64 if wire == "8bits" else 3)
    assert (total - 50 * rows.mean(0)).abs().max() <= 3 * one_step


@pytest.mark.parametrize("options", [{}, {"bucket_cap_mb": 0.001}, {"gradient_as_bucket_view": True}, {"static_graph": True}])
@on_workers(2, 3)
def test_gradients_are_those_of_ddp_up_to_the_rounding(world, options):
    module = network()
    exact, (model, _) = DistributedDataParallel(copy.deepcopy(module)), hooked(module=module, **options)
    for step in range(3):  # buckets are made anew after the first
        for each in (exact, model):
            each.zero_grad()
            loss(each, world.rank, step).backward()
        found, right = gradient(model), gradient(exact)
        assert world.same(found)
        assert not torch.equal(found, right)
        assert (found - right).norm() <= 0.02 * right.norm()


@on_workers(2)
def test_it_sends_a_quarter_of_the_bytes(world):
    module = nn.Linear(1000, 100, bias=False)
    model, state = hooked(module=module)
    model(torch.randn(2, 1000)).sum().backward()
    whole = 2 * (world.size - 1) / world.size * 4 * 100_000
    assert state.bytes == pytest.approx(whole * codec.SHARE, rel=0.01)


@pytest.mark.parametrize("error_feedback", [False, True])
@on_workers(2)
def test_training_with_adamw_ends_where_ddp_ends(world, error_feedback):
    losses = []
    for model in (DistributedDataParallel(network()), hooked(error_feedback=error_feedback)[0]):
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        for step in range(60):
            optimizer.zero_grad()
            loss(model, world.rank, step % 4).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        losses.append(float(loss(model, world.rank, 0).detach()))
        assert world.same(torch.cat([p.detach().flatten() for p in model.parameters()]))
    assert losses[1] == pytest.approx(losses[0], rel=0.05)


@pytest.mark.parametrize("error_feedback", [False, True])
@on_workers(2)
def test_a_gradient_that_is_not_finite_is_so_on_all_workers_and_is_forgotten(world, error_feedback):
    state = hooks.state(error_feedback=error_feedback)
    row = torch.ones(200)
    bad = row.clone()
    bad[3] = float("inf") if world.rank == 0 else 1.0
    made = hooks.eight_bit(state, Bucket(bad)).wait()
    assert not torch.isfinite(made[3])
    assert torch.isfinite(made[100:]).all()
    again = hooks.eight_bit(state, Bucket(row.clone())).wait()
    assert (again - 1).abs().max() <= 0.1


@pytest.mark.parametrize("dtype", ["bfloat16", "float64"])
@on_workers(2)
def test_gradients_of_other_precisions(world, dtype):
    model, _ = hooked(module=network().to(getattr(torch, dtype)))
    inputs, labels = batch(world.rank)
    nn.functional.cross_entropy(model(inputs.to(getattr(torch, dtype))).float(), labels).backward()
    assert gradient(model).dtype == getattr(torch, dtype)
    assert world.same(gradient(model).float())


@on_workers(2)
def test_no_sync_sends_nothing(world):
    model, state = hooked()
    with model.no_sync():
        loss(model, world.rank).backward()
    assert state.bytes == 0
    loss(model, world.rank, 1).backward()
    assert state.bytes > 0


@on_workers(2)
def test_a_dropped_model_leaves_no_thread(world):
    model, state = hooked()
    loss(model, world.rank).backward()
    threads = [thread for thread in threading.enumerate() if thread.name == "gossamer-hook"]
    assert len(threads) == len(hooks.STAGES)
    del model, state
    gc.collect()
    for thread in threads:
        thread.join(timeout=10)
        assert not thread.is_alive()


class Broken(EightBits):
    """It can't encode, or not decode."""

    def __init__(self, what):
        super().__init__()
        setattr(self, what, lambda *args: 1 // 0)


@pytest.mark.parametrize("what", ["encode", "decode"])
@on_workers(2)
def test_what_fails_in_a_thread_is_raised_where_ddp_waits(world, what):
    state, row = hooks.state(), torch.ones(640)
    with pytest.raises(ZeroDivisionError):
        hooks._hook(state, Bucket(row.clone()), Broken(what)).wait()
    assert torch.equal(hooks.eight_bit(state, Bucket(row.clone())).wait(), row)  # the threads go on


@on_workers(2, 4)
def test_many_buckets_at_once(world):
    rows = torch.randn(world.size, 9, 5000, generator=torch.Generator().manual_seed(7))
    state = hooks.state()
    futures = [hooks.eight_bit(state, Bucket(row.clone())) for row in rows[world.rank]]
    for step, future in enumerate(futures):
        assert torch.equal(future.wait(), plain(rows[:, step], WIRES["8bits"], step))


@on_workers(1)
def test_a_wrong_use_is_one_line(world):
    if not dist.is_initialized():
        with pytest.raises(GossamerError, match="call init_process_group\\(\\) first"):
            hooks.state()
    with pytest.raises(GossamerError, match="the hook needs a state: .* it got NoneType"):
        hooks.eight_bit(None, Bucket(torch.ones(3)))
