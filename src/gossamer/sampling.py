"""Which samples each replica sees at each step: a pure function of (seed, step, replica), whatever ran before.

``reshuffled``             each epoch is a new random order of all samples, dealt out to the replicas
``shards``                 each replica keeps its own random share and reshuffles that
``dirichlet:alpha=0.3``    as shards, but how much of each label a replica gets is drawn from Dirichlet(alpha): small alpha, few labels
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from gossamer import seeds
from gossamer.backends import Batch
from gossamer.errors import GossamerError


class Sampler(ABC):
    """``batch`` samples per replica and step; an epoch is as many steps as see each sample about once."""

    def __init__(self, data: Batch, n: int, batch: int, seed: int) -> None:
        self.data, self.n, self.size, self.seed = data, n, batch, seed
        self.samples = len(data[0])
        if any(len(tensor) != self.samples for tensor in data):
            raise GossamerError(f"the tensors of a data set have {[len(t) for t in data]} samples; they must agree")
        if batch < 1:
            raise GossamerError(f"batch={batch} is out of range; each replica takes at least one sample per step")
        if self.samples < n:
            raise GossamerError(f"{self.samples} samples do not split over {n} replicas; use at most {self.samples} replicas")
        self.steps_per_epoch = self.samples // (n * batch)
        if self.steps_per_epoch == 0:
            raise GossamerError(
                f"{self.samples} samples do not split over {n} replicas × batch {batch} = {n * batch} per step; "
                f"use fewer replicas or a batch of at most {self.samples // n}"
            )
        self._epoch: tuple[int, Tensor] | None = None

    @abstractmethod
    def table(self, epoch: int) -> Tensor:
        """Sample indices ``[steps_per_epoch, n, batch]`` of one epoch."""

    def batch(self, step: int, first: int = 0, rows: int | None = None) -> Batch:
        """``[rows, batch, …]`` of each tensor: what replicas ``first`` to ``first + rows`` see at ``step``."""
        epoch, position = divmod(step, self.steps_per_epoch)
        if self._epoch is None or self._epoch[0] != epoch:
            self._epoch = (epoch, self.table(epoch).to(self.data[0].device))
        index = self._epoch[1][position, first : self.n if rows is None else first + rows]
        return tuple(tensor[index] for tensor in self.data)


class Reshuffled(Sampler):
    def table(self, epoch: int) -> Tensor:
        order = torch.randperm(self.samples, generator=seeds.generator(self.seed, epoch, -2))
        used = self.steps_per_epoch * self.n * self.size
        return order[:used].reshape(self.steps_per_epoch, self.n, self.size)


class Sharded(Sampler):
    """Replica i draws from ``shards[i]`` only, each time round in a new order; a small shard comes round more often."""

    def __init__(self, data: Batch, n: int, batch: int, seed: int, shards: Sequence[Tensor]) -> None:
        super().__init__(data, n, batch, seed)
        self.shards = shards

    def table(self, epoch: int) -> Tensor:
        count = self.steps_per_epoch * self.size
        return torch.stack([self._stream(i, epoch * count, count) for i in range(self.n)], dim=1)

    def _stream(self, i: int, start: int, count: int) -> Tensor:
        shard = self.shards[i]
        first, last = start // len(shard), (start + count - 1) // len(shard)
        rounds = [
            shard[torch.randperm(len(shard), generator=seeds.generator(self.seed, i, k, -3))] for k in range(first, last + 1)
        ]
        offset = start - first * len(shard)
        return torch.cat(rounds)[offset : offset + count].reshape(self.steps_per_epoch, self.size)


def even_shards(samples: int, n: int, seed: int) -> list[Tensor]:
    """A random split into n shares of (almost) the same size."""
    return list(torch.randperm(samples, generator=seeds.generator(seed, -4)).tensor_split(n))


def dirichlet_shards(labels: Tensor, n: int, alpha: float, seed: int) -> list[Tensor]:
    """For each label, the shares of the replicas are drawn from Dirichlet(alpha). Nobody is left without a sample."""
    rng = np.random.default_rng(seeds.derive(seed, -5))
    parts: list[list[int]] = [[] for _ in range(n)]
    for label in labels.unique().tolist():
        members = rng.permutation(torch.nonzero(labels == label).flatten().numpy())
        cuts = (np.cumsum(rng.dirichlet(np.full(n, alpha)))[:-1] * len(members)).round().astype(int)
        for part, share in zip(parts, np.split(members, cuts), strict=True):
            part.extend(share.tolist())
    for part in parts:
        while not part:
            part.append(max(parts, key=len).pop())
    return [torch.tensor(part) for part in parts]


def sampler(partition: str, data: Batch, n: int, batch: int, seed: int) -> Sampler:
    """The Sampler that a person names. The last tensor of ``data`` holds the labels."""
    name, _, option = partition.partition(":")
    if name == "reshuffled" and not option:
        return Reshuffled(data, n, batch, seed)
    if name == "shards" and not option:
        Reshuffled(data, n, batch, seed)  # refuses what can't be split, before it is
        return Sharded(data, n, batch, seed, even_shards(len(data[0]), n, seed))
    if name == "dirichlet":
        alpha = check_dirichlet(partition)
        labels = data[-1].cpu()
        if labels.ndim != 1 or labels.is_floating_point():
            raise GossamerError(f"partition {partition!r} needs one integer label per sample; this task has none")
        Reshuffled(data, n, batch, seed)
        return Sharded(data, n, batch, seed, dirichlet_shards(labels, n, alpha, seed))
    raise GossamerError(f"partition {partition!r} is not known; use reshuffled, shards or dirichlet:alpha=0.3")


def check_dirichlet(partition: str) -> float:
    key, _, value = partition.partition(":")[2].partition("=")
    try:
        alpha = float(value)
    except ValueError:
        alpha = 0.0
    if key.strip() != "alpha" or not 0 < alpha < float("inf"):
        raise GossamerError(f"partition {partition!r} is not of the form dirichlet:alpha=0.3 with alpha above 0")
    return alpha
