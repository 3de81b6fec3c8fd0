"""What test_ends.py runs in its workers, each in a launch of its own: the end of a process is what is looked at.

python -m tests.parallel.ends_driver FOLDER NAME
"""

import os
import signal
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn

from gossamer.checkpoints import checkpoint
from tests.world import TIMEOUT_SECONDS, World, loss_of, norm, train


class Lingering:
    """Makes the end of the interpreter last, as large programs do."""

    def __del__(self, sleep=time.sleep):
        sleep(2)


lingering = []


def one_rank_fails(world):
    """Rank 1 raises while rows are on their way. Rank 2 is waiting for it; rank 0 is late and meets a closed connection.

    Rank 1 is long in ending, so that a thread which still waited there would be woken in the middle of it.
    """
    model = world.model()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model.gossip(optimizer)
    train(world, model, optimizer, 3)
    if world.rank == 0:
        time.sleep(1.5)
    loss = loss_of(model, world.batch(3))
    if world.rank == 1:
        lingering.append(Lingering())
        raise ValueError("this worker has had enough")
    loss.backward()
    optimizer.step()


def leave_early(world):
    """Rank 0 hears rank 2 and is heard by rank 1, which is late: it leaves before rank 1 has taken what it sent from a copy."""
    model = world.model(nn.Linear(6, 300_000), "one-peer-exponential", wire="bfloat16")
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model.gossip(optimizer)
    for step in range(3):
        if step == 2 and world.rank == 1:
            time.sleep(1.5)
        model(world.batch(step)[0]).mean().backward()
        optimizer.step()


def resumable(world, folder, until, die_at=None):
    model = world.model(norm(), "one-peer-ring", local_steps=2)
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    model.gossip(optimizer)
    went_on = model.load(folder, {"lr": scheduler})
    if went_on:
        print("went on from", model.steps, flush=True)
    for step in range(model.steps, until):
        train(world, model, optimizer, 1, step)
        scheduler.step()
        if model.steps % 3 == 0:
            if model.steps == die_at and world.rank == 1:
                checkpoint.save = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # when its file would be written
            model.save(folder, {"lr": scheduler})
    return model.state_dict()


def killed(world):
    resumable(world, world.folder / "job", 12, die_at=9)


def resumed(world):
    went_on = resumable(world, world.folder / "job", 12)
    undisturbed = resumable(world, world.folder / "other", 12)
    for name, t in went_on.items():
        assert torch.equal(t, undisturbed[name]), name


ENDS = {end.__name__: end for end in (one_rank_fails, leave_early, killed, resumed)}


def main(folder, name):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=TIMEOUT_SECONDS))
    ENDS[name](World(dist.get_rank(), dist.get_world_size(), folder))


if __name__ == "__main__":
    import tests.no_compiler  # noqa: F401

    main(*sys.argv[1:])
