"""Two workers train a few steps and log to all loggers at once; nothing is closed by hand. FOLDER gets what they were told."""

import importlib
import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from gossamer.integrations.loggers import MLflow, TensorBoard, Trackio, WandB
from tests.world import World, train

if __name__ == "__main__":
    folder = Path(sys.argv[1])
    dist.init_process_group("gloo")
    if dist.get_rank() == 0:  # they take long to import, and the end of a process waits for its loggers for half a minute only
        for package in ("mlflow", "torch.utils.tensorboard", "trackio", "wandb"):
            importlib.import_module(package)
    world = World(dist.get_rank(), dist.get_world_size(), folder)
    loggers = [
        TensorBoard(folder / "tensorboard"),
        WandB("gossip", "first", dir=str(folder)),
        MLflow("gossip", "first", uri=(folder / "mlflow").as_uri()),
        Trackio("gossip", "first"),
    ]
    told = []

    def log(numbers, step):
        told.append([step, numbers])
        for logger in loggers:
            logger(numbers, step)

    model = world.model(graph="ring")
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model.gossip(optimizer, log=log, profile_every=2)
    train(world, model, optimizer, 5)
    dist.barrier()
    (folder / f"told-{world.rank}.json").write_text(json.dumps(told))
