"""The paper's questions, as functions over finished runs. Intervals are 95 % t-intervals over seeds.

A run that diverged has no value. It counts as the worst where methods are ranked, and is named where values are averaged.
"""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import scipy
import torch

from gossamer import graphs
from gossamer.dbench.store import FINISHED, Number, ProfileRow, Run, Store
from gossamer.members.outages import Outage
from gossamer.rows.profile import MEASURES, dispersion
from gossamer.schedules import Change
from gossamer.trainer import EpochRecord

EARLY = 0.1  # the first tenth of training is "early"


@dataclass(frozen=True)
class RunData:
    """A run with its history. ``dispersion[measure]`` is ``[looks, tensors]``, one row per profiled step."""

    run: Run
    centralized: bool
    epochs: tuple[EpochRecord, ...]
    steps: np.ndarray
    dispersion: dict[str, np.ndarray]
    consensus: np.ndarray
    changes: tuple[Change, ...]
    step_seconds: float | None = None  # on the cluster that the spec names; predicted
    graph_seconds: dict[str, float] | None = None  # the same by graph, if the run changed it as it went
    outages: tuple[Outage, ...] = ()
    numbers: tuple[Number, ...] = ()  # what the method has noted, at the steps of the profile

    def noted(self, name: str) -> Curve:
        """One of the method's own numbers over the steps; empty if it has no such number."""
        found = [n for n in self.numbers if n.name == name]
        values = [math.nan if n.value is None else n.value for n in found]
        return Curve(np.array([n.step for n in found], dtype=np.int64), np.array(values))

    @property
    def value(self) -> float | None:
        return self.run.value

    def seconds_at(self, step: int) -> float | None:
        """Predicted, from the start up to this step."""
        if self.step_seconds is None or self.graph_seconds is None:
            return None if self.step_seconds is None else step * self.step_seconds
        ends = [*(change.step for change in self.changes[1:]), step]
        spans = [(change.graph, min(end, step) - change.step) for change, end in zip(self.changes, ends, strict=True)]
        # With fewer workers for a time there may be graphs that no spec names.
        return sum(max(0, steps) * self.graph_seconds.get(graph, self.step_seconds) for graph, steps in spans)

    @property
    def connections(self) -> float:
        """Other replicas that one replica heard per step, averaged over training."""
        if self.epochs:
            return float(np.mean([e.degree for e in self.epochs]))
        # Diverged before the end of the first epoch: what its first graph has.
        return graphs.parse(self.changes[0].graph, self.run.replicas).mean_degree() if self.changes else math.nan

    def at(self, fraction: float) -> int:
        """The look nearest to this fraction of training."""
        end = self.run.steps or int(self.steps[-1])
        return int(np.abs(self.steps - fraction * end).argmin())

    def early(self, measure: str) -> float:
        """Dispersion, averaged over tensors and over the looks in the first tenth of training; inf if it grew out of bounds."""
        if not len(self.steps):
            return math.nan
        return self._early(self.dispersion[measure].mean(axis=1))

    def early_consensus(self) -> float:
        """The same for the distance to the mean."""
        return self._early(self.consensus) if len(self.steps) else math.nan

    def _early(self, values: np.ndarray) -> float:
        # The second look at least: before the first average all methods of a seed are equal.
        early = float(values[self.steps <= max(EARLY * self.steps[-1], *self.steps[:2])].mean())
        return early if math.isfinite(early) else math.inf


@dataclass(frozen=True)
class Estimate:
    """A mean over seeds and its 95 % interval; with a single seed there is none (low = high = nan)."""

    mean: float
    low: float
    high: float
    seeds: int

    @property
    def half(self) -> float:
        return (self.high - self.low) / 2

    def above_zero(self) -> bool:
        return self.low > 0

    def below_zero(self) -> bool:
        return self.high < 0


def estimate(values: Iterable[float]) -> Estimate:
    data = np.array([v for v in values if not math.isnan(v)], dtype=np.float64)
    if len(data) == 0:
        return Estimate(math.nan, math.nan, math.nan, 0)
    mean = float(data.mean())
    if len(data) == 1:
        return Estimate(mean, math.nan, math.nan, 1)
    half = float(scipy.stats.t.ppf(0.975, len(data) - 1) * data.std(ddof=1) / math.sqrt(len(data)))
    return Estimate(mean, mean - half, mean + half, len(data))


def load(store: Store) -> list[RunData]:
    """Everything that is finished."""
    spec = store.spec()
    clock = store.meta("clock") or {}
    loaded = []
    for run in store.runs():
        if run.status not in FINISHED:
            continue
        looks = store.profiles(run)
        loaded.append(
            RunData(
                run=run,
                centralized=spec.method(run.method).centralized,
                epochs=tuple(store.epochs(run.id)),
                steps=np.array([look.step for look in looks], dtype=np.int64),
                dispersion=dispersion_of(looks),
                consensus=np.array([look.consensus_distance for look in looks]),
                changes=tuple(store.changes(run.id)),
                step_seconds=clock.get("seconds", {}).get(run.method, {}).get(str(run.replicas)),
                graph_seconds=clock.get("graphs", {}).get(run.method, {}).get(str(run.replicas)),
                outages=spec.outages(run.cell),
                numbers=tuple(store.numbers(run.id)),
            )
        )
    return loaded


def dispersion_of(looks: Sequence[ProfileRow]) -> dict[str, np.ndarray]:
    """Many looks at once, as long as the same number of replicas took part: [replicas, looks, tensors] → [looks, tensors]."""
    parts = [
        dispersion(torch.from_numpy(np.stack([look.norms for look in same], axis=1)))
        for _, same in itertools.groupby(looks, lambda look: len(look.norms))
    ]
    return {m: np.concatenate([part[m].numpy() for part in parts]) if parts else np.zeros((0, 0)) for m in MEASURES}


# --- Selecting ------------------------------------------------------------------------------------------------------------


def methods(runs: Sequence[RunData]) -> list[str]:
    return list(dict.fromkeys(r.run.method for r in runs))


def scales(runs: Sequence[RunData]) -> list[int]:
    return sorted({r.run.replicas for r in runs})


def seeds(runs: Sequence[RunData]) -> list[int]:
    return sorted({r.run.seed for r in runs})


def select(runs: Sequence[RunData], method: str | None = None, n: int | None = None, seed: int | None = None) -> list[RunData]:
    return [
        r
        for r in runs
        if (method is None or r.run.method == method)
        and (n is None or r.run.replicas == n)
        and (seed is None or r.run.seed == seed)
    ]


def cells(runs: Sequence[RunData]) -> Iterator[list[RunData]]:
    """The runs of each method at each scale, the smallest scale first."""
    for n, method in itertools.product(scales(runs), methods(runs)):
        if cell := select(runs, method, n):
            yield cell


# --- The questions --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Final:
    """The end of training for one method at one scale, over the seeds. ``diverged`` runs are not in the means."""

    method: str
    replicas: int
    value: Estimate
    mean_replica: Estimate
    worst_replica: Estimate
    gap: Estimate
    connections: float
    bytes: float
    diverged: int


def finals(runs: Sequence[RunData], higher_is_better: bool = True) -> list[Final]:
    """Final metric, replicas, generalisation gap (train better than test is positive), connections and bytes."""
    sign = 1 if higher_is_better else -1
    found = []
    for cell in cells(runs):
        done = [r.run for r in cell if r.run.value is not None]
        found.append(
            Final(
                cell[0].run.method,
                cell[0].run.replicas,
                value=estimate(_number(r.value) for r in done),
                mean_replica=estimate(_number(r.value_mean) for r in done),
                worst_replica=estimate(_number(r.value_worst) for r in done),
                gap=estimate(sign * (_number(r.value_train) - _number(r.value)) for r in done),
                connections=float(np.mean([r.connections for r in cell])),
                bytes=float(np.mean([_number(r.bytes) for r in done])) if done else math.nan,
                diverged=len(cell) - len(done),
            )
        )
    return found


def paired_difference(runs: Sequence[RunData], method: str, other: str, n: int) -> Estimate:
    """``method`` minus ``other`` at scale n, seed by seed (same data order, same start)."""
    pairs = []
    for seed in seeds(runs):
        a, b = (select(runs, m, n, seed) for m in (method, other))
        if a and b and a[0].value is not None and b[0].value is not None:
            pairs.append(a[0].value - b[0].value)
    return estimate(pairs)


def correlation(runs: Sequence[RunData], n: int, of: Callable[[RunData], float], higher_is_better: bool = True) -> Estimate:
    """Spearman's ρ between ``of(run)`` and the final metric over the decentralized methods at scale n: one ρ per seed, then
    their mean and interval. For a metric where lower is better, the sign is turned, so that positive always means "better"."""
    decentralized = [r for r in runs if not r.centralized]
    return _correlation([[(of(r), r) for r in select(decentralized, n=n, seed=seed)] for seed in seeds(runs)], higher_is_better)


def metric_against_connections(runs: Sequence[RunData], n: int, higher_is_better: bool = True) -> Estimate:
    return correlation(runs, n, lambda r: r.connections, higher_is_better)


def metric_against_early_dispersion(runs: Sequence[RunData], n: int, measure: str, higher_is_better: bool = True) -> Estimate:
    return correlation(runs, n, lambda r: r.early(measure), higher_is_better)


@dataclass(frozen=True)
class Curve:
    """A number of one run, or a mean over seeds, at each of some steps."""

    steps: np.ndarray
    mean: np.ndarray


def dispersion_over_time(runs: Sequence[RunData], method: str, n: int, measure: str) -> Curve:
    """Dispersion, averaged over tensors; mean over seeds. Runs that diverged are left out."""
    cell = [r for r in select(runs, method, n) if len(r.steps) and r.value is not None]
    if not cell:
        return Curve(np.array([]), np.array([]))
    length = min(len(r.steps) for r in cell)
    stacked = np.stack([r.dispersion[measure][:length].mean(axis=1) for r in cell])
    return Curve(cell[0].steps[:length], np.array([estimate(column).mean for column in stacked.T]))


def ranks_over_time(
    runs: Sequence[RunData], n: int, measure: str, seed: int | None = None
) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """At each profiled step and for each tensor, rank the methods by dispersion (1 is the least); the mean rank over tensors
    and seeds. Centralized training is not ranked: its dispersion is exactly 0. A run that diverged ranks last from then on."""
    names = [m for m in methods(runs) if any(not r.centralized and len(r.steps) for r in select(runs, m, n))]
    tables = []
    for s in seeds(runs) if seed is None else [seed]:
        cell = [found[0] for m in names if (found := [r for r in select(runs, m, n, s) if len(r.steps)])]
        if len(cell) == len(names) and cell:
            longest = max(cell, key=lambda r: len(r.steps))
            values = np.full((len(cell), *longest.dispersion[measure].shape), np.inf)  # [methods, looks, tensors]
            for row, r in zip(values, cell, strict=True):
                row[: len(r.steps)] = np.where(np.isfinite(r.dispersion[measure]), r.dispersion[measure], np.inf)
            tables.append((longest.steps, scipy.stats.rankdata(values, axis=0).mean(axis=2)))
    if not tables:
        return np.array([]), {}
    length = min(len(steps) for steps, _ in tables)
    mean = np.mean([ranks[:, :length] for _, ranks in tables], axis=0)
    return tables[0][0][:length], dict(zip(names, mean, strict=True))


def metric_against_rank(runs: Sequence[RunData], n: int, measure: str, higher_is_better: bool = True) -> Estimate:
    """Spearman's ρ between a method's mean rank by dispersion over the whole run and its final metric; one per seed."""
    ranks = {seed: ranks_over_time(runs, n, measure, seed)[1] for seed in seeds(runs)}
    pairs = [[(float(rank.mean()), select(runs, m, n, s)[0]) for m, rank in found.items()] for s, found in ranks.items()]
    return _correlation(pairs, higher_is_better)


def _correlation(pairs: Sequence[Sequence[tuple[float, RunData]]], higher_is_better: bool) -> Estimate:
    """Of a number of each run with its final metric; one list per seed."""
    sign = 1 if higher_is_better else -1
    found = []
    for cell in pairs:
        y = [-math.inf if r.value is None else sign * r.value for _, r in cell]
        found.append(_spearman([number for number, _ in cell], y))
    rho = estimate(found)
    # A t-interval knows nothing of the bounds of a correlation.
    return Estimate(rho.mean, max(-1.0, rho.low), min(1.0, rho.high), rho.seeds) if rho.low == rho.low else rho


@dataclass(frozen=True)
class ToTarget:
    """When a method first reached the target: mean epochs and bytes over the seeds that did, and seconds if there is a clock."""

    method: str
    replicas: int
    epochs: Estimate
    bytes: Estimate
    reached: int
    seeds: int
    seconds: Estimate | None = None  # predicted


def to_target(runs: Sequence[RunData], target: float, higher_is_better: bool = True) -> list[ToTarget]:
    found = []
    for cell in cells(runs):
        run = cell[0].run
        first = []
        predicted = []
        for r in cell:
            good = [e for e in r.epochs if (e.value >= target if higher_is_better else e.value <= target)]
            first += good[:1]
            predicted += [r.seconds_at(e.step) for e in good[:1]]
        epochs, received = estimate(e.epoch + 1 for e in first), estimate(e.bytes for e in first)
        seconds = None if cell[0].step_seconds is None else estimate(s for s in predicted if s is not None)
        found.append(ToTarget(run.method, run.replicas, epochs, received, len(first), len(cell), seconds))
    return found


def _spearman(x: Sequence[float], y: Sequence[float]) -> float:
    """nan where there is nothing to correlate."""
    if len(x) < 3 or len(set(x)) < 2 or len(set(y)) < 2 or any(math.isnan(v) for v in x):
        return math.nan
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return float(scipy.stats.spearmanr(scipy.stats.rankdata(x), scipy.stats.rankdata(y)).statistic)


def _number(value: float | None) -> float:
    return math.nan if value is None else float(value)
