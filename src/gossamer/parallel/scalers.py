"""A GradScaler that finds an infinite gradient does not call ``step()``, so no hook of the optimizer fires: it is watched itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

Optimizer = torch.optim.Optimizer


def watch(
    scaler: torch.amp.GradScaler,
    around_step: Callable[[Optimizer, Callable[[], Any]], Any],
    before_unscaling: Callable[[Optimizer], None],
) -> Callable[[], None]:
    """``around_step(optimizer, step)`` is called instead of the scaler's own step, which it calls. Returns what undoes all of it."""
    step, unscale = scaler.step, scaler.unscale_

    def watched_step(optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        return around_step(optimizer, lambda: step(optimizer, *args, **kwargs))

    def watched_unscale(optimizer: Optimizer) -> None:
        before_unscaling(optimizer)
        unscale(optimizer)

    def undo() -> None:
        scaler.step, scaler.unscale_ = step, unscale  # type: ignore[method-assign]

    scaler.step, scaler.unscale_ = watched_step, watched_unscale  # type: ignore[method-assign]
    return undo
