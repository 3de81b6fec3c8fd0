"""Files of version 0.1, made by its code (tests/fixtures/0.1): a store, a Trainer's checkpoint, and those of two workers of the library."""

import json
import shutil
from pathlib import Path

import safetensors.torch
import torch
from torch import nn

from gossamer import Recipe, Settings, Task, Trainer
from gossamer.dbench import bench
from gossamer.dbench import spec as specs
from gossamer.dbench.report import write
from gossamer.dbench.results import results
from gossamer.dbench.store import FILE, Store
from tests.pool import on_workers

OLD = Path(__file__).parent / "fixtures" / "0.1"
GENERATOR = torch.Generator().manual_seed(1)
X, Y = torch.randn(96, 5, generator=GENERATOR), torch.randint(3, (96,), generator=GENERATOR)


def net():
    return nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))


def test_a_store_is_read_as_before_and_its_grid_may_grow(tmp_path):
    shutil.copy(OLD / FILE, tmp_path / FILE)
    found, before = results(Store(tmp_path / FILE)), json.loads((OLD / "results.json").read_text())
    assert len(found) == len(before) == 6
    for row, old in zip(found, before, strict=True):
        assert {key: row[key] for key in old} == old
        assert row["value_spread"] is None
    assert write(tmp_path).exists()
    spec = Store(tmp_path / FILE).spec()
    grown = specs.build(spec.model_dump(mode="json") | {"seeds": [0, 1, 2], "methods": ["centralized", "ring", "ada"]})
    assert bench(grown, tmp_path, jobs=1, quiet=True).finished == 9
    again = results(Store(tmp_path / FILE))
    assert [row["value"] for row in again if row["seed"] < 2] == [row["value"] for row in found]


def test_a_trainer_goes_on_as_it_would_have(tmp_path):
    settings = Settings(4, 3, 4, optimizer=Recipe("sgd", 0.1, {"momentum": 0.9}), backend="loop")
    trainer = Trainer(Task("toy", net, (X, Y), (X, Y)), settings, "one-peer-exponential")
    assert trainer.load(OLD / "trainer.ckpt")
    assert trainer.step == 5
    trainer.run(until=12)
    expected = safetensors.torch.load_file(OLD / "trainer-after-12.safetensors")["x"]
    assert (trainer.replicas.blocks[0].x - expected).abs().max() <= 1e-6


@on_workers(2)
def test_workers_of_the_library_go_on_as_they_would_have(world):
    model = world.model(net(), "one-peer-exponential")
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    model.gossip(optimizer)
    assert model.load(OLD / "library")
    assert model.steps == 5
    for step in range(5, 10):
        mine = slice(step * 8 + world.rank * 4, step * 8 + world.rank * 4 + 4)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(X[mine]), Y[mine]).backward()
        optimizer.step()
    expected = safetensors.torch.load_file(OLD / f"library-after-10-rank-{world.rank}.safetensors")
    for name, p in model.named_parameters():
        assert (p.detach() - expected[name]).abs().max() <= 1e-6
