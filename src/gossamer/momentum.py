"""Momentum that all share: after an average of all, each one's momentum becomes what the average has done since the last one.

A worker's momentum is mostly noise where it sees few samples: for ten steps it goes on in a direction of its own, and averages of
parameters alone leave it there. How far the average went, everybody knows for nothing. It is their mean momentum, up to the noise.
(The idea is quasi-global momentum: Lin, Karimireddy, Stich and Jaggi, 2021, for gossip; here it is taken at averages of all.)

For ``torch.optim.SGD`` with momentum; whatever has no ``momentum_buffer`` is left alone.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from gossamer.errors import GossamerError


@torch.no_grad()
def share(optimizer: torch.optim.Optimizer, moved: Callable[[Tensor], Tensor | None]) -> None:
    """``moved(parameter)``: how far its average went in a step, if it is known."""
    for group in optimizer.param_groups:
        if group.get("dampening"):
            raise GossamerError(
                f"ada-auto shares momentum, which SGD's dampening={group['dampening']} would make too small; use 0"
            )
        for parameter in group["params"] if group["lr"] else ():
            buffer = optimizer.state.get(parameter, {}).get("momentum_buffer")
            far = moved(parameter) if buffer is not None else None
            if far is not None:
                torch.div(far, -float(group["lr"]), out=buffer)  # as gradients point
