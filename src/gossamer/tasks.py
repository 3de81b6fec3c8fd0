"""A Task is what is trained: a model, its loss, data, and the metric that says how good a model is."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from gossamer import seeds
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


class Reshuffled:
    """Each epoch is a new random order of all samples, dealt out to n replicas. A pure function of (seed, step)."""

    def __init__(self, data: Batch, n: int, batch: int, seed: int) -> None:
        self.data, self.n, self.size, self.seed = data, n, batch, seed
        samples = len(data[0])
        if any(len(tensor) != samples for tensor in data):
            raise GossamerError(f"the tensors of a data set have {[len(t) for t in data]} samples; they must agree")
        if batch < 1:
            raise GossamerError(f"batch={batch} is out of range; each replica takes at least one sample per step")
        self.steps_per_epoch = samples // (n * batch)
        if self.steps_per_epoch == 0:
            raise GossamerError(
                f"{samples} samples do not split over {n} replicas × batch {batch} = {n * batch} per step; "
                f"use fewer replicas or a batch of at most {samples // n}"
                if samples >= n
                else f"{samples} samples do not split over {n} replicas; use at most {samples} replicas"
            )
        self._epoch: tuple[int, Tensor] | None = None

    def batch(self, step: int, first: int = 0, rows: int | None = None) -> Batch:
        """``[rows, batch, …]`` of each tensor: what replicas ``first`` to ``first + rows`` see at ``step``."""
        epoch, position = divmod(step, self.steps_per_epoch)
        if self._epoch is None or self._epoch[0] != epoch:
            order = torch.randperm(len(self.data[0]), generator=seeds.generator(self.seed, epoch, -2))
            self._epoch = (epoch, order.to(self.data[0].device))
        per_step = self.n * self.size
        index = self._epoch[1][position * per_step : (position + 1) * per_step].reshape(self.n, self.size)
        index = index[first : self.n if rows is None else first + rows]
        return tuple(tensor[index] for tensor in self.data)
