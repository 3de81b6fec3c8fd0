"""Results as plain data: one object per run. The keys are documented in docs/results.md and stay."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Sequence
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from gossamer.dbench import search
from gossamer.dbench.analysis import RunData, load
from gossamer.dbench.store import Run, Store
from gossamer.rows.profile import MEASURES


def results(store: Store) -> list[dict[str, Any]]:
    """One dict per run of the grid, unfinished ones included (their numbers are None)."""
    metric = store.meta("metric")["name"]
    finished = {data.run.id: data for data in load(store)}
    spec = search.ran(store)
    rates = {part.name: spec.optimizer.lr if part.lr is None else part.lr for part in spec.methods}
    return [
        {
            "method": run.method,
            "replicas": run.replicas,
            "seed": run.seed,
            "failures": run.failures,
            "status": run.status,
            "metric": metric,
            "lr": rates[run.method],
            "value": run.value,
            "value_mean": run.value_mean,
            "value_worst": run.value_worst,
            "value_spread": run.value_spread,
            "value_own": run.value_own,
            "fairness": _fairness(run),
            "value_train": run.value_train,
            "bytes_per_replica": run.bytes,
            "steps": run.steps,
            "seconds": run.seconds,
            "predicted_seconds": _predicted(finished.get(run.id)),
            "consensus_distance": run.consensus_distance,
            "connections": _plain(finished[run.id].connections) if run.id in finished else None,
            "dispersion": _dispersion(finished.get(run.id)),
            "message": run.message,
        }
        for run in store.runs()
    ]


def _fairness(run: Run) -> float | None:
    """Jain's index of the single replicas' values: 1 if all are equal, 1/n if all but one are 0."""
    if run.value_mean is None or run.value_spread is None or not run.value_mean:
        return None
    return 1 / (1 + (run.value_spread / run.value_mean) ** 2)


def _predicted(data: RunData | None) -> float | None:
    """On the cluster that the spec names."""
    return None if data is None or data.run.steps is None else data.seconds_at(data.run.steps)


def _dispersion(data: RunData | None) -> dict[str, dict[str, float | None]] | None:
    """The four measures, mean over tensors, at 10 % and at 100 % of training (the nearest profiled steps)."""
    if data is None or not len(data.steps):
        return None
    looks = {"at_10_percent": data.at(0.1), "at_100_percent": len(data.steps) - 1}
    return {when: {m: _plain(float(data.dispersion[m][look].mean())) for m in MEASURES} for when, look in looks.items()}


def _plain(value: float) -> float | None:
    return value if math.isfinite(value) else None


def flat(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Without objects in objects: ``dispersion`` becomes ``dispersion_at_10_percent_gini`` and so on."""
    made = []
    for row in rows:
        plain = {key: value for key, value in row.items() if key != "dispersion"}
        for when in ("at_10_percent", "at_100_percent"):
            for measure in MEASURES:
                plain[f"dispersion_{when}_{measure}"] = (row["dispersion"] or {}).get(when, {}).get(measure)
        made.append(plain)
    return made


def as_csv(rows: Sequence[dict[str, Any]]) -> str:
    lines = flat(rows)
    text = io.StringIO()
    writer = csv.DictWriter(text, list(lines[0]) if lines else ["method"], lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    return text.getvalue()


def as_table(rows: Sequence[dict[str, Any]], with_failures: bool) -> Table:
    """What a person looks for first, in 80 columns: the averaged model, the single ones, what it took."""
    metric = rows[0]["metric"] if rows else "value"
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("method", overflow="fold")
    axes = ("replicas", "seed", *(["failures"] if with_failures else []), "status")
    for name in axes:
        table.add_column(name, justify="left" if name in ("failures", "status") else "right")
    for name in (metric, "mean", "worst", "MB", "seconds"):
        table.add_column(name, justify="right")
    for row in rows:
        sent = row["bytes_per_replica"]
        table.add_row(
            *(Text(str(row[key])) for key in ("method", *axes)),
            *("–" if row[key] is None else f"{row[key]:.4g}" for key in ("value", "value_mean", "value_worst")),
            "–" if sent is None else f"{sent / 1e6:.4g}",
            "–" if row["seconds"] is None else f"{row['seconds']:.1f}",
        )
    return table
