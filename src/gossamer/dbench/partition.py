"""How the training data is split over the replicas: saved when a bench starts, and its labels counted in the store for the report."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch

from gossamer.data import partitions
from gossamer.data.sampling import Sharded, sampler
from gossamer.data.sources import source
from gossamer.data.tasks import Task
from gossamer.dbench.spec import Cell, Spec
from gossamer.dbench.store import Store
from gossamer.spelling import plain_name

_KEY = "partition"
_MOST = 100  # labels that a picture shows; more are put together, neighbours with neighbours


@dataclass(frozen=True)
class Partition:
    """Of one seed, the first: ``counts[n]`` is ``[labels, n]``, the samples of each label that each of n replicas holds."""

    name: str
    seed: int
    labels: list[str]
    distinct: int  # labels before they were put together
    counts: dict[int, list[list[int]]]
    kinds: dict[int, list[int]]  # how many labels each replica has
    digests: dict[int, str] = field(default_factory=dict)  # of the split, by n; stores of older versions have none


def keep(store: Store, spec: Spec, task: Task) -> None:
    """Count and store, unless that is done already or the samples are not split for good. Each split becomes a file beside the store."""
    if store.meta(_KEY) is None and plain_name(spec.task.partition) != "reshuffled":
        for n in spec.replicas:
            for seed in spec.seeds:
                if (shards := _shards(spec, task, n, seed)) is not None:
                    partitions.save(shards, store.path.parent / file_name(n, seed))
        made = split(spec, task)
        if made is not None:
            store.set_meta(_KEY, asdict(made))


def file_name(n: int, seed: int) -> str:
    return f"split-n{n}-seed{seed}.safetensors"


def _shards(spec: Spec, task: Task, n: int, seed: int) -> partitions.Shards | None:
    """None for a text, whose streams are no samples."""
    settings = spec.settings(Cell(spec.methods[0].name, n, seed))
    made = sampler(settings.partition, task.train, n, settings.batch, settings.seed)
    return list(made.shards) if isinstance(made, Sharded) else None


def kept(store: Store) -> Partition | None:
    raw: dict[str, Any] | None = store.meta(_KEY)
    if raw is None:
        return None
    by_replicas = {key: {int(n): value for n, value in raw.get(key, {}).items()} for key in ("counts", "kinds", "digests")}
    return Partition(**(raw | by_replicas))


def split(spec: Spec, task: Task) -> Partition | None:
    """None if every replica may see every sample, or if there is not one label per sample."""
    labels = source(task.train).labels
    if plain_name(spec.task.partition) == "reshuffled" or labels is None:
        return None
    names, numbers = labels.cpu().unique(return_inverse=True)
    width = -(-len(names) // _MOST)
    groups = -(-len(names) // width)
    ends = [(int(names[k * width]), int(names[min((k + 1) * width, len(names)) - 1])) for k in range(groups)]
    counts, kinds, digests = {}, {}, {}
    for n in spec.replicas:
        shards = _shards(spec, task, n, spec.seeds[0])
        assert shards is not None
        digests[n] = partitions.digest(shards)
        table = torch.stack([numbers[shard].bincount(minlength=len(names)) for shard in shards], dim=1)
        kinds[n] = (table > 0).sum(0).tolist()
        counts[n] = torch.stack([part.sum(0) for part in table.split(width)]).tolist()
    shown = [str(a) if a == b else f"{a}–{b}" for a, b in ends]
    return Partition(spec.task.partition, spec.seeds[0], shown, len(names), counts, kinds, digests)


def sentence(partition: Partition, n: int) -> str:
    sizes, kinds = np.sum(partition.counts[n], axis=0), partition.kinds[n]
    return (
        f"The training data is split for good ({partition.name}): at n={n}, seed {partition.seed}, a replica holds "
        f"{sizes.min()} to {sizes.max()} samples (mean {sizes.mean():.0f}) "
        f"of {min(kinds)} to {max(kinds)} labels (mean {np.mean(kinds):.1f} of {partition.distinct})."
        + (
            f" Its hash is {digest}; the file is {file_name(n, partition.seed)}."
            if (digest := partition.digests.get(n))
            else ""
        )
    )
