"""How samples are split over the replicas for good: each function returns the numbers of the samples that each replica holds.

A split can be written to a file, read again (``file:path=split.safetensors``), and told apart from others by its hash.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import safetensors.torch
import torch
from torch import Tensor

from gossamer.data import seeds
from gossamer.errors import GossamerError

_TRIES = 1000
_BLOCK = 10  # replicas of a block in the literature's recipe

Shards = list[Tensor]


def even(samples: int, n: int, seed: int) -> Shards:
    """A random split into n shares of (almost) the same size."""
    return list(torch.randperm(samples, generator=seeds.generator(seed, -4)).tensor_split(n))


def unequal(samples: int, n: int, alpha: float, seed: int) -> Shards:
    """A random split whose sizes are drawn from Dirichlet(alpha). No replica is left without a sample."""
    rng = np.random.default_rng(seeds.derive(seed, -9))
    cuts = (np.cumsum(rng.dirichlet(np.full(n, alpha)))[:-1] * samples).round().astype(int)
    return _none_empty([part.tolist() for part in np.split(rng.permutation(samples), cuts)])


def dirichlet(labels: Tensor, n: int, alpha: float, seed: int) -> Shards:
    """For each label, the shares of the replicas are drawn from Dirichlet(alpha). No replica is left without a sample."""
    rng = np.random.default_rng(seeds.derive(seed, -5))
    parts: list[list[int]] = [[] for _ in range(n)]
    for label in labels.unique().tolist():
        members = rng.permutation(torch.nonzero(labels == label).flatten().numpy())
        cuts = (np.cumsum(rng.dirichlet(np.full(n, alpha)))[:-1] * len(members)).round().astype(int)
        for part, share in zip(parts, np.split(members, cuts), strict=True):
            part.extend(share.tolist())
    return _none_empty(parts)


def dirichlet_equal(labels: Tensor, n: int, alpha: float, seed: int) -> Shards:
    """The recipe of the literature (quasi-global momentum's code, and those that reuse it): all replicas hold the same number of samples.

    Shuffled samples are cut into blocks for 10 replicas each. In a block, the shares of each label are drawn from Dirichlet(alpha) over
    those replicas that do not have their even share yet; a block is drawn again until its smallest replica has half of that. Then all
    lists are put together and cut into n parts of the same size, so boundaries shift a little.
    """
    rng = np.random.default_rng(seeds.derive(seed, -10))
    order = rng.permutation(len(labels))
    kinds = labels.numpy()
    dealt: list[int] = []
    for first in range(0, n, _BLOCK):
        count = min(_BLOCK, n - first)
        block = order[len(labels) * first // n : len(labels) * (first + count) // n]
        for part in _block(kinds, block, count, alpha, rng):
            dealt += part
    return list(torch.tensor(dealt).tensor_split(n))


def _block(kinds: np.ndarray, block: np.ndarray, count: int, alpha: float, rng: np.random.Generator) -> list[list[int]]:
    enough = len(block) / count
    for _ in range(_TRIES):
        parts: list[list[int]] = [[] for _ in range(count)]
        for label in np.unique(kinds):
            members = rng.permutation(block[kinds[block] == label])
            shares = rng.dirichlet(np.full(count, alpha)) * [len(part) < enough for part in parts]
            total = shares.sum()
            cuts = (np.cumsum(shares / total if total > 0 else np.full(count, 1 / count))[:-1] * len(members)).astype(int)
            for part, share in zip(parts, np.split(members, cuts), strict=True):
                part += share.tolist()
        if min(map(len, parts)) >= enough / 2:
            return parts
    raise GossamerError(
        f"partition 'dirichlet-equal:alpha={alpha:g}': in {_TRIES} draws some replica got less than half of its even share; "
        "use a larger alpha, or 'dirichlet', which allows that"
    )


def classes(labels: Tensor, n: int, k: int, seed: int) -> Shards:
    """Each replica holds samples of k labels only, and each label is on as many replicas as any other, or one more."""
    kinds = labels.unique().tolist()
    if not 1 <= k <= len(kinds):
        raise GossamerError(f"partition 'classes:k={k}': there are {len(kinds)} labels, so k is from 1 to {len(kinds)}")
    if n * k < len(kinds):
        raise GossamerError(
            f"partition 'classes:k={k}': {n} replicas with {k} labels each leave some of {len(kinds)} out; use a larger k"
        )
    rng = np.random.default_rng(seeds.derive(seed, -11))
    order = rng.permutation(kinds).tolist()
    holders: dict[int, list[int]] = {label: [] for label in order}
    for i, replica in enumerate(rng.permutation(n).tolist()):
        for j in range(k):
            holders[order[(i * k + j) % len(order)]].append(replica)
    parts: list[list[int]] = [[] for _ in range(n)]
    for label, replicas in holders.items():
        members = rng.permutation(torch.nonzero(labels == label).flatten().numpy())
        for replica, share in zip(replicas, np.array_split(members, len(replicas)), strict=True):
            parts[replica] += share.tolist()
    return _none_empty(parts)


def groups(of: Tensor, n: int, seed: int) -> Shards:
    """Whole groups (a writer, a file) go to one replica each, the largest first, to the replica that has the fewest samples."""
    names, counts = of.unique(return_counts=True)
    if len(names) < n:
        raise GossamerError(
            f"partition 'groups': {len(names)} groups do not split over {n} replicas; use at most {len(names)} replicas"
        )
    rng = np.random.default_rng(seeds.derive(seed, -12))
    shuffled = rng.permutation(len(names))
    parts: list[list[Tensor]] = [[] for _ in range(n)]
    sizes = [0] * n
    for at in sorted(shuffled.tolist(), key=lambda at: -int(counts[at])):
        replica = min(range(n), key=lambda i: sizes[i])
        parts[replica].append(torch.nonzero(of == names[at]).flatten())
        sizes[replica] += int(counts[at])
    return [torch.cat(part) for part in parts]


def _none_empty(parts: Sequence[list[int]]) -> Shards:
    for part in parts:
        while not part:
            part.append(max(parts, key=len).pop())
    return [torch.tensor(part) for part in parts]


# --- Splits as files ------------------------------------------------------------------------------------------------------------------


def digest(shards: Sequence[Tensor]) -> str:
    """The same for the same split only."""
    made = hashlib.sha256()
    for shard in shards:
        made.update(len(shard).to_bytes(8, "little") + shard.long().numpy().tobytes())
    return made.hexdigest()[:16]


def save(shards: Sequence[Tensor], path: Path) -> None:
    tensors = {
        "samples": torch.cat([shard.long() for shard in shards]),
        "sizes": torch.tensor([len(shard) for shard in shards]),
    }
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    safetensors.torch.save_file(tensors, partial, {"digest": digest(shards)})
    partial.replace(path)


def load(path: Path, samples: int, n: int) -> Shards:
    """Refuses a split that is damaged, or of other data, or for another number of replicas."""
    try:
        with safetensors.safe_open(path, "pt") as file:
            stated, numbers = (file.metadata() or {})["digest"], file.get_tensor("samples").long()
            sizes = file.get_tensor("sizes").long().tolist()
    except (OSError, ValueError, KeyError, TypeError, safetensors.SafetensorError) as error:
        raise GossamerError(f"partition 'file:path={path}' can't be read: {type(error).__name__}: {error}") from None
    if len(sizes) != n:
        raise GossamerError(f"partition 'file:path={path}' is for {len(sizes)} replicas, and there are {n}")
    if min(sizes) < 1 or sum(sizes) != len(numbers):
        raise GossamerError(f"partition 'file:path={path}' is damaged: its sizes do not add up")
    shards = list(numbers.split(sizes))
    if digest(shards) != stated:
        raise GossamerError(f"partition 'file:path={path}' is damaged: its hash is {digest(shards)}, and it says {stated}")
    if int(numbers.min()) < 0 or int(numbers.max()) >= samples or len(numbers.unique()) < len(numbers):
        raise GossamerError(
            f"partition 'file:path={path}' is of other data: it names samples beyond {samples - 1}, or one twice"
        )
    return shards
