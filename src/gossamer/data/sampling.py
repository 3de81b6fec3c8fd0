"""Which samples each replica sees at each step: a pure function of (seed, step, replica), whatever ran before.

``reshuffled``             each epoch is a new random order of all samples, dealt out to the replicas
``shards``                 each replica keeps its own random share and reshuffles that
``dirichlet:alpha=0.3``    as shards, but how much of each label a replica gets is drawn from Dirichlet(alpha): small alpha, few labels
``dirichlet-equal:…``      the same by the literature's recipe: all replicas hold the same number of samples
``classes:k=4``            as shards, with samples of k labels on each replica
``unequal:alpha=1``        as shards, of sizes that are drawn from Dirichlet(alpha)
``groups``                 whole groups (a writer, a file) on one replica each, for sources that know them
``file:path=split.safetensors``    a split that was saved (``partitions.py``)

A text is read in order instead: see :class:`Streams`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from gossamer.data import partitions, seeds
from gossamer.data.partitions import Shards
from gossamer.data.sources import Batch, Data, Draw, Source, Text, source
from gossamer.errors import GossamerError
from gossamer.spelling import Registry, plain_name


class Sampler(ABC):
    """``batch`` samples per replica and step; an epoch is as many steps as see each sample about once."""

    def __init__(self, data: Data, n: int, batch: int, seed: int) -> None:
        self.data, self.n, self.size, self.seed = source(data), n, batch, seed
        self.samples = len(self.data)
        if batch < 1:
            raise GossamerError(f"batch={batch} is out of range; each replica takes at least one sample per step")
        self.steps_per_epoch = self._steps()
        self._epoch: tuple[int, Tensor] | None = None

    def _steps(self) -> int:
        n, batch = self.n, self.size
        if self.samples < n:
            raise GossamerError(f"{self.samples} samples do not split over {n} replicas; use at most {self.samples} replicas")
        steps = self.samples // (n * batch)
        if steps == 0:
            raise GossamerError(
                f"{self.samples} samples do not split over {n} replicas × batch {batch} = {n * batch} per step; "
                f"use fewer replicas or a batch of at most {self.samples // n}"
            )
        return steps

    def label_counts(self) -> list[Tensor] | None:
        """Of each replica's own samples, how many have which label; None if any replica may see any sample, or there are no labels."""
        return None

    @abstractmethod
    def table(self, epoch: int) -> Tensor:
        """Sample indices ``[steps_per_epoch, n, batch]`` of one epoch."""

    def batch(self, step: int, first: int = 0, rows: int | None = None) -> Batch:
        """``[rows, batch, …]`` of each tensor: what replicas ``first`` to ``first + rows`` see at ``step``."""
        epoch, position = divmod(step, self.steps_per_epoch)
        if self._epoch is None or self._epoch[0] != epoch:
            self._epoch = (epoch, self.table(epoch))
        index = self._epoch[1][position, first : self.n if rows is None else first + rows]
        return self.data.draw(index, Draw(self.seed, step, first))


class Reshuffled(Sampler):
    def table(self, epoch: int) -> Tensor:
        order = torch.randperm(self.samples, generator=seeds.generator(self.seed, epoch, -2))
        used = self.steps_per_epoch * self.n * self.size
        return order[:used].reshape(self.steps_per_epoch, self.n, self.size)


class Sharded(Sampler):
    """Replica i draws from ``shards[i]`` only, each time round in a new order; a small shard comes round more often."""

    def __init__(self, data: Data, n: int, batch: int, seed: int, shards: Sequence[Tensor]) -> None:
        super().__init__(data, n, batch, seed)
        self.shards = shards

    def table(self, epoch: int) -> Tensor:
        count = self.steps_per_epoch * self.size
        return torch.stack([self._stream(i, epoch * count, count) for i in range(self.n)], dim=1)

    def label_counts(self) -> list[Tensor] | None:
        labels = self.data.classes
        return None if labels is None else [labels[shard].bincount() for shard in self.shards]

    def _stream(self, i: int, start: int, count: int) -> Tensor:
        shard = self.shards[i]
        first, last = start // len(shard), (start + count - 1) // len(shard)
        rounds = [
            shard[torch.randperm(len(shard), generator=seeds.generator(self.seed, i, k, -3))] for k in range(first, last + 1)
        ]
        offset = start - first * len(shard)
        return torch.cat(rounds)[offset : offset + count].reshape(self.steps_per_epoch, self.size)


class Streams(Sampler):
    """A text is cut into n × ``batch`` streams of equal length, and each step reads the next window of each: so a recurrent model
    can carry its state from step to step. ``reshuffled``: which streams a replica reads is drawn anew each epoch; ``shards``:
    always the same. A third tensor says, for each replica, whether this is the first window of an epoch."""

    def __init__(self, data: Text, n: int, batch: int, seed: int, reshuffled: bool) -> None:
        self.window, self.reshuffled = data.window, reshuffled
        super().__init__(data, n, batch, seed)

    def _steps(self) -> int:
        self.length = (self.samples + self.window - 1) // (self.n * self.size)  # predictions in one stream
        steps = self.length // self.window
        if steps == 0:
            raise GossamerError(
                f"a text of {self.samples + self.window} tokens does not split over {self.n} replicas × batch {self.size} with "
                f"windows of {self.window} tokens; use fewer replicas, a smaller batch or a shorter window"
            )
        return steps

    def table(self, epoch: int) -> Tensor:
        count = self.n * self.size
        order = torch.arange(count)
        if self.reshuffled:
            order = torch.randperm(count, generator=seeds.generator(self.seed, epoch, -2))
        starts = torch.arange(self.steps_per_epoch).unsqueeze(1) * self.window + order * self.length
        return starts.reshape(self.steps_per_epoch, self.n, self.size)

    def batch(self, step: int, first: int = 0, rows: int | None = None) -> Batch:
        made = super().batch(step, first, rows)
        fresh = torch.full((len(made[0]),), step % self.steps_per_epoch == 0, device=made[0].device)
        return (*made, fresh)


def sampler(partition: str, data: Data, n: int, batch: int, seed: int) -> Sampler:
    """The Sampler that a person names."""
    data = source(data)
    name = plain_name(check_partition(partition))
    if isinstance(data, Text):
        if name not in ("reshuffled", "shards"):
            raise GossamerError(f"partition {partition!r} is not for a text, which has no labels; use reshuffled or shards")
        return Streams(data, n, batch, seed, name == "reshuffled")
    whole = Reshuffled(data, n, batch, seed)  # refuses what can't be split, before it is
    if name == "reshuffled":
        return whole
    return Sharded(data, n, batch, seed, _PARTITIONS.make(partition, data, n, seed))


def check_partition(partition: str) -> str:
    """The same text, if it is right."""
    _, options = _PARTITIONS.read(partition)
    if not 0 < options.get("alpha", 1) < float("inf"):
        raise GossamerError(f"partition {partition!r} is not of the form dirichlet:alpha=0.3 with alpha above 0")
    if options.get("k", 1) < 1:
        raise GossamerError(f"partition {partition!r}: each replica holds at least one label, so k is at least 1")
    return partition


def _by(data: Source, what: str) -> Tensor:
    """One integer per sample: its label, or its group."""
    found: Tensor | None = getattr(data, what)
    if found is None:
        raise GossamerError(f"this partition needs one integer {what[:-1]} per sample; this task has none")
    return found.cpu()


def _reshuffled(data: Source, n: int, seed: int) -> Shards:
    """Every replica may see every sample."""
    return [torch.arange(len(data))] * n


def _shards(data: Source, n: int, seed: int) -> Shards:
    return partitions.even(len(data), n, seed)


def _unequal(data: Source, n: int, seed: int, alpha: float = 1.0) -> Shards:
    return partitions.unequal(len(data), n, alpha, seed)


def _dirichlet(data: Source, n: int, seed: int, alpha: float) -> Shards:
    return partitions.dirichlet(_by(data, "labels"), n, alpha, seed)


def _dirichlet_equal(data: Source, n: int, seed: int, alpha: float) -> Shards:
    return partitions.dirichlet_equal(_by(data, "labels"), n, alpha, seed)


def _classes(data: Source, n: int, seed: int, k: int) -> Shards:
    return partitions.classes(_by(data, "labels"), n, k, seed)


def _groups(data: Source, n: int, seed: int) -> Shards:
    return partitions.groups(_by(data, "groups"), n, seed)


def _file(data: Source, n: int, seed: int, path: str) -> Shards:
    return partitions.load(Path(path), len(data), n)


_PARTITIONS: Registry[Shards] = Registry(
    "partition",
    {
        "reshuffled": _reshuffled,
        "shards": _shards,
        "unequal": _unequal,
        "dirichlet": _dirichlet,
        "dirichlet-equal": _dirichlet_equal,
        "classes": _classes,
        "groups": _groups,
        "file": _file,
    },
    own=("n", "seed"),
)
