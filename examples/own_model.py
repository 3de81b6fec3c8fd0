"""Benchmark your own model and data: python examples/own_model.py [OUT]"""

import sys

import torch
from torch import nn

from gossamer import Task
from gossamer.dbench import bench, report, spec


class MyModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x)


x = torch.randn(2200, 20, generator=torch.Generator().manual_seed(0))  # your inputs …
y = x[:, :3].argmax(dim=1)  # … and labels

if __name__ == "__main__":
    grid = spec.build(
        {
            "name": "my-model",
            "replicas": [8, 16],
            "methods": ["centralized", "ring", "one-peer-exponential", "ada"],
            "seeds": [0, 1],
            "task": {"name": "my-model", "epochs": 5, "batch": 4},
            "optimizer": {"lr": 0.2, "options": {"momentum": 0.9}},
        }
    )
    task = Task("my-model", MyModel, train=(x[:2000], y[:2000]), test=(x[2000:], y[2000:]))
    outcome = bench(grid, sys.argv[1] if len(sys.argv) > 1 else "runs/my-model", task=task)
    print(report.write(outcome.out))
