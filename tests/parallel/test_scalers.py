"""Gradient scalers, which skip steps."""

import math

import torch
import torch.nn.functional as F
from torch import nn

from tests.pool import on_workers
from tests.world import close, flat, loss_of


@on_workers(2, 3)
def test_a_scaler_that_skips_a_step_on_one_rank_holds_no_other_rank(world):
    for graph, order in (("ring", "awc"), ("ring", "atc"), ("all-reduce", "awc")):
        model = world.model(graph=graph, order=order)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=100)
        model.gossip(optimizer, scaler=scaler)
        for step in range(4):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = F.cross_entropy(model(world.batch(step)[0]).float(), world.batch(step)[1])
            if step == 1 and world.rank == 1 and graph == "all-reduce":
                loss = loss * math.inf  # before gradients are averaged, which is when backward ends
            scaler.scale(loss).backward()
            if step == 1 and world.rank == 1 and graph != "all-reduce":
                model.module[0].weight.grad[0, 0] = math.inf
            if step % 2:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            before = flat(model).clone()
            rows = world.gather(before)
            scaler.step(optimizer)
            if step == 1 and (graph, order) == ("ring", "awc") and world.rank == 1:
                close(flat(model), rows.mean(0), 1e-6)  # n is 2 or 3: a ring is the mean; the update was skipped
            if step == 1 and graph == "all-reduce":
                assert torch.equal(flat(model), before)  # all saw the infinite gradient
            scaler.update()
        assert model.steps == 4
        assert world.same(torch.tensor([model.steps]))
        assert torch.isfinite(flat(model)).all()
        skipped = world.rank == 1 or graph == "all-reduce"
        assert scaler.get_scale() == (2.0 if skipped else 4.0)
        model.gossip(optimizer)  # without the scaler now: it is as it was
        assert "step" not in vars(scaler) or scaler.step.__name__ == "step"


@on_workers(2)
def test_a_fused_optimizer_sees_what_all_see(world):
    """The scaler looks at its gradients without unscaling them."""
    model = world.model(graph="all-reduce")
    optimizer = torch.optim.AdamW(model.parameters(), 0.01, fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=100)
    model.gossip(optimizer, scaler=scaler)
    for step in range(4):
        optimizer.zero_grad()
        loss = loss_of(model, world.batch(step)) * (math.inf if step == 1 and world.rank == 1 else 1.0)
        scaler.scale(loss).backward()
        before = flat(model).clone()
        scaler.step(optimizer)
        scaler.update()
        assert torch.equal(flat(model), before) == (step == 1)
    assert torch.isfinite(flat(model)).all()
    assert world.same(flat(model))
    assert scaler.get_scale() == 2.0
