"""Rows that are not finite, because a worker has diverged: how they are found, and what is said about them.

A sum is finite only if all of its terms are. So one sum per row is the check, in the thread that waits for the rows, while the process
computes. A sum may also overflow: if it is not finite, an exact look at the row decides.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from gossamer.blocks import Block
from gossamer.flights import Works


class Fault(NamedTuple):
    """A parameter of this worker that is not finite, and in which step it was found."""

    parameter: str
    step: int

    def describe(self, rank: int) -> str:
        return f"rank {rank}: parameter {self.parameter!r} is not finite at step {self.step}"


class Check:
    """Of the rows of one transfer."""

    def __init__(self, rows: Sequence[Tensor]) -> None:
        self._rows = rows
        self._sums: Tensor | None = None  # a number for each row, on its device

    def add_up(self) -> Works:
        """When all rows are there. On a GPU the stream does it, and the host does not wait."""
        self._sums = torch.stack([_sum(row) for row in self._rows])
        return []

    def spoiled(self) -> set[int]:
        """Which of the rows are not finite."""
        if self._sums is None:  # a thread that was replaced may not have got to it
            self.add_up()
        assert self._sums is not None
        if bool(torch.isfinite(self._sums).all()):
            return set()
        return {k for k, row in enumerate(self._rows) if not finite(row)}


def finite(row: Tensor) -> bool:
    return bool(torch.isfinite(_sum(row))) or bool(torch.isfinite(row).all())


def _sum(row: Tensor) -> Tensor:
    """Finite only if the row is."""
    if row.dtype != torch.float16:
        return row.sum()
    least, most = torch.aminmax(row)  # a sum in float16 would overflow in a healthy row
    return least + most


def culprit(block: Block, row: Tensor) -> str:
    """The first parameter of a row that is not finite."""
    tensors = block.tensors_of(row.reshape(1, -1))
    return next((name for name, tensor in tensors.items() if not bool(torch.isfinite(tensor).all())), "")
