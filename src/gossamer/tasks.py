"""A Task is what is trained: a model, its loss, data, and the metric that says how good a model is."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from gossamer.backends import Batch, Loss
from gossamer.errors import GossamerError


@dataclass(frozen=True)
class Metric:
    """``score(model, *batch)`` gives one number per sample; the metric is their mean (through exp for a perplexity)."""

    name: str
    score: Callable[..., Tensor]
    higher_is_better: bool = True
    through: Literal["mean", "exp"] = "mean"

    def of(self, model: nn.Module, data: Batch, batch: int = 2048) -> float:
        """The metric of one model, which is in evaluation mode, over all of ``data``."""
        if not len(data[0]):
            raise GossamerError(f"there are no samples to take the {self.name} of: the test set is empty")
        total, count = 0.0, 0
        with torch.no_grad():
            for part in zip(*(tensor.split(batch) for tensor in data), strict=True):
                scores = self.score(model, *part)
                total += float(scores.double().sum())
                count += scores.numel()
        mean = total / count
        return mean if self.through == "mean" else math.exp(min(mean, 700.0))

    def worst(self, values: list[float]) -> float:
        return min(values) if self.higher_is_better else max(values)


def _accuracy(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return (model(x).argmax(dim=-1) == y).float()


def cross_entropy(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(x), y)


ACCURACY = Metric("accuracy", _accuracy)


@dataclass(frozen=True)
class Task:
    """``train`` and ``test`` are tuples of tensors with samples along dimension 0, as ``loss(model, *batch)`` takes them."""

    name: str
    build: Callable[[], nn.Module]
    train: Batch
    test: Batch
    loss: Loss = cross_entropy
    metric: Metric = ACCURACY
