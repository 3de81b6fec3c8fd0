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


def shared_refusal(optimizers: Sequence[torch.optim.Optimizer]) -> str | None:
    """Why ``moments=shared`` can't correct their second moments (``methods/second_moments.py``)."""
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    for name in (type(optimizer).__name__ for optimizer in optimizers):
        if name not in ("Adam", "AdamW", "NAdam", "RAdam"):
            return f"moments=shared knows the second moments of Adam, AdamW, NAdam and RAdam; this is {name}; use moments=own"
    if any(group.get("amsgrad") for group in groups):
        return "moments=shared takes what is too much off second moments, and with amsgrad=True they only grow; use moments=own"
    if len({(float(group["lr"]), float(group["betas"][1])) for group in groups}) > 1:
        return "moments=shared needs one learning rate and one beta2 for all parameter groups, as it measures in them; use moments=own"
    return None
