"""Momentum that all share: after an average of all, each one's momentum becomes what the average has done since the last one.

A worker's momentum is mostly noise where it sees few samples: for ten steps it goes on in a direction of its own, and averages of
parameters alone leave it there. How far the average went, every worker knows without a message. It is their mean momentum, up to the noise.
(The idea is quasi-global momentum: Lin, Karimireddy, Stich and Jaggi, 2021, for gossip; here it is taken at averages of all.)

For ``torch.optim.SGD`` and ``RMSprop`` with momentum. Others are left alone: their ``momentum_buffer`` may be something else.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

_KINDS = (torch.optim.SGD, torch.optim.RMSprop)


def refusal(optimizer: torch.optim.Optimizer) -> str | None:
    """Why the momentum of this one can't be shared."""
    dampening = next((group["dampening"] for group in optimizer.param_groups if group.get("dampening")), 0)
    if not dampening or not isinstance(optimizer, _KINDS):
        return None
    return f"ada-auto shares momentum, which SGD's dampening={dampening} would make too small; use 0"


@torch.no_grad()
def share(optimizer: torch.optim.Optimizer, moved: Callable[[Tensor], Tensor | None]) -> None:
    """``moved(parameter)``: how far its average went in a step, if it is known."""
    for group in optimizer.param_groups if isinstance(optimizer, _KINDS) else ():
        for parameter in group["params"] if group["lr"] else ():
            buffer = optimizer.state.get(parameter, {}).get("momentum_buffer")
            far = moved(parameter) if buffer is not None else None
            if far is not None:
                torch.div(far, -float(group["lr"]), out=buffer)  # as gradients point
