"""Rows that are not finite, because a worker has diverged: how they are found, and what is said about them.

A sum is finite only if all of its terms are. So one sum per row is the check, just before the row is mixed: then it is in the cache. A sum
may also overflow: if it is not finite, an exact look at the row decides.

Receivers look at the whole of each row. A sender, to hear that it has diverged, looks at a share of its own row only, at another one each
time: that costs little. One number that is not finite makes most of the others so within a step or two.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from gossamer.blocks import Block

_SHORT = 1 << 18  # numbers of a row that is looked at in one go
_SHARES = 8  # of a longer one


class Fault(NamedTuple):
    """A parameter of this worker that is not finite, and in which step it was found."""

    parameter: str
    step: int

    def describe(self, rank: int) -> str:
        return f"rank {rank}: parameter {self.parameter!r} is not finite at step {self.step}"


def finite(row: Tensor) -> bool:
    return bool(torch.isfinite(_sum(row))) or bool(torch.isfinite(row).all())


def _sum(row: Tensor) -> Tensor:
    """Finite only if the row is."""
    if row.dtype != torch.float16:
        return row.sum()
    least, most = torch.aminmax(row)  # a sum in float16 would overflow in a healthy row
    return least + most


def share(row: Tensor, turn: int) -> Tensor:
    """What a sender looks at of its own row: all of a short one."""
    if len(row) <= _SHORT:
        return row
    width = -(-len(row) // _SHARES)
    return row[turn % _SHARES * width :][:width]


def culprit(block: Block, row: Tensor) -> str:
    """The first parameter of a row that is not finite."""
    tensors = block.tensors_of(row.reshape(1, -1))
    return next((name for name, tensor in tensors.items() if not bool(torch.isfinite(tensor).all())), "")
