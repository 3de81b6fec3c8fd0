"""How far apart are the replicas? Seen at each global average, the same bits by every worker, so that all can draw the same conclusion
without another word.

Beside the parameters a sample of their columns is averaged, with the mean of its square: mean ‖x_i - x̄‖² = mean ‖x_i‖² - ‖x̄‖². That is
at most 64 KB, and 3 % of what all but tiny models take in 8 bits. (The averaged parameters themselves would do, but what was averaged
is rounded, and the owner of a column is the only one who sees all of it.)
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from gossamer.graphs.rounds import Mean
from gossamer.rows import mixing
from gossamer.rows.block import Block
from gossamer.transport.exchange import Exchange
from gossamer.transport.link import Tag
from gossamer.transport.operation import Operation

_SHARE = 256  # of so many columns of a row one is looked at,
_LEAST, _MOST = 16, 8192  # but not fewer, or more, than these
_WIDTH = 8  # columns that lie together: of layers, all must have a part


@dataclass(frozen=True)
class Sight:
    """At a global average in ``step``: how far replicas were from their mean (root of the mean square), the mean's own length, and the
    learning rate; and the mean of the numbers that each worker gave."""

    step: int
    distance: float
    norm: float
    rate: float
    carried: tuple[float, ...] = ()


class Probe:
    """``exchange``: if the rows are spread over several processes. ``rate``: the learning rate; it is averaged along, and so are the
    numbers that are ``learnt``."""

    def __init__(
        self, exchange: Exchange | None, rate: Callable[[], float], learnt: Callable[[], tuple[float, ...]] = tuple
    ) -> None:
        self._exchange, self._along = exchange, lambda: (rate(), *learnt())
        self._sight: Sight | None = None
        self._given: tuple[float, ...] = ()
        self._rows: Tensor | None = None  # a sample
        self._sums: Tensor | None = None  # its mean over all processes, and what travels along
        self._operation: Operation | None = None

    def taken(self) -> Sight | None:
        """What was seen, once."""
        sight, self._sight = self._sight, None
        return sight

    def cost(self, columns: int, n: int) -> int:
        """Bytes per replica of one look at rows of so many columns, as ``Round.cost`` counts them."""
        return Mean(n).cost(torch.float64.itemsize * (sampled(columns) + 1 + len(self._along())))

    def start(self, block: Block, tag: Tag | None) -> None:
        """When rows set out to be averaged."""
        self._given, rows = self._along(), sample(block.x)
        if self._exchange is None or tag is None:
            self._rows = rows.clone()
            return
        mine = rows.double()
        square = mine.square().sum(dim=1).mean(dim=0, keepdim=True)
        mine = torch.cat([mine.mean(dim=0), square, mine.new_tensor(self._given)]).unsqueeze(0)
        self._sums, everyone = torch.empty_like(mine), Mean(self._exchange.size)
        members = range(self._exchange.size)
        self._operation = self._exchange.slices(mine, self._sums, members, lambda x, y: mixing.mix(everyone, x, y), tag)

    def finish(self, block: Block, step: int) -> None:
        """When they are averaged. Nothing was seen if a peer was lost meanwhile."""
        if self._rows is not None:
            rows, self._rows = self._rows, None
            mean = rows.mean(dim=0)
            apart, length = float((rows - mean).double().square().sum(dim=1).mean()), float(mean.double().square().sum())
            carried = self._given
        else:
            assert self._operation is not None
            assert self._sums is not None
            operation, self._operation = self._operation, None
            operation.wait()
            if operation.lost & operation.essential:
                return
            mean, numbers = self._sums[0].split([self._sums.shape[1] - 1 - len(self._given), 1 + len(self._given)])
            length = math.fsum(mean.square().tolist())  # exact: a sum may differ between processors, and all must see the same
            apart, carried = float(numbers[0]) - length, tuple(numbers[1:].tolist())
        if not math.isfinite(apart):  # a replica has diverged
            return
        scale = block.x.shape[1] / len(mean)
        self._sight = Sight(step, math.sqrt(max(0.0, scale * apart)), math.sqrt(scale * length), carried[0], carried[1:])


def sample(rows: Tensor) -> Tensor:
    """Some columns of ``[r, D]``, spread evenly, the same ones everywhere; all of them if there are few."""
    pieces, width = _pieces(rows.shape[1])
    stride = rows.shape[1] // pieces
    return rows[:, : stride * pieces].unflatten(1, (pieces, stride))[:, :, :width].flatten(1)


def sampled(columns: int) -> int:
    """How many columns that is."""
    return math.prod(_pieces(columns))


def _pieces(columns: int) -> tuple[int, int]:
    """How many pieces, and of how many columns each."""
    wanted = min(columns, _MOST, max(_LEAST, columns // _SHARE))
    pieces = max(min(wanted, _LEAST), wanted // _WIDTH)
    return pieces, wanted // pieces
