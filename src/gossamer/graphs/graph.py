"""A Graph is a cycle of Rounds for n replicas. ``graph.round(t)`` is a pure function of t, so both ends of every edge know
it without talking."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from gossamer.errors import GossamerError
from gossamer.graphs.rounds import General, Round, general, identity

_EXACT = 1e-12  # a product this near to the exact mean is the exact mean


@dataclass(frozen=True)
class Graph:
    """``rounds`` repeat for ever: step t uses ``rounds[t % period]``."""

    name: str
    rounds: tuple[Round, ...] = field(repr=False)

    @property
    def n(self) -> int:
        return self.rounds[0].n

    @property
    def period(self) -> int:
        return len(self.rounds)

    def round(self, t: int, every: int = 1) -> Round:
        """``every``: only the last of so many steps has a Round of the graph. In the others each replica keeps what it has."""
        return identity(self.n) if (t + 1) % every else self.rounds[t // every % self.period]

    def matrix(self, t: int = 0) -> np.ndarray:
        return self.round(t).matrix()

    def neighbors(self, i: int, t: int = 0) -> dict[int, float]:
        """``{peer: weight}`` that replica i receives at step t, its own weight included."""
        if not 0 <= i < self.n:
            raise GossamerError(f"graph {self.name!r} has replicas 0 to {self.n - 1}; there is no replica {i}")
        return self.round(t).neighbors(i)

    def degree(self, t: int = 0) -> int:
        """The largest number of other replicas that one replica receives from at step t."""
        return self.round(t).degree

    def mean_degree(self) -> float:
        """``degree`` averaged over one period: the "number of connections" of a time-varying graph."""
        return sum(r.degree for r in self.rounds) / self.period

    def cost(self, row_bytes: int) -> float:
        """Bytes per replica and step, averaged over one period."""
        return sum(r.cost(row_bytes) for r in self.rounds) / self.period

    @cached_property
    def rows_sum_to_one(self) -> bool:
        """What a replica receives is an average."""
        return all(_sum_to_one(r, axis=1) for r in self.rounds)

    @cached_property
    def columns_sum_to_one(self) -> bool:
        """Averaging keeps the mean of all."""
        return all(_sum_to_one(r, axis=0) for r in self.rounds)

    def is_doubly_stochastic(self) -> bool:
        return self.rows_sum_to_one and self.columns_sum_to_one

    def spectral_gap(self) -> float:
        """1 - ‖W_T…W_1 - J‖₂^(1/T) over one period T, J = 11ᵀ/n: 1 is exact averaging, 0 is none.

        For a graph that is not doubly stochastic: 1 - |λ₂|^(1/T) of the product.
        """
        return self._spectral_gap

    @cached_property
    def _spectral_gap(self) -> float:
        if self.n == 1:
            return 1.0
        if not self.rows_sum_to_one:  # the transposed product has the same eigenvalues, and keeps the constant vectors
            transposed = tuple(general(r.matrix().T) for r in reversed(self.rounds))
            return Graph(self.name, transposed).spectral_gap()
        # W keeps the constant vectors; what it does to everything else is a matrix of one row and column less, and the
        # product of those is all that is needed. It is scaled up after each Round: a slow graph with a long period would
        # otherwise come out as zero, which means exact.
        basis = np.linalg.qr(np.column_stack([np.ones(self.n), np.eye(self.n)[:, 1:]]))[0][:, 1:]
        product, logarithm = np.eye(self.n - 1), 0.0
        for r in self.rounds:
            product = basis.T @ (r.matrix() @ (basis @ product))
            size = float(np.linalg.norm(product))
            if size < _EXACT * self.n:
                return 1.0
            product, logarithm = product / size, logarithm + math.log(size)
        doubly = self.is_doubly_stochastic()
        rest = float(np.linalg.norm(product, 2) if doubly else np.abs(np.linalg.eigvals(product)).max())
        return 1.0 if rest < _EXACT else 1 - math.exp((math.log(rest) + logarithm) / self.period)


def _sum_to_one(r: Round, axis: int) -> bool:
    """Every kind but General is doubly stochastic as it is made."""
    return not isinstance(r, General) or bool((np.abs(r.weights.sum(axis=axis) - 1) <= 1e-6).all())
