"""A mean of all in few bits: every worker knows the last mean, so what travels is how far each has moved since then.

A movement is small, and so is the error of 8 bits of it (see ``codec.py``); parameters in 8 bits would be useless. What comes back is the
mean of the movements, in 8 bits again, the same for all: so afterwards all have the same mean, to the bit, for the next time.

If all have gone much further than lately, it was no training: other parameters were loaded, or they are not finite any more.
The error would be a part of that jump, and more than what was learnt. So then no worker takes that mean, and the next one is in full
precision again. All see the same bits, so all do that.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from gossamer.rows import codec
from gossamer.rows.wires import EIGHT_BITS, Wire

_JUMP = 128.0  # times as far as lately
_MEAN = -1  # a row's number, for what is rounded of the mean


class Movement:
    """Of one block. ``mean``: the last one, ``[D]``, in ``step``; ``moved``: how far it went from the one before, in ``steps``."""

    def __init__(self, mean: Tensor, step: int) -> None:
        self.mean, self.step = mean.clone(), step
        self.moved: Tensor | None = None
        self.steps = 0
        self.furthest = 0.0  # that any number has gone in a step, lately

    def encode(self, rows: Tensor, coded: Tensor, step: int, first: int) -> None:
        """How far the rows ``[r, D]`` are from the mean. ``first``: the number of the first one."""
        for k, (row, code) in enumerate(zip(rows, coded, strict=True)):
            codec.encode(row - self.mean, code, codec.turn(step, first + k))

    def arrive(self, moved: Tensor, step: int) -> Tensor | None:
        """The new mean; None if it was a jump."""
        steps = step - self.step
        furthest = max(abs(float(end)) for end in torch.aminmax(moved)) / max(1, steps)
        if not math.isfinite(furthest) or furthest > _JUMP * self.furthest > 0:
            return None
        self.moved, self.steps, self.step = moved, steps, step
        self.furthest = max(furthest, self.furthest / 2)
        return self.mean.add_(moved)

    def mixed(self, rows: Tensor, step: int) -> Tensor:
        """The mean movement of all rows ``[n, D]``, as the others would hear of it: what :func:`mean_of_codes` does, in one process."""
        total, row = torch.zeros_like(self.mean, dtype=torch.float32), torch.empty_like(self.mean, dtype=torch.float32)
        for k, x in enumerate(rows):
            torch.sub(x, self.mean, out=row) if x.dtype == row.dtype else row.copy_(x - self.mean)
            codec.rounded(row, row, codec.turn(step, k))
            total.add_(row)
        codec.rounded(total.div_(len(rows)), row, codec.turn(step, _MEAN))
        return row

    def state_dict(self) -> dict[str, Any]:
        return {"mean": self.mean, "step": self.step, "furthest": self.furthest}

    @classmethod
    def of(cls, state: dict[str, Any]) -> Movement:
        made = cls(state["mean"], state["step"])
        made.furthest = state.get("furthest", 0.0)
        return made


def mean_of_codes(
    codes: Iterable[Tensor],
    n: int,
    out: Tensor,
    step: int,
    first: int = 0,
    wire: Wire = EIGHT_BITS,
    flags: int | None = None,
    lost: Tensor | None = None,
) -> None:
    """Of n encoded rows, as such a row. One after the other: so it does not matter how they lie in processes.

    - ``first``: the span that they begin with.
    - ``flags``: the span of the whole row from which on numbers are flags; those that any row has.
    - ``lost``: what was lost last time when the mean was encoded; it is added, and what is lost now takes its place.
    """
    columns = out.numel() // wire.unit * wire.span
    total, row = (torch.zeros(columns, dtype=torch.float32, device=out.device) for _ in range(2))
    for code in codes:
        wire.decode(code, row)
        total.add_(row)
    total.div_(n)
    if lost is not None:
        total.add_(lost)
    if flags is not None:
        ends = total[max(0, flags - first) * wire.span :]
        ends.copy_(ends > 0)
    wire.encode(total, out, codec.turn(step, _MEAN), first)
    if lost is not None:
        wire.decode(out, row)
        torch.sub(total, row, out=lost).nan_to_num_(0.0, 0.0, 0.0)


def reference(rows: Tensor, mean: Tensor, step: int) -> Tensor:
    """The new mean, as one would write it down."""
    moved = torch.stack([codec.reference(row - mean, codec.turn(step, k)) for k, row in enumerate(rows)]).float()
    whole = sum(moved.unbind(0), torch.zeros_like(moved[0])) / len(rows)
    return mean + codec.reference(whole, codec.turn(step, _MEAN))
