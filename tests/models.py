"""Small models and tasks for the tests."""

import functools

import torch
import torch.nn.functional as F
from torch import nn

from gossamer.data.tasks import Task
from gossamer.methods import METHODS

# Gossamer's own: benchmarks/field.py adds others when a test imports it.
OWN_METHODS = sorted(name for name, rule in METHODS.makers.items() if rule.__module__.startswith("gossamer."))


class Cnn(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.out = nn.Linear(4 * 16, 10)

    def forward(self, x):
        return self.out(F.max_pool2d(F.relu(self.norm(self.conv(x.unflatten(-2, (1, -1))))), 2).flatten(1))


class GroupNormCnn(Cnn):
    def __init__(self):
        super().__init__()
        self.norm = nn.GroupNorm(2, 4)


class Lstm(nn.Module):
    """Reads an 8×8 image row by row; its embedding of the row's brightest column is tied to nothing, its output is linear."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(8, 6)
        self.lstm = nn.LSTM(8 + 6, 12, num_layers=2, batch_first=True)
        self.out = nn.Linear(12, 10)

    def forward(self, x):
        return self.out(self.lstm(torch.cat([x, self.embed(x.argmax(-1))], dim=-1))[0][:, -1])


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(64, 64)
        self.second = nn.Linear(64, 64)
        self.second.weight = self.first.weight
        self.out = nn.Linear(64, 10)

    def forward(self, x):
        return self.out(F.relu(self.second(F.relu(self.first(x.flatten(1))))))


class Dropout(nn.Module):
    def __init__(self):
        super().__init__()
        self.out = nn.Linear(64, 10)

    def forward(self, x):
        return self.out(F.dropout(x.flatten(1), 0.5, self.training))


def mlp():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10))


@functools.cache
def task(build=mlp, samples=640, name="toy"):
    """A made-up classification of 8×8 images that can be learned."""
    generator = torch.Generator().manual_seed(7)
    centres = torch.randn(10, 8, 8, generator=generator)
    y = torch.randint(0, 10, (samples + 200,), generator=generator)
    x = centres[y] + 0.7 * torch.randn(samples + 200, 8, 8, generator=generator)
    return Task(name, build, (x[:samples], y[:samples]), (x[samples:], y[samples:]))


def stopped_and_loaded(make, stop, path):
    """One trainer that was saved at step ``stop`` and has gone on to the end, and another that has loaded what was saved."""
    first, second = make(), make()
    first.run(until=stop)
    first.save(path)
    first.run()
    second.load(path)
    return first, second
