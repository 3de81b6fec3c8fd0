"""Which moments an optimizer keeps of each parameter: for methods that average them, or begin them anew."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def names(optimizers: Sequence[torch.optim.Optimizer]) -> list[str]:
    """Those of Adam and its kin, and momentum. A function of the optimizers, not of what they have seen: so it is the same everywhere."""
    found = dict[str, None]()
    for optimizer in optimizers:
        if "adam" in type(optimizer).__name__.lower():
            found |= dict.fromkeys(("exp_avg", "exp_avg_sq"))
        elif any(group.get("momentum") for group in optimizer.param_groups):
            found |= dict.fromkeys(("momentum_buffer",))
    return list(found)
