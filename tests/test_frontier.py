"""The frontier benchmark: references are what they stand for, and the worker runs. Its figures are made by hand: docs/frontier.md."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as power
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from benchmarks import field, frontier, frontier_steps
from gossamer.rows.block import Block
from gossamer.rows.vector import Gradients
from studies.experiment import Experiment
from tests.pool import on_workers

N, STEPS, START, RANK = 2, 5, 2, 2


class Net(nn.Module):
    """A matrix that is compressed, and a bias that is not."""

    def __init__(self):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.zeros(24, 16)), nn.Parameter(torch.zeros(7))

    def forward(self, weight, bias):
        return (self.weight * weight).sum() + (self.bias * bias).sum()


def gradients(rank, step):
    made = torch.Generator().manual_seed(10 * step + rank)
    return torch.randn(24, 16, generator=made), torch.randn(7, generator=made)


def by_reference(method, begin=lambda q: None):
    """What the method makes of the gradients, step by step."""
    block = Block([(name, p, False) for name, p in Net().named_parameters()], N, torch.device("cpu"))
    grad = Gradients([block])
    mixer = SimpleNamespace(rows=range(N), n=N, cost_of_mean=lambda vector: 100)
    mean = lambda v: SimpleNamespace(into=lambda out: [x.copy_(x.mean(dim=0).expand_as(x)) for x in out.tensors])  # noqa: E731
    s = SimpleNamespace(t=0, grad=grad, mixer=mixer, bytes=0, mean=mean, state=method.state(grad))
    if "q" in s.state:
        begin(s.state["q"].tensors[0])
    for s.t in range(STEPS):
        for rank in range(N):
            for view, one in zip(block.tensors(block.grad).values(), gradients(rank, s.t), strict=True):
                view[rank].copy_(one)
        method.after_backward(s)
        yield [view[0].clone() for view in block.tensors(block.grad).values()]


@on_workers(N)
def test_references_are_the_hooks_of_torch(world):
    state = power.PowerSGDState(None, RANK, start_powerSGD_iter=START)
    drawn = np.random.RandomState(state.rng.get_state()[1][0])
    drawn.set_state(state.rng.get_state())

    def as_drawn(q):
        torch.manual_seed(drawn.randint(1_000_000_000))
        q[:, : 16 * RANK] = torch.randn(1, 16, RANK).flatten()

    ways = {
        "fp16": (None, fp16_compress_hook, by_reference(field.Fp16Hook())),
        "PowerSGD": (state, power.powerSGD_hook, by_reference(field.PowerSGD(RANK, START), as_drawn)),
    }
    for name, (own, hook, reference) in ways.items():
        model = DistributedDataParallel(Net())
        model.register_comm_hook(own, hook)
        for step, expected in enumerate(reference):
            model.zero_grad()
            model(*gradients(world.rank, step)).backward()
            for p, one in zip(model.parameters(), expected, strict=True):
                torch.testing.assert_close(p.grad, one, rtol=1e-4, atol=1e-5, msg=f"{name}, step {step}")


@on_workers(N)
def test_ways_run_and_take_as_long_as_computing_at_least(world):
    before, frontier_steps.ENOUGH_S = frontier_steps.ENOUGH_S, 0.0
    try:
        for name in (frontier.DDP, frontier.POWER, frontier.HOOK, "post-local SGD, H=2", "diloco:H=3,delay=2, 4bits"):
            way = frontier_steps.Way(name, layers=2)
            result = frontier_steps.measured(way)
            assert result["ms"] >= frontier_steps.COMPUTE_MS, name
            assert result["steps"] == frontier_steps.FEWEST * way.period, name
    finally:
        frontier_steps.ENOUGH_S = before


def test_a_pretended_gradient_is_not_copied():
    layer = frontier_steps.Layer(0, 1, frontier_steps.Clock())
    layer(torch.zeros((), requires_grad=True)).backward()
    assert layer.weight.grad.data_ptr() == layer.gradient.data_ptr()


def test_steps_to_a_loss_follow_from_two_lengths():
    """A loss that falls by 0.1 while the steps double: what ends 0.1 behind takes twice the steps."""

    def runs(method, loss, steps, count=4):
        return {"method": method, "seed": 0, "value": float(np.exp(loss)), "steps": steps, "bytes": count, "replicas": 4}

    metric = {"name": "perplexity"}
    short = Experiment("", {"metric": metric, "runs": [runs("all-reduce", 2.0, 1000), runs("other", 2.1, 1000, 1)]})
    long = Experiment("", {"metric": metric, "runs": [runs("all-reduce", 1.9, 2000)]})
    losses = frontier.Losses(short, long)
    assert losses.steps_to("all-reduce") == pytest.approx(1000)
    assert losses.steps_to("other") == pytest.approx(2000)
    assert losses.share("other") == 0.25
    ways = {"DDP": {"ms": 100.0}, "quick": {"ms": 10.0}}
    assert frontier.seconds_to(frontier.Contender("", "other", "quick", ddp=500), losses, ways) == pytest.approx(65)


def test_the_table_of_accuracies_has_differences_seed_by_seed():
    runs = [
        {
            "method": m,
            "seed": seed,
            "value": value + 0.01 * seed,
            "steps": 9,
            "bytes": count,
            "replicas": 4,
            "status": "done",
            "lr": 0.1,
        }
        for m, value, count in (("all-reduce", 0.8, 8), ("one peer, 8bits", 0.79, 2))
        for seed in (0, 1)
    ]
    rows = list(frontier.accuracy_table(Experiment("", {"metric": {"name": "accuracy"}, "runs": runs})))
    assert rows[-1].startswith("| one peer, 8bits | 79.50 ±")
    assert "| -1.00 ± 0.00 | 25 % | 0.1 | 2 |" in rows[-1]
