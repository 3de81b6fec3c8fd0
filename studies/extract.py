"""What the page needs of an experiment: a small file of plain numbers, to be committed."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gossamer.dbench import search
from gossamer.dbench.analysis import RunData, load
from gossamer.dbench.store import FILE, Store
from gossamer.rows.profile import MEASURES

_POINTS = 40  # of a curve


def write(folders: Sequence[Path], to: Path, keep: bool = False) -> None:
    """``keep``: what the file has of other runs stays in it."""
    runs = {_key(run): run for run in json.loads(to.read_text())["runs"]} if keep and to.exists() else {}
    for folder in folders:
        store = Store(folder / FILE)
        metric = store.meta("metric")
        spec = search.ran(store)
        rates = {part.name: spec.optimizer.lr if part.lr is None else part.lr for part in spec.methods}
        runs |= {_key(run): run | {"lr": rates[run["method"]]} for run in map(_run, load(store))}
        store.close()
    rows = ",\n".join(json.dumps(run) for run in runs.values())  # a line for each run: changes are readable
    to.parent.mkdir(parents=True, exist_ok=True)
    to.write_text(f'{{"metric": {json.dumps(metric)}, "runs": [\n{rows}\n]}}\n')


def _key(run: dict[str, Any]) -> tuple[str, int, int]:
    return run["method"], run["replicas"], run["seed"]


def _run(data: RunData) -> dict[str, Any]:
    run = data.run
    some = np.unique(np.linspace(0, len(data.steps) - 1, _POINTS).round().astype(int)).tolist() if len(data.steps) else []
    return {
        "method": run.method,
        "replicas": run.replicas,
        "seed": run.seed,
        "status": run.status,
        "value": run.value,
        "worst": run.value_worst,
        "bytes": run.bytes,
        "steps": run.steps,
        "connections": _short(data.connections),
        "epochs": [[e.epoch + 1, _short(e.value), e.bytes] for e in data.epochs],
        "looks": [int(data.steps[k]) for k in some],
        "dispersion": {m: [_short(float(data.dispersion[m][k].mean())) for k in some] for m in MEASURES},
        "consensus": [_short(float(data.consensus[k])) for k in some],
        "early": {m: _short(data.early(m)) for m in MEASURES} | {"consensus": _short(data.early_consensus())},
        "changes": [[change.step, change.graph] for change in data.changes],
    }


def _short(value: float) -> float | None:
    return float(f"{value:.5g}") if np.isfinite(value) else None
