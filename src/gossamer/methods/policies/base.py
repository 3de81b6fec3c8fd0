"""What chooses more than a graph."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

import torch

from gossamer.methods.base import Method
from gossamer.schedules.base import Schedule


class Policy(Schedule):
    """A schedule that also says which method a step runs. Its graphs say how often rows travel, and in how many bits."""

    alone: ClassVar[bool] = False  # whether it takes no method, wire or local steps beside it
    _KEPT: ClassVar[tuple[str, ...]] = ()  # attributes that a checkpoint has, beside those of every schedule

    def __repr__(self) -> str:
        return f"<{self.describe()}: {self.changes[-1].reason if self.changes else 'not used yet'}>"

    def meet(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """These train the replicas. Called before the first step, with optimizers of the same classes on all workers."""

    @abstractmethod
    def method(self, chosen: Method | None = None) -> Method:
        """Of the step that :meth:`decide` was last asked for. ``chosen``: what the person asked for, if anything."""

    def methods(self, chosen: Method | None = None) -> tuple[Method, ...]:
        """All that it may choose."""
        return (self.method(chosen),)

    def times(self, step: int) -> bool:
        """Whether it wants to know how long this step takes."""
        return False

    def timed(self, step: int, seconds: float, mean: float) -> Sequence[float]:
        """After a step: how long it took this worker, and how long of that its mean of gradients. Returns what all workers must know now;
        mostly nothing."""
        return ()

    def agree(self, step: int, everyone: Sequence[Sequence[float]]) -> str:
        """What :meth:`timed` has returned on each worker; nothing if they could not agree. Returns what to tell the person."""
        return ""

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {key: getattr(self, key) for key in self._KEPT}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        for key in self._KEPT:
            setattr(self, key, state[key])
