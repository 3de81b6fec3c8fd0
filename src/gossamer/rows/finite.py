"""Rows that are not finite, because a worker has diverged: how they are found, and what is said about them.

The sum of a row is finite only if all of its numbers are. One pass finds it, just before the row is mixed: then it is in the cache.
Where columns of all rows are mixed by their owner, the owner looks at what it has made, and marks all of it if some is not finite: so the
workers that get it look at one number. So does a sender of a copy, with each piece that it copies.

Receivers look at the whole of each other row that comes by an edge. Its sender, to hear that it has diverged, looks at a share of its own
row only, at another one each time: that costs little. One number that is not finite makes most of the others so within a step or two.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from gossamer.rows.block import Block

_SHORT = 1 << 18  # numbers of a row that is looked at in one go
_SHARES = 8  # of a longer one


class Fault(NamedTuple):
    """A parameter of this worker that is not finite, and in which step it was found."""

    parameter: str
    step: int

    def describe(self, rank: int) -> str:
        return f"rank {rank}: parameter {self.parameter!r} is not finite at step {self.step}"


def finite(row: Tensor) -> bool:
    if not row.numel() or math.isfinite(row.sum()):
        return True
    least, most = torch.aminmax(row)  # large numbers may have a sum that is not finite; NaN makes both of these so
    return math.isfinite(least) and math.isfinite(most)


def mark(rows: Tensor, alike: bool) -> None:
    """What an owner of columns has made: a row that is not finite becomes NaN. ``alike``: all rows are the same."""
    for row in rows[:1] if alike else rows:
        if not finite(row):
            (rows if alike else row).fill_(math.nan)


def copy(row: Tensor, out: Tensor) -> None:
    """``out`` <- ``row``, in the precision of ``out``: NaN if it is not finite. Each piece is looked at while it is in the cache."""
    sums = [piece.copy_(source).sum() for piece, source in zip(out.split(_SHORT), row.split(_SHORT), strict=True)]
    if not math.isfinite(sum(sums)) and not finite(out):
        out.fill_(math.nan)


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
