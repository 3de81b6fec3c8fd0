"""All that a worker knows, as a nest of dicts: for its checkpoint, and for one who joins."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from gossamer.errors import GossamerError
from gossamer.schedules import Schedule


def capture(
    module: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    schedule: Schedule,
    signals: dict[str, float],
    also: Mapping[str, Any],
) -> dict[str, Any]:
    return {
        "model": module.state_dict(),
        "optimizers": [optimizer.state_dict() for optimizer in optimizers],
        "schedule": schedule.state_dict(),
        "signals": signals,
        "also": {name: thing.state_dict() for name, thing in also.items()},
    }


def restore(
    state: dict[str, Any],
    where: str,
    module: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    schedule: Schedule,
    also: Mapping[str, Any],
) -> dict[str, float]:
    """Returns the signals."""
    missing = set(also) ^ set(state["also"])
    if missing:
        raise GossamerError(f"{where} and `also` differ: {', '.join(sorted(missing))}")
    if len(state["optimizers"]) != len(optimizers):
        raise GossamerError(
            f"{where} holds {len(state['optimizers'])} optimizers and gossip() was given "
            f"{len(optimizers)}; call model.gossip(optimizer) before model.load()"
        )
    module.load_state_dict(state["model"])
    for optimizer, saved in zip(optimizers, state["optimizers"], strict=True):
        optimizer.load_state_dict(saved)
    for name, thing in also.items():
        thing.load_state_dict(state["also"][name])
    schedule.load_state_dict(state["schedule"])
    return dict(state["signals"])
