"""How good is it? The metric of the averaged model, and of single replicas."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn

from gossamer.data import seeds
from gossamer.data.sources import Draw
from gossamer.rows import batch_norm

if TYPE_CHECKING:
    from gossamer.trainer.loop import Trainer

_REESTIMATE, _REESTIMATE_BATCH = 2048, 128  # training samples with which BatchNorm's statistics are estimated anew


@dataclass(frozen=True)
class Evaluation:
    """The metric of the averaged model, the mean and the worst over the replicas, and the averaged model on training data."""

    value: float
    mean: float
    worst: float
    train: float


def evaluate(trainer: Trainer, stop: Callable[[], bool], singles: int | None) -> Evaluation | None:
    """None if ``stop()`` says so meanwhile. Several processes can't agree on that here, so they go on."""
    replicas, metric, start = trainer.replicas, trainer.task.metric, trainer.mixer.rows.start
    r = replicas.r
    n = r * (trainer.exchange.size if trainer.exchange is not None else 1)
    some = n if singles is None else max(1, min(singles, n))
    chosen = {k * n // some for k in range(some)}
    mine, last = [math.nan] * r, -1
    for i in range(r):
        if start + i in chosen:
            if trainer.exchange is None and stop():
                return None
            if last >= 0 and replicas.alike(i, last):
                mine[i] = mine[last]
            else:
                with replicas.replica(i) as model:
                    mine[i] = metric.of(model, trainer.test)
            last = i
    everyone = trainer.mixer.gather(torch.tensor(mine, dtype=torch.float64), "evaluate").tolist()
    values = [everyone[k] for k in sorted(chosen)]
    with averaged(trainer) as model:
        value = metric.of(model, trainer.test)
        seen = metric.of(model, trainer.train, len(trainer.test))
    return Evaluation(value, sum(values) / len(values), metric.worst(values), seen)


@contextlib.contextmanager
def averaged(trainer: Trainer) -> Iterator[nn.Module]:
    """The averaged model, in evaluation mode, for as long as the block lasts. All processes take part."""
    with trainer.replicas.averaged(trainer.mixer.mean) as model:
        if trainer.settings.batch_norm == "reestimate" and batch_norm.layers(model):
            with seeds.undisturbed(trainer.device):  # dropout may draw
                batch_norm.reestimate(model, _passes(trainer, model))
        yield model


def _passes(trainer: Trainer, model: nn.Module) -> Iterator[Callable[[], object]]:
    """Some training data, the same ones each time and in every process."""
    seed, train = trainer.settings.seed, trainer.train
    some = torch.randperm(len(train), generator=seeds.generator(seed, -7))[:_REESTIMATE]
    parts = [part for part in some.split(_REESTIMATE_BATCH) if len(part) > 1 or len(some) == 1]
    for k, part in enumerate(parts):
        seeds.set_default(seeds.derive(seed, -8, k), trainer.device)
        (batch,) = zip(*train.draw(part.unsqueeze(0), Draw(seed, -1 - k, 0)), strict=True)
        yield functools.partial(trainer.task.loss, model, *batch)
