"""What an update rule looks like, and how to find one by name."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import ClassVar

from gossamer.errors import GossamerError
from gossamer.optim import BlockOptimizer
from gossamer.rows.replicas import Replicas
from gossamer.transport.mixer import Mixer

Look = Callable[[], None]

_KNOWN: dict[str, type[Algorithm]] = {}


class Algorithm(ABC):
    name: ClassVar[str]
    averages_gradients: ClassVar[bool] = False  # then every replica must start, and stays, the same

    def __init__(self, optimizer: BlockOptimizer) -> None:
        self.optimizer = optimizer

    def __init_subclass__(cls) -> None:
        _KNOWN[cls.name] = cls

    @abstractmethod
    def begin(self, replicas: Replicas, mixer: Mixer, look: Look) -> None: ...

    @abstractmethod
    def finish(self, replicas: Replicas, mixer: Mixer, look: Look) -> None: ...


def algorithm(name: str) -> type[Algorithm]:
    if name not in _KNOWN:
        raise GossamerError(f"algorithm {name!r} is not known; use one of {', '.join(sorted(_KNOWN))}")
    return _KNOWN[name]
