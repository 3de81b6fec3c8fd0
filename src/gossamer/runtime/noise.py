"""How a worker's compute time varies from step to step: a factor for each worker and step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Noise(ABC):
    @abstractmethod
    def draw(self, rng: np.random.Generator, n: int) -> np.ndarray:
        """One factor for each of n workers."""

    @property
    def mean(self) -> float:
        return 1.0


@dataclass(frozen=True)
class Constant(Noise):
    def draw(self, rng: np.random.Generator, n: int) -> np.ndarray:
        return np.ones(n)


@dataclass(frozen=True)
class Normal(Noise):
    """Mean 1; what would be negative is 0."""

    sigma: float

    def draw(self, rng: np.random.Generator, n: int) -> np.ndarray:
        factor = rng.standard_normal(n)
        factor *= self.sigma
        factor += 1.0
        return np.maximum(factor, 0.0, out=factor)


@dataclass(frozen=True)
class Lognormal(Noise):
    """Mean 1; sigma is that of the logarithm."""

    sigma: float

    def draw(self, rng: np.random.Generator, n: int) -> np.ndarray:
        factor = rng.standard_normal(n)
        factor *= self.sigma
        factor -= self.sigma**2 / 2
        return np.exp(factor, out=factor)


@dataclass(frozen=True)
class Stragglers(Noise):
    """In each step a ``share`` of the workers, other ones each time, takes ``factor`` times as long; besides, all vary as lognormal
    with ``sigma``."""

    share: float
    factor: float
    sigma: float = 0.0

    def draw(self, rng: np.random.Generator, n: int) -> np.ndarray:
        times = Lognormal(self.sigma).draw(rng, n) if self.sigma else np.ones(n)
        times[rng.random(n) < self.share] *= self.factor
        return times

    @property
    def mean(self) -> float:
        return 1 + self.share * (self.factor - 1)


@dataclass(frozen=True)
class Trace(Noise):
    """Factors that were measured; each worker and step draws one of them."""

    factors: tuple[float, ...]

    def draw(self, rng: np.random.Generator, n: int) -> np.ndarray:
        return np.asarray(self.factors)[rng.integers(0, len(self.factors), n)]

    @property
    def mean(self) -> float:
        return float(np.mean(self.factors))


KINDS: dict[str, type[Noise]] = {
    "constant": Constant,
    "normal": Normal,
    "lognormal": Lognormal,
    "stragglers": Stragglers,
    "trace": Trace,
}
