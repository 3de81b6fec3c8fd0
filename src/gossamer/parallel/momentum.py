"""Shared momentum (``optim/momentum.py``) for the workers of a person's own loop."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from gossamer.graphs.rounds import Mean, Round
from gossamer.optim.momentum import share
from gossamer.rows.flat import Flat
from gossamer.transport.mixer import Mixer


class Shared:
    """By the workers of a person's own loop. ``jumped``: since the last mean of all, parameters were changed by somebody else than
    the optimizers, so how far they went is no momentum."""

    def __init__(self, flat: Flat, mixer: Mixer) -> None:
        self.flat, self.mixer = flat, mixer
        self.jumped = False
        self._noticed = False  # whether that was looked at in this step

    def notice(self) -> None:
        """Before the first of the optimizers changes anything in this step."""
        if not self._noticed:
            self.jumped |= self.flat.touched
            self._noticed = True

    def share(self, optimizers: Iterable[torch.optim.Optimizer], round_: Round, step: int) -> None:
        """If all parameters are their mean now, and it was training that moved them."""
        jumped = self.jumped
        if isinstance(round_, Mean):
            self.jumped = False
        if jumped:
            return
        moved = [self.mixer.moved(k, step) for k in range(len(self.flat.blocks))]
        views = self.flat.views(moved) if any(row is not None for row in moved) else {}
        for optimizer in optimizers if views else ():
            share(optimizer, lambda parameter: views.get(id(parameter)))

    def settle(self) -> None:
        """The step is done."""
        self._noticed = False
        self.flat.settle()
