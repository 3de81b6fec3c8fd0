"""A mean of all in few bits: everybody knows the last mean, so what travels is how far each one has moved since then.

A movement is small, and so is the error of 8 bits of it (see ``codec.py``); parameters in 8 bits would be useless. What comes back is the
mean of the movements, in 8 bits again, the same for all: so afterwards all have the same mean, to the bit, for the next time.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from gossamer import codec


class Movement:
    """Of one block. ``mean``: the last one, ``[D]``, in ``step``; ``moved``: how far it went from the one before, in ``steps``."""

    def __init__(self, mean: Tensor, step: int) -> None:
        self.mean, self.step = mean.clone(), step
        self.moved: Tensor | None = None
        self.steps = 0

    def encode(self, rows: Tensor, coded: Tensor) -> None:
        """How far the rows ``[r, D]`` are from the mean."""
        for row, code in zip(rows, coded, strict=True):
            codec.encode(row - self.mean, code)

    def arrive(self, moved: Tensor, step: int) -> Tensor:
        """The new mean."""
        self.moved, self.steps, self.step = moved, step - self.step, step
        return self.mean.add_(moved)

    def mixed(self, rows: Tensor) -> Tensor:
        """The mean movement of all rows ``[n, D]``, as the others would hear of it: what :func:`mean_of_codes` does, in one process."""
        total, row = torch.zeros_like(self.mean, dtype=torch.float32), torch.empty_like(self.mean, dtype=torch.float32)
        for x in rows:
            torch.sub(x, self.mean, out=row) if x.dtype == row.dtype else row.copy_(x - self.mean)
            codec.rounded(row, row)
            total.add_(row)
        codec.rounded(total.div_(len(rows)), row)
        return row

    def state_dict(self) -> dict[str, Any]:
        return {"mean": self.mean, "step": self.step}

    @classmethod
    def of(cls, state: dict[str, Any]) -> Movement:
        return cls(state["mean"], state["step"])


def mean_of_codes(codes: Iterable[Tensor], n: int, columns: int, out: Tensor) -> None:
    """Of n rows of bytes, as such a row. One after the other: so it does not matter how they lie in processes."""
    total, row = (torch.zeros(columns, dtype=torch.float32, device=out.device) for _ in range(2))
    for code in codes:
        codec.decode(code, row)
        total.add_(row)
    codec.encode(total.div_(n), out)


def reference(rows: Tensor, mean: Tensor) -> Tensor:
    """The new mean, as one would write it down."""
    moved = torch.stack([codec.reference(row - mean) for row in rows]).float()
    return mean + codec.reference(sum(moved.unbind(0), torch.zeros_like(moved[0])) / len(rows))
