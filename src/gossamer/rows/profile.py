"""What DBench looks at, just before parameters are averaged: the L2 norm of every parameter tensor on every replica, how
much those norms differ between replicas, and how far the replicas are from their mean.

Norms are blind to rotation: two replicas can differ a lot with equal norms. The consensus distance is not.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from gossamer.rows.flat import Flat
from gossamer.rows.replicas import Replicas

MEASURES = ("gini", "iod", "cv", "qcd")
_ROWS = 8  # rows at a time, so that temporaries stay in the cache


@dataclass(frozen=True)
class Profile:
    """One look: ``norms`` is ``[replicas, tensors]``; ``bytes`` is what each replica has received up to now."""

    step: int
    epoch: int
    norms: Tensor
    consensus_distance: float
    bytes: int

    def signals(self) -> dict[str, float]:
        """What schedules are told, by name."""
        means = {name: float(values.mean()) for name, values in self.dispersion().items()}
        return {"consensus_distance": self.consensus_distance} | means

    def dispersion(self) -> Mapping[str, Tensor]:
        return dispersion(self.norms)


class Across(Protocol):
    """Over all processes."""

    def mean(self, row: Tensor, what: str) -> Tensor: ...

    def gather(self, rows: Tensor) -> Tensor: ...


def take(replicas: Replicas | Flat, step: int, epoch: int, received: int, mixer: Across) -> Profile:
    return Profile(step, epoch, mixer.gather(norms(replicas)), consensus_distance(replicas, mixer), received)


def norms(replicas: Replicas | Flat) -> Tensor:
    """``[r, tensors]``, columns in the order of ``replicas.slots``."""
    columns = [
        torch.linalg.vector_norm(block.x[:, slot.start : slot.start + slot.numel], dim=1)
        for block in replicas.blocks
        for slot in block.slots
    ]
    return torch.stack([column.float() for column in columns], dim=1).cpu()


def consensus_distance(replicas: Replicas | Flat, mixer: Across) -> float:
    """sqrt of the mean over replicas of ‖x_i - x̄‖²."""
    total = torch.zeros(1, dtype=torch.float64)
    for block in replicas.blocks:
        # The mean as an offset from the first row, so that equal replicas are at distance exactly 0.
        first = block.x[0]
        mean = mixer.mean(first + sum((rows - first).sum(dim=0) for rows in block.x.split(_ROWS)) / replicas.r, "profile")
        for rows in block.x.split(_ROWS):
            total += float(torch.linalg.vector_norm(rows - mean)) ** 2
    return math.sqrt(float(mixer.mean(total, "profile")) / replicas.r)


def dispersion(values: Tensor) -> dict[str, Tensor]:
    """Four measures over dimension 0 (replicas) of non-negative values ``[n, …]``; each is 0 where all values are equal,
    and nan where one is not finite.

    ========  =====================================  =======================================
    gini      Σ_ij |v_i - v_j| / (2 n² μ)            Gini coefficient
    iod       σ² / μ                                 index of dispersion (has the unit of v)
    cv        σ / μ                                  coefficient of variation
    qcd       (Q3 - Q1) / (Q3 + Q1)                  quartile coefficient of dispersion
    ========  =====================================  =======================================

    σ² is the population variance; quartiles interpolate linearly.
    """
    v = values.double()
    n = v.shape[0]
    ordered = v.sort(dim=0).values
    mean = v.mean(dim=0)
    variance = ((v - mean) ** 2).mean(dim=0)
    rank = torch.arange(1, n + 1, dtype=v.dtype, device=v.device).reshape(-1, *[1] * (v.ndim - 1))
    spread = ((2 * rank - n - 1) * ordered).sum(dim=0)
    low, high = torch.quantile(v, torch.tensor([0.25, 0.75], dtype=v.dtype, device=v.device), dim=0)
    same = (ordered[0] == ordered[-1]) & torch.isfinite(ordered[0])  # then exactly 0, not the rounding error of a mean
    return {
        "gini": _ratio(spread, n * n * mean, same),
        "iod": _ratio(variance, mean, same),
        "cv": _ratio(variance.sqrt(), mean, same),
        "qcd": _ratio(high - low, high + low, same),
    }


def _ratio(top: Tensor, bottom: Tensor, same: Tensor) -> Tensor:
    zero = torch.zeros_like(top)
    return torch.where(same | (bottom == 0), zero, top / torch.where(bottom == 0, torch.ones_like(bottom), bottom))
