"""Profiles."""

import torch

from tests.pool import on_workers
from tests.world import close, train


@on_workers(1, 3)
def test_profiles_hold_all_workers_norms_and_their_distance(world):
    for graph, order in (("one-peer-ring", "awc"), ("one-peer-ring", "atc"), ("all-reduce", "awc")):
        model = world.model(graph=graph, order=order)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        model.gossip(optimizer, profile_every=2)
        for step in range(4):
            before = world.rows(model).double()
            train(world, model, optimizer, 1, step)
            if step == 2 and order == "awc" and graph != "all-reduce":
                seen = model.profiles[-1]
                distance = (before - before.mean(0)).square().sum(1).mean().sqrt()
                assert abs(seen.consensus_distance - float(distance)) < 1e-6
                norms = torch.stack([row.split([30, 5, 15, 3])[0].norm() for row in before])
                close(seen.norms[:, 0], norms, 1e-5)
                assert (distance > 0) == (world.size > 1)
        assert [p.step for p in model.profiles] == [0, 2]
        assert all(p.norms.shape == (world.size, 4) for p in model.profiles)
        assert graph != "all-reduce" or model.profiles[1].consensus_distance < 1e-6
        assert "gini" in model.signals
