"""A Trainer's checkpoint goes on in another number of processes, as if nothing had been."""

import pytest
import torch
from torch import nn

from gossamer import GossamerError, Recipe, Settings, Task, Trainer
from gossamer.members.store import open_link
from gossamer.transport.exchange import Exchange
from tests.models import task
from tests.world import TIMEOUT_SECONDS, World, close

RECIPES = {
    "plain": Recipe("sgd", 0.1),
    "momentum": Recipe("sgd", 0.1, {"momentum": 0.9}),
    "spared": Recipe("adam", 0.01, {"weight_decay": 0.1}, spare_norms=True),
    "row by row": Recipe("adafactor", 0.01),
}


def net():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 12), nn.BatchNorm1d(12), nn.Linear(12, 10)).double()


def exact():
    toy = task(net)
    (x, y), (seen, labels) = toy.train, toy.test
    return Task("exact", net, (x.double(), y), (seen.double(), labels))


def made(world, recipe, algorithm="atc"):
    link = open_link(torch.device("cpu"), timeout=TIMEOUT_SECONDS) if world.size > 1 else None
    settings = Settings(4, 2, 32, algorithm, RECIPES[recipe], backend="loop")
    return Trainer(exact(), settings, "ring", exchange=Exchange(link) if link else None)


def steps(world, recipe, algorithm, start, stop):
    trainer = made(world, recipe, algorithm)
    path = world.folder / "state"
    if start:
        assert trainer.load(path)
        assert trainer.step == start
    trainer.run(until=stop)
    trainer.save(path if world.size > 1 else world.folder / "one")
    rows = torch.cat([block.x for block in trainer.replicas.blocks], dim=1)
    everyone = world.gather(rows).flatten(0, 1) if world.size > 1 else rows
    if world.rank == 0:
        torch.save({"x": everyone, "bytes": trainer.bytes}, world.folder / f"x-{stop}.pt")


@pytest.mark.parametrize(
    ("recipe", "algorithm"), [("momentum", "atc"), ("spared", "atc"), ("row by row", "atc"), ("plain", "qgm")]
)
def test_replicas_are_spread_anew(pool, tmp_path, recipe, algorithm):
    for size, start, stop in ((2, 0, 3), (4, 3, 6), (2, 6, 9)):
        case = {"recipe": recipe, "algorithm": algorithm, "start": start, "stop": stop}
        pool.check(size, steps, case, tmp_path)
    steps(World(0, 1, tmp_path), recipe, algorithm, 9, 12)  # from the folder into one process
    (tmp_path / "state").rename(tmp_path / "of-two")
    (tmp_path / "one").rename(tmp_path / "state")
    pool.check(4, steps_of_one, {"recipe": recipe, "algorithm": algorithm}, tmp_path)
    alone = made(World(0, 1, tmp_path), recipe, algorithm)
    for stop in (3, 6, 9, 12, 14):
        alone.run(until=stop)
        found = torch.load(tmp_path / f"x-{stop}.pt")
        close(found["x"], torch.cat([block.x for block in alone.replicas.blocks], dim=1), 1e-10)
        assert found["bytes"] == alone.bytes


def steps_of_one(world, recipe, algorithm):
    trainer = made(world, recipe, algorithm)
    assert trainer.load(world.folder / "state")
    trainer.run(until=14)
    rows = world.gather(torch.cat([block.x for block in trainer.replicas.blocks], dim=1)).flatten(0, 1)
    if world.rank == 0:
        torch.save({"x": rows, "bytes": trainer.bytes}, world.folder / "x-14.pt")
    if algorithm != "atc":
        return
    other = made(world, "momentum" if recipe == "spared" else "spared")
    with pytest.raises(GossamerError, match="made with other settings: "):
        other.load(world.folder / "state")
