"""Second moments that replicas share: those of the mean gradient, where each replica sees its own, with the noise of a small batch."""

import pytest
import torch
from torch import nn

from gossamer import GossamerError, Recipe, Settings, Trainer, graphs
from gossamer.methods import Step, method
from gossamer.optim import BlockOptimizer
from gossamer.rows.replicas import Replicas
from gossamer.rows.vector import Gradients, Parameters
from gossamer.transport.mixer import Mixer
from tests.models import mlp, task

N, COLUMNS, BETA, LR, STEPS = 4, 1024, 0.98, 0.01, 240


def second_moment(rule, slope):
    """Of AdamW after a while, where each gradient is ``slope`` and noise of size 1: the mean over replicas and columns, bias corrected."""
    replicas = Replicas(lambda: nn.Linear(COLUMNS, 1, bias=False).double(), N)
    (block,), rule = replicas.blocks, method(rule)
    optimizer = BlockOptimizer(Recipe("adamw", LR, {"betas": (0.9, BETA), "weight_decay": 0.0}), replicas)
    parameters, grad = Parameters(replicas.blocks, in_place=False), Gradients(replicas.blocks)
    now = Step(Mixer(N), parameters, grad, lambda: None, lambda t: False, optimizer.states)
    now.optimizers, now.graph = optimizer.optimizers, graphs.parse("complete", N)
    rule.begin(now)
    generator = torch.Generator().manual_seed(1)
    for t in range(STEPS):
        now.t, now.lr = t, LR
        with torch.no_grad():
            block.grad.copy_(slope + torch.randn(N, COLUMNS, generator=generator, dtype=torch.float64))
            optimizer.step()
            rule.after_update(now)
    (state,) = optimizer.optimizers[0].state.values()
    assert (state["exp_avg_sq"] > 0).all()
    return float(state["exp_avg_sq"].mean()) / (1 - BETA**STEPS)


@pytest.mark.parametrize("slope", [0.0, 0.5, 2.0])
def test_shared_moments_are_those_of_the_mean_gradient(slope):
    own, mean = slope**2 + 1, slope**2 + 1 / N
    assert second_moment("local:H=8", slope) == pytest.approx(own, rel=0.1)
    assert second_moment("local:H=8,moments=mean", slope) == pytest.approx(own, rel=0.1)
    for rule in ("local:H=8,wire=8bits", "diloco:H=4"):
        assert second_moment(f"{rule},moments=shared", slope) == pytest.approx(mean, rel=0.1), rule
    # What came in since the last movement set out, 4 and 8 steps ago, is not corrected yet.
    late = 1 - (BETA**4 + BETA**8) / 2
    found = second_moment("diloco:H=8,delay=4,fragments=2,moments=shared", slope)
    assert found == pytest.approx(late * own + (1 - late) * mean, rel=0.1)


@pytest.mark.parametrize(
    ("recipe", "why"),
    [
        (
            Recipe("sgd", 0.1),
            "method 'diloco': moments=shared knows the second moments of Adam, AdamW, NAdam and RAdam; this is SGD",
        ),
        (Recipe("adam", 0.1, {"amsgrad": True}), "and with amsgrad=True they only grow; use moments=own"),
        (Recipe("accumadam", 0.1), "this is AccumAdam; use moments=own"),
    ],
)
def test_other_optimizers_are_refused_in_one_line(recipe, why):
    with pytest.raises(GossamerError, match=why) as caught:
        Trainer(task(mlp), Settings(4, 1, 8, algorithm="diloco:moments=shared", optimizer=recipe))
    assert "\n" not in str(caught.value)


def test_groups_with_learning_rates_of_their_own_are_refused():
    a, b = (nn.Parameter(torch.ones(2)) for _ in range(2))
    optimizer = torch.optim.AdamW([{"params": [a]}, {"params": [b], "lr": 0.1}])
    with pytest.raises(GossamerError, match="moments=shared needs one learning rate and one beta2 for all parameter groups"):
        method("local:moments=shared").refuse(graphs.parse("complete", 4), [optimizer])
