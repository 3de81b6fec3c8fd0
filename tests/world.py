"""What a case of the tests has in a worker: its World, a small model, a few steps of training."""

from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from gossamer import DecentralizedDataParallel, GossamerError

SGD = {"lr": 0.1, "momentum": 0.9}
SGD_RECIPE = {"lr": 0.1, "options": {"momentum": 0.9}}  # the same for a Trainer
TIMEOUT_SECONDS = 10  # a case that fails on one worker must not hold the others for long


class World:
    """One worker's rank, the number of workers, and a folder that all workers of the case share."""

    def __init__(self, rank, size, folder):
        self.rank, self.size, self.folder = rank, size, Path(folder)
        self.models = []  # they live until all workers are done: one that is dropped closes its connections

    def model(self, module=None, graph="ring", timeout=TIMEOUT_SECONDS, **options):
        self.models.append(DecentralizedDataParallel(small() if module is None else module, graph, timeout=timeout, **options))
        return self.models[-1]

    def batch(self, step, rank=None, dtype=torch.float32):
        """This worker's inputs and targets of a step."""
        generator = torch.Generator().manual_seed(1000 * step + (self.rank if rank is None else rank))
        return torch.randn(4, 6, generator=generator, dtype=torch.float64).to(dtype), torch.randint(
            3, (4,), generator=generator
        )

    def gather(self, tensor):
        """All workers' tensors, by torch's own group."""
        if self.size == 1:
            return tensor.unsqueeze(0)
        parts = [torch.empty_like(tensor) for _ in range(self.size)]
        dist.all_gather(parts, tensor.contiguous())
        return torch.stack(parts)

    def rows(self, model):
        """All workers' parameters, ``[n, D]``."""
        return self.gather(flat(model))

    def gather_objects(self, thing):
        things = [thing] * self.size
        if self.size > 1:
            dist.all_gather_object(things, thing)
        return things

    def same(self, tensor):
        tensors = self.gather(tensor)
        return bool((tensors == tensors[0]).all())


class Norm(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.norm, self.out = nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)

    def forward(self, x):
        return self.out(self.norm(self.inner(x)))


class Gan(nn.Module):
    def __init__(self):
        super().__init__()
        self.generator, self.critic = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x):
        return self.critic(self.generator(x))


def small(dtype=torch.float32, seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)).to(dtype)


def norm():
    torch.manual_seed(0)
    return Norm()


def gan():
    torch.manual_seed(0)
    return Gan()


def flat(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def loss_of(model, batch):
    return F.cross_entropy(model(batch[0]).float() if batch[0].dtype != torch.float64 else model(batch[0]), batch[1])


def train(world, model, optimizer, steps, start=0):
    for step in range(start, start + steps):
        optimizer.zero_grad()
        loss_of(model, world.batch(step, dtype=next(model.parameters()).dtype)).backward()
        optimizer.step()


def close(a, b, tolerance=1e-6):
    worst = float((a.detach().double() - b.detach().double()).abs().max())
    assert worst <= tolerance, f"differ by {worst}"


def in_flight(model):
    """Whether rows are on their way. Then the model takes no other parameters; here it gets those that it has."""
    try:
        model.load_state_dict(model.state_dict())
        return False
    except GossamerError as error:
        if "before step()" in str(error):
            return True
        raise
