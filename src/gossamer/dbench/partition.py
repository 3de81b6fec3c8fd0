"""How the labels of the training data are split over the replicas: counted when a bench starts, kept in the store for the report."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

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


def keep(store: Store, spec: Spec, task: Task) -> None:
    """Count and store, unless that is done already or the samples are not split for good."""
    if store.meta(_KEY) is None:
        made = split(spec, task)
        if made is not None:
            store.set_meta(_KEY, asdict(made))


def kept(store: Store) -> Partition | None:
    raw: dict[str, Any] | None = store.meta(_KEY)
    if raw is None:
        return None
    by_replicas = {key: {int(n): value for n, value in raw[key].items()} for key in ("counts", "kinds")}
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
    counts, kinds = {}, {}
    for n in spec.replicas:
        settings = spec.settings(Cell(spec.methods[0].name, n, spec.seeds[0]))
        made = sampler(settings.partition, task.train, n, settings.batch, settings.seed)
        assert isinstance(made, Sharded)
        table = torch.stack([numbers[shard].bincount(minlength=len(names)) for shard in made.shards], dim=1)
        kinds[n] = (table > 0).sum(0).tolist()
        counts[n] = torch.stack([part.sum(0) for part in table.split(width)]).tolist()
    shown = [str(a) if a == b else f"{a}–{b}" for a, b in ends]
    return Partition(spec.task.partition, spec.seeds[0], shown, len(names), counts, kinds)


def sentence(partition: Partition, n: int) -> str:
    sizes, kinds = np.sum(partition.counts[n], axis=0), partition.kinds[n]
    return (
        f"The training data is split for good ({partition.name}): at n={n}, seed {partition.seed}, a replica holds "
        f"{sizes.min()} to {sizes.max()} samples (mean {sizes.mean():.0f}) "
        f"of {min(kinds)} to {max(kinds)} labels (mean {np.mean(kinds):.1f} of {partition.distinct})."
    )
