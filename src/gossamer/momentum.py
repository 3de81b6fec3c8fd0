"""Momentum that all share: after an average of all, each one's momentum becomes what the average has done since the last one.

A worker's momentum is mostly noise where it sees few samples: for ten steps it goes on in a direction of its own, and averages of
parameters alone leave it there. How far the average went, everybody knows for nothing. It is their mean momentum, up to the noise.
(The idea is quasi-global momentum: Lin, Karimireddy, Stich and Jaggi, 2021, for gossip; here it is taken at averages of all.)

For ``torch.optim.SGD`` with momentum; whatever has no ``momentum_buffer`` is left alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from gossamer.errors import GossamerError


class SharedMomentum:
    def __init__(self) -> None:
        self._last: tuple[int, list[Tensor]] | None = None  # the step of the last average, and what it was

    def averaged(self, step: int, means: Sequence[Tensor]) -> list[Tensor] | None:
        """How far the average went in each step since the last one, backwards (as gradients point); None after the first."""
        before, self._last = self._last, (step, [mean.clone() for mean in means])
        if before is None or [mean.shape for mean in before[1]] != [mean.shape for mean in means]:
            return None
        return [(then - now) / (step - before[0]) for then, now in zip(before[1], means, strict=True)]

    def forget(self) -> None:
        """Others take part now."""
        self._last = None

    def state_dict(self) -> dict[str, Any]:
        return {} if self._last is None else {"step": self._last[0], "means": self._last[1]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._last = (state["step"], list(state["means"])) if state else None


@torch.no_grad()
def share(optimizer: torch.optim.Optimizer, moved: Callable[[Tensor], Tensor]) -> None:
    """``moved(parameter)``: how far its average went in a step, backwards."""
    for group in optimizer.param_groups:
        if group.get("dampening"):
            raise GossamerError(
                f"ada-auto shares momentum, which SGD's dampening={group['dampening']} would make too small; use 0"
            )
        for parameter in group["params"] if group["lr"] else ():
            buffer = optimizer.state.get(parameter, {}).get("momentum_buffer")
            if buffer is not None:
                torch.div(moved(parameter), float(group["lr"]), out=buffer)
