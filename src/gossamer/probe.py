"""How far apart are the replicas? Seen whenever all are averaged, from what is exchanged anyway and one number more.

At a global average everyone gets x̄. With the mean of ‖x_i‖², which travels along, everyone also knows mean ‖x_i - x̄‖² = mean ‖x_i‖² - ‖x̄‖²:
the same bits on every worker, so that all can draw the same conclusion without another word. A sample of the columns is enough.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from gossamer import mixing
from gossamer.blocks import Block
from gossamer.exchange import Exchange
from gossamer.flights import Flight
from gossamer.links import Tag
from gossamer.rounds import Mean, Round

_PIECES, _WIDTH = 1024, 64  # of a row that is looked at


@dataclass(frozen=True)
class Sight:
    """At a global average in ``step``: how far replicas were from their mean (root of the mean square), the mean's own length, and how far
    it has come since the last look, ``since`` steps ago (0 at the first)."""

    step: int
    distance: float
    norm: float
    moved: float
    since: int


class Probe:
    """``sight`` is the latest. ``exchange``: if the rows are spread over several processes."""

    def __init__(self, exchange: Exchange | None) -> None:
        self.sight: Sight | None = None
        self._exchange = exchange
        self._squares: tuple[Flight | None, Tensor] | None = None
        self._last: Tensor | None = None

    def start(self, block: Block, round_: Round, tag: Tag | None) -> None:
        """Before rows set out."""
        self._squares = None
        if not isinstance(round_, Mean) or round_.n <= 2:  # two by edges need not have the same bits
            return
        squares = sample(block.x).double().square().sum(dim=1).mean(dim=0, keepdim=True)
        if self._exchange is None or tag is None:
            self._squares = None, squares
            return
        mean, size = torch.empty_like(squares), self._exchange.size
        everyone = Mean(size)
        flight = self._exchange.slices(
            squares.unsqueeze(0), mean.unsqueeze(0), range(size), lambda x, y: mixing.mix(everyone, x, y), tag
        )
        self._squares = flight, mean

    def finish(self, mean: Tensor, step: int) -> None:
        """When ``mean``, the row of the averaged parameters, is there."""
        if self._squares is None:
            return
        flight, squares = self._squares
        self._squares = None
        if flight is not None:
            flight.wait()
        now = sample(mean.unsqueeze(0))[0].double()
        length = float(now.square().sum())
        moved = 0.0 if self._last is None else float((now - self._last).norm())
        since = 0 if self.sight is None else step - self.sight.step
        scale = math.sqrt(mean.numel() / now.numel())
        distance = math.sqrt(max(0.0, float(squares) - length))
        self.sight = Sight(step, scale * distance, scale * math.sqrt(length), scale * moved, since)
        self._last = now

    def state_dict(self) -> dict[str, object]:
        sight = self.sight
        return {"sight": None if sight is None else [*sight.__dict__.values()], "last": self._last}

    def load_state_dict(self, state: dict) -> None:
        self.sight = None if state["sight"] is None else Sight(*state["sight"])
        self._last = state["last"]


def sample(rows: Tensor) -> Tensor:
    """Some columns of ``[r, D]``, spread evenly, the same ones everywhere; all of them if there are few."""
    columns = rows.shape[1]
    if columns <= _PIECES * _WIDTH:
        return rows
    stride = columns // _PIECES
    return rows[:, : stride * _PIECES].unflatten(1, (_PIECES, stride))[:, :, :_WIDTH].flatten(1)
