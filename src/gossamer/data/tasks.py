"""A Task is what is trained: a model, its loss, data, and the metric that says how good a model is."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from gossamer.data.sampling import sampler
from gossamer.data.sources import Batch, Data, Loss, Source, source
from gossamer.errors import GossamerError


@dataclass(frozen=True)
class Metric:
    """``score(model, *batch)`` gives one number per sample; the metric is their mean (through exp for a perplexity)."""

    name: str
    score: Callable[..., Tensor]
    higher_is_better: bool = True
    through: Literal["mean", "exp"] = "mean"
    batch: int = 2048  # samples at a time

    def of(self, model: nn.Module, data: Data, most: int | None = None) -> float:
        """The metric of one model, which is in evaluation mode, over ``data`` (its first ``most`` samples)."""
        data = source(data)
        if not len(data):
            raise GossamerError(f"there are no samples to take the {self.name} of: the test set is empty")
        total, count = 0.0, 0
        with torch.no_grad():
            for scores in self.scores(model, data, most):
                total += float(scores.double().sum())
                count += scores.numel()
        return self._through(total / count)

    def by_label(self, model: nn.Module, data: Source) -> tuple[float, Tensor]:
        """The same, and the mean score of each label, NaN for one that is not there. For data with ``classes``."""
        labels, total, parts = data.classes, 0.0, []
        assert labels is not None
        with torch.no_grad():
            for scores in self.scores(model, data, None):
                total += float(scores.double().sum())
                parts.append(scores.double().flatten().cpu())
        counts = labels.bincount().double()
        sums = labels.bincount(torch.cat(parts), minlength=len(counts))
        return self._through(total / len(data)), sums / counts

    def of_labels(self, means: Tensor, shares: Tensor) -> float:
        """The metric on data in which labels have these shares. Labels of which nothing is known are left out."""
        width = min(len(means), len(shares))
        known = ~means[:width].isnan()
        weights = shares[:width].double() * known
        total = float(weights.sum())
        return self._through(float((weights * means[:width].nan_to_num()).sum()) / total) if total else math.nan

    def _through(self, mean: float) -> float:
        return mean if self.through == "mean" else math.exp(min(mean, 700.0))

    def scores(self, model: nn.Module, data: Source, most: int | None) -> Iterator[Tensor]:
        """Part by part. A model that carries a state from one part to the next has a metric with its own way of doing this."""
        for part in data.parts(self.batch, most):
            scores = self.score(model, *part)
            if not isinstance(scores, Tensor) or not scores.numel() or scores.numel() % len(part[0]):
                found = f"a tensor {list(scores.shape)}" if isinstance(scores, Tensor) else f"a {type(scores).__name__}"
                raise GossamerError(
                    f"metric {self.name!r}: score() returned {found} for {len(part[0])} samples; it gives one number per sample, and the "
                    "metric is their mean: leave out .mean() and float()"
                )
            yield scores

    def worst(self, values: list[float]) -> float:
        return min(values) if self.higher_is_better else max(values)


def _accuracy(model: nn.Module, *batch: Tensor) -> Tensor:
    *inputs, y = batch
    return (model(*inputs).argmax(dim=-1) == y).float()


def cross_entropy(model: nn.Module, *batch: Tensor) -> Tensor:
    """Of what the model makes of all but the last tensor, and the last one."""
    *inputs, y = batch
    return nn.functional.cross_entropy(model(*inputs), y)


ACCURACY = Metric("accuracy", _accuracy)


@dataclass(frozen=True)
class Evaluation:
    """The metric of the averaged model, the mean and the worst over the replicas, and the averaged model on training data. ``spread``: the
    standard deviation over the replicas. ``own``: the mean over the replicas of the metric on data with the labels of their own
    training data, if these are split for good and have labels."""

    value: float
    mean: float
    worst: float
    train: float
    spread: float = 0.0
    own: float | None = None


@dataclass(frozen=True)
class Task:
    """``train`` and ``test`` are tuples of tensors or numpy arrays with samples along dimension 0, as ``loss(model, *batch)`` takes them;
    or a torch Dataset, or the DataLoader of one; or a Source (see ``sources.py``)."""

    name: str
    build: Callable[[], nn.Module]
    train: Data
    test: Data
    loss: Loss = cross_entropy
    metric: Metric = ACCURACY

    def example(self, batch: int) -> Batch:
        """A training batch of one replica, as ``loss`` takes it."""
        return tuple(tensor[0] for tensor in sampler("reshuffled", self.train, 1, batch, 0).batch(0))
