"""One sentence per finding, with its numbers. A sentence never claims what the interval over seeds does not support."""

from __future__ import annotations

import math
from collections.abc import Sequence

from gossamer.dbench import analysis
from gossamer.dbench.analysis import Estimate, RunData
from gossamer.dbench.partition import Partition, sentence
from gossamer.dbench.spec import CENTRALIZED, Spec

FEW = 3  # seeds from which on an interval says something: over two it is 13 times the standard error
_ENOUGH = 5  # with 3 or 4 methods ρ takes so few values that seeds agree by chance, and intervals come out too narrow


def findings(
    runs: Sequence[RunData], spec: Spec, metric: str, higher_is_better: bool, partition: Partition | None = None
) -> list[str]:
    if not runs:
        return ["No run is finished yet."]
    n = analysis.scales(runs)[-1]
    found = [_best_and_worst(runs, n, metric, higher_is_better), *_diverged(runs)]
    found += _against(runs, n, metric, higher_is_better)
    found += _scale(runs, metric)
    found += _correlations(runs, n, metric, higher_is_better)
    found += _early_and_late(runs, n)
    if partition is not None:
        found.append(sentence(partition, n))
    if any(r.centralized for r in runs):
        found.append("Centralized training keeps all replicas equal: its dispersion is exactly 0, so it is not ranked.")
    if spec.target is not None:
        found += _target(runs, n, spec.target.value, metric, higher_is_better)
    seeds = len({r.run.seed for r in runs})
    if seeds < FEW:
        few = "is one seed" if seeds == 1 else "are two seeds"
        found.append(
            f"There {few} only, so there are no intervals and no claim here is more than an observation; use {FEW} or more."
        )
    return found


def digits(value: float) -> int:
    """Decimal places for accuracies of 0.953 and perplexities of 312.4 alike."""
    return 3 if abs(value) < 10 else 2 if abs(value) < 100 else 1


def shown(e: Estimate, more: int = 0) -> str:
    """``more`` decimal places than usual."""
    if math.isnan(e.mean):
        return "–"
    places = digits(e.mean) + more
    return f"{e.mean:.{places}f}" if e.seeds < FEW else f"{e.mean:.{places}f} ± {e.half:.{places}f}"


def interval(e: Estimate) -> str:
    places = digits(max(abs(e.low), abs(e.high)))
    return "one seed" if math.isnan(e.low) else f"95 % interval {e.low:+.{places}f} to {e.high:+.{places}f}, {e.seeds} seeds"


def _finals(runs: Sequence[RunData], n: int) -> dict[str, Estimate]:
    return {f.method: f.value for f in analysis.finals(runs) if f.replicas == n and not math.isnan(f.value.mean)}


def _best_and_worst(runs: Sequence[RunData], n: int, metric: str, higher: bool) -> str:
    broken = {r.run.method for r in runs if r.value is None}
    values = {method: value for method, value in _finals(runs, n).items() if method not in broken}
    if len(values) < 2:
        return f"At n={n} fewer than two methods have a result on every seed."
    ordered = sorted(values, key=lambda m: values[m].mean, reverse=higher)
    best, worst = ordered[0], ordered[-1]
    return f"At n={n} the averaged model's {metric} ranges from {shown(values[worst])} ({worst}) to {shown(values[best])} ({best})."


def _diverged(runs: Sequence[RunData]) -> list[str]:
    bad = [r for r in runs if r.value is None]
    if not bad:
        return []
    cells = sorted({f"{r.run.method} at n={r.run.replicas}" for r in bad})
    return [
        f"{len(bad)} of {len(runs)} runs diverged ({', '.join(cells)}): they have no value and count as worst in rankings. "
        f"The first: {bad[0].run.message}"
    ]


def _against(runs: Sequence[RunData], n: int, metric: str, higher: bool) -> list[str]:
    """Each decentralized method against the reference, seed by seed: centralized if it is there, else complete."""
    names = analysis.methods(runs)
    reference = next((m for m in (CENTRALIZED, "complete") if m in names), None)
    if reference is None:
        return []
    broken = {r.run.method for r in runs if r.value is None and r.run.replicas == n}
    claims: dict[str, list[str]] = {
        f"Worse than {reference} at n={n}, seed by seed": [],
        f"Better than {reference} at n={n}, seed by seed": [],
        f"No difference to {reference} that the seeds support at n={n}": [],
    }
    worse, better, level = claims.values()
    for method in names:
        if method == reference or method in broken or reference in broken:
            continue  # the seeds that are left would flatter it; that it diverged is said elsewhere
        e = analysis.paired_difference(runs, method, reference, n)
        if math.isnan(e.low):
            continue
        side = level
        if e.above_zero():
            side = better if higher else worse
        elif e.below_zero():
            side = worse if higher else better
        side.append(f"{method} ({e.mean:+.{digits(e.mean)}f}, {interval(e)})")
    return [f"{claim}: {'; '.join(found)}." for claim, found in claims.items() if found]


def _scale(runs: Sequence[RunData], metric: str) -> list[str]:
    sizes = analysis.scales(runs)
    if len(sizes) < 2:
        return []
    first, last = sizes[0], sizes[-1]
    parts = []
    for method in analysis.methods(runs):
        a, b = (_finals(runs, n).get(method) for n in (first, last))
        if a is not None and b is not None:
            parts.append(f"{method} {a.mean:.{digits(a.mean)}f} → {b.mean:.{digits(b.mean)}f}")
    return [f"From n={first} to n={last} the {metric} goes: {', '.join(parts)}."] if parts else []


def _correlations(runs: Sequence[RunData], n: int, metric: str, higher: bool) -> list[str]:
    decentralized = {r.run.method for r in runs if not r.centralized and r.run.replicas == n}
    if len(decentralized) < 3:
        return []
    found = []
    questions = {
        "more connections, better results": (analysis.metric_against_connections(runs, n, higher), 1),
        "less early dispersion (Gini), better results": (analysis.metric_against_early_dispersion(runs, n, "gini", higher), -1),
        "a lower rank by dispersion (Gini), better results": (analysis.metric_against_rank(runs, n, "gini", higher), -1),
    }
    for claim, (rho, sign) in questions.items():
        if math.isnan(rho.mean):
            continue
        supported = (rho.above_zero() and sign > 0) or (rho.below_zero() and sign < 0)
        if len(decentralized) < _ENOUGH:
            verdict = f"no verdict with fewer than {_ENOUGH} decentralized methods"
        elif math.isnan(rho.low):
            verdict = "one seed, no verdict"
        else:
            verdict = "supported" if supported else "not supported by these seeds"
        numbers = f"Spearman's ρ = {rho.mean:+.2f} over {len(decentralized)} decentralized methods at n={n}, {interval(rho)}"
        found.append(f"“{claim[0].upper()}{claim[1:]}”: {verdict} ({numbers}).")
    return found


def _early_and_late(runs: Sequence[RunData], n: int) -> list[str]:
    parts = []
    for method in analysis.methods(runs):
        curve = analysis.dispersion_over_time(runs, method, n, "gini")
        if len(curve.steps) < 3 or curve.mean.max() == 0:
            continue
        peak = int(curve.mean.argmax())
        parts.append(f"{method} {curve.mean[peak]:.2g} at step {curve.steps[peak]}, {curve.mean[-1]:.2g} at the end")
    return [f"Dispersion (Gini, mean over tensors) at n={n}, peak and end: {'; '.join(parts)}."] if parts else []


def _target(runs: Sequence[RunData], n: int, target: float, metric: str, higher: bool) -> list[str]:
    parts = []
    for t in analysis.to_target(runs, target, higher):
        if t.replicas == n:
            clock = "" if t.seconds is None else f", {t.seconds.mean:.3g} s predicted"
            reached = f"{t.epochs.mean:.1f} epochs, {t.bytes.mean / 1e6:.3g} MB{clock}" if t.reached else "never"
            parts.append(f"{t.method} {reached}" + (f" ({t.reached} of {t.seeds} seeds)" if 0 < t.reached < t.seeds else ""))
    return [f"To reach {metric} {target:g} at n={n}: {'; '.join(parts)}."] if parts else []
