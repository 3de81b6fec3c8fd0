"""The averaged model for others: ``export()`` and torch.distributed.checkpoint."""

import json

import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from gossamer import GossamerError
from tests.pool import on_workers
from tests.world import Norm, close, norm, train


class Tied(nn.Module):
    """With weights that are tied, a config, and a saver of its own, as Hugging Face's models have."""

    def __init__(self):
        super().__init__()
        self.inner, self.outer, self.head = nn.Linear(6, 3), nn.Linear(3, 3), nn.Linear(3, 3)
        self.head.weight = self.outer.weight

    def forward(self, x):
        return self.head(self.outer(self.inner(x)))

    def save_pretrained(self, folder, state_dict=None):
        folder.mkdir()
        assert state_dict["head.weight"] is state_dict["outer.weight"]
        own = {name: t for name, t in state_dict.items() if name != "head.weight"}
        safetensors.torch.save_file(own, folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps({"kind": "tied"}))


def trained(world, module):
    model = world.model(module, "ring")
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model.gossip(optimizer)
    train(world, model, optimizer, 3)
    before = {name: t.clone() for name, t in model.state_dict().items()}
    return model, before, {name: world.gather(t.double()).mean(0) for name, t in model.state_dict().items()}


@on_workers(1, 2)
def test_the_averaged_model_is_exported(world):
    model, before, means = trained(world, norm())
    model.export(world.folder / "plain")
    for name, t in safetensors.torch.load_file(world.folder / "plain" / "model.safetensors").items():
        close(t, means[name])
    for name, t in model.state_dict().items():
        assert torch.equal(t, before[name])  # each worker has its own again
    torch.manual_seed(0)
    model, _, means = trained(world, Tied())
    model.export(world.folder / "own")
    for name, t in safetensors.torch.load_file(world.folder / "own" / "model.safetensors").items():
        close(t, means[name])
    with pytest.raises(GossamerError, match="can't be written.*exists" if world.rank == 0 else "what rank 0 saves"):
        model.export(world.folder / "own")


@on_workers(2)
def test_torch_distributed_checkpoint_saves_the_averaged_model_and_loads_it(world):
    model, _, means = trained(world, norm())
    with model.consensus():
        dcp.save({"model": model.state_dict()}, checkpoint_id=world.folder / "dcp")
    assert sum(path.stat().st_size for path in (world.folder / "dcp").iterdir()) < 30_000
    fresh = Norm()
    dcp.load({"model": (weights := fresh.state_dict())}, checkpoint_id=world.folder / "dcp")
    fresh.load_state_dict(weights)
    other = world.model(Norm(), "ring")
    dcp.load({"model": (weights := other.state_dict())}, checkpoint_id=world.folder / "dcp")
    other.load_state_dict(weights)
    for name in means:
        close(fresh.state_dict()[name], means[name])
        assert torch.equal(fresh.state_dict()[name], other.state_dict()[name])
