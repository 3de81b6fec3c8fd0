"""Closures that ``optimizer.step(closure)`` evaluates the loss with.

A method that mixes parameters before the update can't have the loss evaluated after it. So the closure runs before ``step()`` does
anything, and the optimizer gets the loss that it has returned. All-reduce sees each backward, so there it may run inside ``step()``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from gossamer.errors import GossamerError
from gossamer.rows.flat import Flat

Closure = Callable[[], Any]


def given(optimizer: torch.optim.Optimizer, args: tuple, kwargs: dict) -> Closure | None:
    """What ``step()`` was called with. ``args`` begin with the optimizer."""
    closure = kwargs.get("closure")
    return closure if closure is not None else next((a for a in args if a is not None and a is not optimizer), None)


def replaced(args: tuple, kwargs: dict, old: Closure | None, new: Closure) -> tuple[tuple, dict]:
    """The arguments of ``step()``, with another closure."""
    return tuple(new if a is old else a for a in args), {key: new if a is old else a for key, a in kwargs.items()}


def then(closure: Closure, after: Closure) -> Closure:
    def both() -> Any:
        loss = closure()
        after()
        return loss

    return both


class Early:
    """A closure that has run: its loss, for as long as parameters are what they were then."""

    def __init__(self, closure: Closure, flat: Flat, optimizer: torch.optim.Optimizer, method: str) -> None:
        with torch.enable_grad():
            self._loss = closure()
        self._parameters = flat.parameters()
        self._versions = [p._version for p in self._parameters]
        self._who, self._method = type(optimizer).__name__, method

    def __call__(self) -> Any:
        if any(p._version != was for p, was in zip(self._parameters, self._versions, strict=True)):
            raise GossamerError(
                f"{self._who}.step(closure) asks for the loss after it has changed parameters, and method {self._method!r} exchanges "
                "them before; use method='atc', or graph='all-reduce'"
            )
        return self._loss
