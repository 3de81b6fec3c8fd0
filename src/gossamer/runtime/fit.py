"""The unknowns of a cluster from a table of iteration times: as measured or published, for some sizes and methods.

All methods share one set of five: the part of computing that more workers do not shorten, the part that they do, what a host's
interface really carries, the latency between hosts, and how much compute times vary. SGP has one of its own, its ``overhead``.
Nothing is fitted per method or per size, so a size that was left out is a prediction.

    [[cluster]]
    name = "8 T4 per host"
    per_host = 8
    parameters = 63_000_000
    gbit = 100                  # as stated with the measurement: where the search begins, and stays if the times do not tell
    latency_us = 10             # the same
    intra_gbit = 64             # inside a host; not fitted
    fit = [16, 32]              # sizes to fit; the others are predicted

    [cluster.times.16]          # workers: method = ms
    "ddp" = 372.5
    "decent-dp: hypercube" = 314.8
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from typing import Any, Literal

import numpy as np
import scipy.optimize
from pydantic import Field, ValidationError, model_validator

from gossamer.errors import GossamerError
from gossamer.runtime import cluster as clusters
from gossamer.runtime.cluster import Cluster, Part
from gossamer.runtime.methods import Method, StochasticGradientPush, parse
from gossamer.runtime.model import simulate
from gossamer.runtime.workload import Workload
from gossamer.toml_files import explained

_ITERATIONS = 48
# How much a stated bandwidth or latency weighs against the table: a factor e is like an error of so much in one time.
_PRIOR = 0.05


class Table(Part):
    """``scaling``: "strong" if all workers together do a fixed amount of work, "weak" if each does. Times in ms."""

    name: str
    per_host: int = Field(ge=1)
    parameters: int = Field(ge=1)
    bytes_per_parameter: int = Field(4, ge=1, le=8)
    gbit: float = Field(100.0, gt=0)
    intra_gbit: float = Field(100.0, gt=0)
    latency_us: float = Field(10.0, gt=0)
    scaling: Literal["strong", "weak"] = "strong"
    fit: tuple[int, ...] | None = None
    times: dict[int, dict[str, float]]

    @model_validator(mode="after")
    def _whole(self) -> Table:
        if not self.times:
            raise GossamerError("times is empty; give at least two sizes, such as [cluster.times.16]")
        for n, row in self.times.items():
            if n < 1 or (n > self.per_host and n % self.per_host):
                raise GossamerError(f"times.{n}: {n} workers do not fill hosts of {self.per_host}")
            for name, ms in row.items():
                parse(name)
                if not ms > 0:
                    raise GossamerError(f"times.{n}.{name!r} is {ms}; a time is above 0")
        if missing := sorted(set(self.fitted) - set(self.times)):
            raise GossamerError(f"fit names {missing[0]} workers, but times has {', '.join(map(str, sorted(self.times)))} only")
        if self.scaling == "strong" and len(self.fitted) < 2:
            raise GossamerError("fit: two sizes at least, or what more workers shorten can't be told from what they do not")
        return self

    @property
    def fitted(self) -> tuple[int, ...]:
        """By default all sizes but the largest."""
        sizes = sorted(self.times)
        return tuple(sizes[:-1] if len(sizes) > 2 else sizes) if self.fit is None else tuple(sorted(set(self.fit)))


@dataclass(frozen=True)
class Unknowns:
    """Seconds, and Gbit per second."""

    fixed: float
    divided: float  # for one worker alone
    gbit: float
    latency_us: float
    sigma: float
    overhead: float = 0.0  # SGP's own

    def compute(self, n: int, scaling: str) -> float:
        return self.fixed + self.divided / (n if scaling == "strong" else 1)


@dataclass(frozen=True)
class Cell:
    workers: int
    method: str
    measured: float  # ms
    predicted: float
    fitted: bool

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1


@dataclass(frozen=True)
class Fit:
    table: Table
    unknowns: Unknowns
    cells: tuple[Cell, ...]

    def mean_error(self, fitted: bool) -> float:
        errors = [abs(cell.error) for cell in self.cells if cell.fitted == fitted]
        return float(np.mean(errors)) if errors else 0.0

    def ranking(self, workers: int) -> tuple[list[str], list[str]]:
        """The methods, the fastest first: as measured and as predicted."""
        cells = [cell for cell in self.cells if cell.workers == workers]
        measured, predicted = sorted(cells, key=lambda c: c.measured), sorted(cells, key=lambda c: c.predicted)
        return [c.method for c in measured], [c.method for c in predicted]


def fit(table: Table) -> Fit:
    """Least squares of the relative errors over the sizes to fit: a few steps from each of a few starting points, and the best of
    them to the end."""
    points = [(n, parse(name), ms) for n in table.fitted for name, ms in table.times[n].items()]
    own = any(isinstance(method, StochasticGradientPush) for _, method, _ in points)
    tried = [_search(table, points, start, 4) for start in _starts(table, own)]
    best = _search(table, points, min(tried, key=lambda found: found.cost).x, 20)
    unknowns = _unpack(best.x)
    cells = tuple(
        Cell(n, name, ms, predict(table, unknowns, n, parse(name)), n in table.fitted)
        for n in sorted(table.times)
        for name, ms in table.times[n].items()
    )
    return Fit(table, unknowns, cells)


def predict(table: Table, unknowns: Unknowns, workers: int, method: Method) -> float:
    """Milliseconds per iteration."""
    if isinstance(method, StochasticGradientPush):
        method = replace(method, overhead=unknowns.overhead)
    cluster, workload = _cluster(table, unknowns, workers), _workload(table, unknowns, workers)
    return simulate(cluster, workload, method, _ITERATIONS).seconds * 1e3


def _cluster(table: Table, unknowns: Unknowns, workers: int) -> Cluster:
    hosts = max(1, workers // table.per_host)
    return clusters.build(
        {
            "name": table.name,
            "hosts": hosts,
            "per_host": min(workers, table.per_host),
            "inter": {"gbit": unknowns.gbit, "latency_us": unknowns.latency_us},
            "intra": {"gbit": table.intra_gbit, "latency_us": min(unknowns.latency_us, table.latency_us)},
            "noise": {"kind": "lognormal", "sigma": unknowns.sigma},
        }
    )


def _workload(table: Table, unknowns: Unknowns, workers: int) -> Workload:
    made = Workload.of_parameters(table.parameters, unknowns.compute(workers, table.scaling))
    scale = table.bytes_per_parameter / 4
    return replace(made, tensors=tuple(int(size * scale) for size in made.tensors))


# --- The search ----------------------------------------------------------------------------------------------------------


def _unpack(x: np.ndarray) -> Unknowns:
    return Unknowns(*np.exp(x).tolist())


def _starts(table: Table, own: bool) -> list[np.ndarray]:
    """Computing from the fastest method of the smallest and the largest fitted size; bandwidths as stated, and half of that."""
    low, high = table.fitted[0], table.fitted[-1]
    first, last = (min(table.times[n].values()) / 1e3 for n in (low, high))
    if table.scaling == "strong" and low != high:
        divided = max((first - last) / (1 / low - 1 / high), first * low * 0.05)
        fixed = max(first - divided / low, first * 0.05)
    else:
        divided, fixed = first * 0.5, first * 0.5
    overhead = [first * 0.1] * own
    return [
        np.log([fixed, divided * 0.9, table.gbit * share, table.latency_us, sigma, *overhead])
        for share, sigma in ((1.0, 0.03), (1.0, 0.12), (0.4, 0.05))
    ]


def _search(table: Table, points: list[tuple[int, Method, float]], start: np.ndarray, steps: int) -> Any:
    own = len(start) == 6
    stated = np.log([table.gbit, table.latency_us])
    low = np.log([1e-5, 1e-5, table.gbit / 50, table.latency_us / 20, 1e-3] + [1e-6] * own)
    high = np.log([1e3, 1e5, table.gbit * 2, table.latency_us * 20, 0.6] + [1e2] * own)

    def residuals(x: np.ndarray) -> np.ndarray:
        unknowns = _unpack(x)
        errors = [np.log(predict(table, unknowns, n, method) / ms) for n, method, ms in points]
        return np.array([*errors, *(_PRIOR * (x[2:4] - stated))])

    inside = np.clip(start, low + 1e-6, high - 1e-6)
    return scipy.optimize.least_squares(
        residuals, inside, bounds=(low, high), diff_step=1e-3, max_nfev=steps, ftol=1e-4, xtol=1e-4
    )


# --- Reading -------------------------------------------------------------------------------------------------------------


class _File(Part):
    cluster: tuple[Table, ...] = Field(min_length=1)


def tables(raw: Mapping[str, Any], where: str = "table") -> tuple[Table, ...]:
    try:
        return _File.model_validate(raw).cluster
    except ValidationError as error:
        raise GossamerError(f"{where}: {explained(error, _File, {'cluster': Table})}") from None


def load(path: Path) -> tuple[Table, ...]:
    try:
        raw = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, RecursionError, ValueError) as error:
        raise GossamerError(f"{path} is not valid TOML: {error}") from None
    except OSError as error:
        raise GossamerError(f"table {path} can't be read: {error.strerror}") from None
    return tables(raw, str(path))


def published() -> tuple[Table, ...]:
    """The iteration times of "From Promise to Practice" (arXiv 2410.11998), Figure 6."""
    text = (resources.files("gossamer.runtime") / "published.toml").read_text(encoding="utf-8")
    return tables(tomllib.loads(text), "published.toml")
