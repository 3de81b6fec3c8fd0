"""Where a driver's moments come from: torch's hooks on optimizers, on parameters, and a GradScaler that is watched.

No hook keeps the driver: a model that is dropped is gone, though its optimizer and its scaler stay. Each function that attaches hooks
returns what undoes it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from gossamer.parallel.driver import Driver

Optimizer = torch.optim.Optimizer
Undo = list[Callable[[], object]]


def weakly(method: Callable[..., Any]) -> Callable[..., Any]:
    """A method, for a holder that outlives its object, or that the object holds. It does nothing when the object is gone."""
    held = weakref.WeakMethod(method)

    def call(*args: Any) -> Any:
        there = held()
        return there(*args) if there is not None else None

    return call


def steps(driver: Driver, optimizers: Sequence[Optimizer]) -> Undo:
    """Before each optimizer's ``step()``, and after the last one's."""
    before, after = weakly(driver.before_step), weakly(driver.after_update)
    undo: Undo = [optimizer.register_step_pre_hook(before).remove for optimizer in optimizers]
    return [*undo, optimizers[-1].register_step_post_hook(lambda *_: after()).remove]


def backward(driver: Driver, parameters: Sequence[nn.Parameter]) -> Undo:
    """When a backward ends that has made a gradient of one of the parameters."""
    accumulated = weakly(driver.on_gradient)
    return [parameter.register_post_accumulate_grad_hook(accumulated).remove for parameter in parameters]


def scaler(driver: Driver, scaler: torch.amp.GradScaler) -> Undo:
    """A GradScaler that finds an infinite gradient does not call ``step()``, so no hook of the optimizer fires: it is watched itself."""
    me, step, unscale, before_unscaling = weakref.ref(driver), scaler.step, scaler.unscale_, weakly(driver.before_unscaling)

    def watched_step(optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        here = me()
        if here is None:
            return step(optimizer, *args, **kwargs)
        return here.scaled_step(optimizer, lambda: step(optimizer, *args, **kwargs))

    def watched_unscale(optimizer: Optimizer) -> None:
        before_unscaling(optimizer)
        unscale(optimizer)

    def undo() -> None:
        scaler.step, scaler.unscale_ = step, unscale  # type: ignore[method-assign]

    scaler.step, scaler.unscale_ = watched_step, watched_unscale  # type: ignore[method-assign]
    return [undo]
