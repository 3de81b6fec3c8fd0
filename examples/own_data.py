"""A torch Dataset with two inputs, an own loss and an own metric: python examples/own_data.py"""

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from gossamer import Metric, Recipe, Settings, Task, Trainer


class Pairs(Dataset):
    """Two inputs and a target, as tensors, numbers or numpy arrays."""

    def __init__(self, samples: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.a, self.b = torch.randn(2, samples, 5, generator=generator)

    def __len__(self) -> int:
        return len(self.a)

    def __getitem__(self, k: int) -> tuple[Tensor, Tensor, Tensor]:
        return self.a[k], self.b[k], (self.a[k] * self.b[k]).sum()


class Similarity(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(5, 8), nn.Linear(5, 8)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return (self.left(a) * self.right(b)).sum(dim=-1)


def loss(model: nn.Module, a: Tensor, b: Tensor, target: Tensor) -> Tensor:
    return nn.functional.mse_loss(model(a, b), target)  # one number for the batch


def error(model: nn.Module, a: Tensor, b: Tensor, target: Tensor) -> Tensor:
    return (model(a, b) - target).abs()  # one number per sample: the metric is their mean


if __name__ == "__main__":
    metric = Metric("absolute error", error, higher_is_better=False)
    task = Task("similarity", Similarity, Pairs(2000, seed=0), Pairs(500, seed=1), loss, metric)
    trainer = Trainer(task, Settings(replicas=8, epochs=6, batch=8, optimizer=Recipe("sgd", 0.02)), "ring")
    trainer.on_epoch = lambda record: print(f"epoch {record.epoch}: {metric.name} {record.value:.3f}")
    trainer.run()
