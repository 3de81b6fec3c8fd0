"""A Round is one averaging step ``X <- W X``: which replica receives from which, with which weight.

There are five kinds, because each has its own fast way to be applied (see ``mixing.py``); ``matrix()`` is the truth for
all of them. Every weight that replica i uses stands in row i of the matrix, and rows sum to 1.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np
import scipy.sparse
from scipy.sparse.csgraph import connected_components

Verb = Literal["none", "edges", "slices", "hosts"]
_SHARE_OF_8_BITS = 65 / 256  # of the bytes of float32: 64 numbers take 65 bytes (rows/codec.py)


@dataclass(frozen=True, eq=False)
class Round(ABC):
    n: int

    @abstractmethod
    def matrix(self) -> np.ndarray:
        """W as a float64 array ``[n, n]``."""

    @abstractmethod
    def neighbors(self, i: int) -> dict[int, float]:
        """What replica i receives: ``{peer: weight}``, its own weight included."""

    @property
    @abstractmethod
    def degree(self) -> int:
        """The largest number of other replicas that one replica receives from."""

    @property
    def span(self) -> int:
        """How many replicas one transfer by slices ties together: all of them, or a group."""
        return self.n

    def verb(self, edge_share: float = 1.0) -> Verb:
        """How rows travel between workers: neighbour by neighbour, or each worker's column slices to their owners and back.

        The cheaper one is taken; at equal cost edges, where a worker waits for its neighbours only. ``edge_share``: what a row by edges
        weighs against one by slices (0.5 for float32 rows that travel by edges in bfloat16).
        """
        if self.degree == 0:
            return "none"
        return "edges" if self.degree * edge_share <= self._slices() else "slices"

    def cost(self, row_bytes: int, edge_share: float = 1.0) -> int:
        """Bytes that the busiest replica receives when each row has its own worker. The only definition of bytes in Gossamer.

        By edges: one row from each neighbour. By slices: a mean (or any other W) over m workers costs 2(m-1)/m rows,
        as an all-reduce does.
        """
        return round(min(self.degree * edge_share, self._slices()) * row_bytes)

    def _slices(self) -> float:
        return 2 * (self.span - 1) / self.span


@dataclass(frozen=True)
class Mean(Round):
    """Each replica gets the mean of all: the complete graph. With n=1, the identity. ``bits``: 32 (rows travel as they are), or 8: what
    travels is how far each has moved since the last such mean, rounded (see ``movement.py``)."""

    bits: int = 32

    def matrix(self) -> np.ndarray:
        return np.full((self.n, self.n), 1 / self.n)

    def neighbors(self, i: int) -> dict[int, float]:
        return dict.fromkeys(range(self.n), 1 / self.n)

    @property
    def degree(self) -> int:
        return self.n - 1

    def verb(self, edge_share: float = 1.0) -> Verb:
        return super().verb(edge_share) if self.bits == 32 or self.n == 1 else "slices"

    def cost(self, row_bytes: int, edge_share: float = 1.0) -> int:
        return super().cost(row_bytes, edge_share) if self.bits == 32 else round(_SHARE_OF_8_BITS * self._slices() * row_bytes)


@dataclass(frozen=True)
class Window(Round):
    """The mean of oneself and the ``half`` nearest replicas on each side of a ring; 2·half + 1 < n."""

    half: int

    def matrix(self) -> np.ndarray:
        offset = (np.arange(self.n)[None, :] - np.arange(self.n)[:, None]) % self.n
        near = np.minimum(offset, self.n - offset) <= self.half
        return near / (2 * self.half + 1)

    def neighbors(self, i: int) -> dict[int, float]:
        width = 2 * self.half + 1
        return {(i + offset) % self.n: 1 / width for offset in range(-self.half, self.half + 1)}

    @property
    def degree(self) -> int:
        return 2 * self.half


@dataclass(frozen=True)
class Permutation(Round):
    """Replica i keeps 1 - weight of itself and takes ``weight`` of replica ``source[i]``; source is a permutation."""

    source: tuple[int, ...]
    weight: float = 0.5

    def matrix(self) -> np.ndarray:
        w = np.eye(self.n) * (1 - self.weight)
        w[np.arange(self.n), self.source] += self.weight
        return w

    def neighbors(self, i: int) -> dict[int, float]:
        if self.source[i] == i:
            return {i: 1.0}
        return {i: 1 - self.weight, self.source[i]: self.weight}

    @property
    def degree(self) -> int:
        return int(any(j != i for i, j in enumerate(self.source)))


@dataclass(frozen=True)
class Groups(Round):
    """Each replica gets the mean of its group; the groups partition the replicas."""

    groups: tuple[tuple[int, ...], ...]

    def matrix(self) -> np.ndarray:
        w = np.zeros((self.n, self.n))
        for group in self.groups:
            w[np.ix_(group, group)] = 1 / len(group)
        return w

    def neighbors(self, i: int) -> dict[int, float]:
        group = next(group for group in self.groups if i in group)
        return dict.fromkeys(group, 1 / len(group))

    @property
    def degree(self) -> int:
        return self.span - 1

    @cached_property
    def span(self) -> int:
        return max(len(group) for group in self.groups)


@dataclass(frozen=True, eq=False)
class Hosts(Round):
    """Replicas live ``per_node`` to a host. Each replica gets its host's mean, mixed with those of other hosts by ``inner``, a Round
    over the hosts in which each hears one other: W = inner ⊗ J/per_node."""

    per_node: int
    inner: Permutation

    def matrix(self) -> np.ndarray:
        return np.kron(self.inner.matrix(), np.full((self.per_node, self.per_node), 1 / self.per_node))

    def neighbors(self, i: int) -> dict[int, float]:
        m = self.per_node
        hosts = sorted(self.inner.neighbors(i // m).items())
        return {h * m + k: weight / m for h, weight in hosts for k in range(m)}

    @property
    def degree(self) -> int:
        return (self.inner.degree + 1) * self.per_node - 1

    def verb(self, edge_share: float = 1.0) -> Verb:
        return "hosts" if self.degree else "none"

    def cost(self, row_bytes: int, edge_share: float = 1.0) -> int:
        """A reduce-scatter and an all-gather inside the host; between hosts each worker carries its own part of the row."""
        m = self.per_node
        return round((2 * (m - 1) / m + self.inner.degree / m) * row_bytes)


@dataclass(frozen=True, eq=False)
class General(Round):
    """Any weights, kept sparse."""

    weights: scipy.sparse.csr_array

    def matrix(self) -> np.ndarray:
        return self.weights.toarray()

    def neighbors(self, i: int) -> dict[int, float]:
        start, end = self.weights.indptr[i : i + 2]
        pairs = zip(self.weights.indices[start:end], self.weights.data[start:end], strict=True)
        return {int(j): float(w) for j, w in pairs}

    @cached_property
    def span(self) -> int:
        """The largest set of replicas that hear of each other in this one step."""
        return int(np.bincount(connected_components(self.weights, directed=False)[1]).max())

    @cached_property
    def degree(self) -> int:
        off_diagonal = self.weights - scipy.sparse.diags_array(self.weights.diagonal(), format="csr")
        off_diagonal.eliminate_zeros()
        return int(np.diff(off_diagonal.tocsr().indptr).max(initial=0))


def identity(n: int) -> Round:
    return Mean(1) if n == 1 else Permutation(n, tuple(range(n)))


def general(matrix: np.ndarray | scipy.sparse.sparray) -> General:
    weights = scipy.sparse.csr_array(matrix, dtype=np.float64)
    weights.eliminate_zeros()
    weights.sort_indices()
    return General(weights.shape[0], weights)
