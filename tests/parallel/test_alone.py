"""One worker."""

import torch

from tests.pool import on_workers
from tests.world import flat, small, train


@on_workers(1)
def test_one_worker_alone_trains_as_the_bare_module_does(world):
    for graph in ("one-peer-exponential", "all-reduce", "ring"):
        model, bare = world.model(graph=graph), small()
        optimizer, other = (torch.optim.SGD(m.parameters(), 0.1, momentum=0.9) for m in (model, bare))
        model.gossip(optimizer)
        train(world, model, optimizer, 5)
        train(world, bare, other, 5)
        assert torch.equal(flat(model), flat(bare))
        assert model.steps == 5
        assert model.mean(3.0) == 3.0
        model.average_()
        assert torch.equal(flat(model), flat(bare))
