"""What all processes must know of each other beside the rows of a graph: the losses, whether to stop, whether a replica diverged.

In one process these are known in each step. Between processes they travel together, once in a while: a collective in each step would make
all processes wait for all others, whatever the graph is. So a loss that is not a number is noticed some steps later. The error names the
step in which it came up.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from gossamer.errors import TrainingDiverged
from gossamer.transport.exchange import Exchange

_SECONDS = 0.1  # between two reports, about
_MOST_STEPS = 64


class StepLoss(NamedTuple):
    """``losses``: of all replicas. ``bytes``: received by each replica when the loss was known."""

    step: int
    losses: Tensor
    bytes: int

    def check(self, members: tuple[int, ...], epoch: int) -> None:
        bad = (~torch.isfinite(self.losses)).nonzero().flatten().tolist()
        if bad:
            more = f" (and {len(bad) - 1} more)" if len(bad) > 1 else ""
            raise TrainingDiverged(
                f"the loss of replica {members[bad[0]]}{more} is {float(self.losses[bad[0]])} at step {self.step} "
                f"(epoch {epoch}); a smaller learning rate or gradient clipping may help. The last checkpoint is kept"
            )


class Progress:
    """Of one process. ``every``: steps between two reports, the same in all processes: the first one's pace decides."""

    def __init__(self, exchange: Exchange | None) -> None:
        self._exchange = exchange
        self._mine: list[StepLoss] = []
        self._every = 1
        self._began = time.perf_counter()

    def add(self, step: int, losses: Tensor, received: int) -> None:
        self._mine.append(StepLoss(step, losses, received))

    @property
    def due(self) -> bool:
        return len(self._mine) >= self._every

    def report(self, stop: Callable[[], bool] | None) -> tuple[list[StepLoss], bool]:
        """Of each step since the last report, the losses of all replicas; and whether to stop, which the first process says."""
        mine, self._mine = self._mine, []
        wanted = stop is not None and stop()
        exchange = self._exchange
        if exchange is None or not mine:
            return mine, wanted
        now = time.perf_counter()
        pace, self._began = (now - self._began) / len(mine), now
        every = min(_MOST_STEPS, max(1, int(_SECONDS / max(pace, 1e-9))))
        row = torch.stack([loss.losses.double().cpu() for loss in mine])
        everyone = exchange.gather(torch.cat([row.flatten(), row.new_tensor([float(wanted), float(every)])]), "losses")
        self._every = int(everyone[0, -1])
        losses = everyone[:, :-2].reshape(exchange.size, *row.shape).transpose(0, 1).flatten(1)
        return [one._replace(losses=all_.to(one.losses.dtype)) for one, all_ in zip(mine, losses, strict=True)], bool(
            everyone[0, -2]
        )
