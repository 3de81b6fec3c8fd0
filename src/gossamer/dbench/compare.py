"""Two outputs of the same task side by side, method by method: metric and speed, and whether they differ by more than noise."""

from __future__ import annotations

import itertools
import json
import math

from rich.table import Table
from rich.text import Text

from gossamer.dbench import analysis, failure_costs
from gossamer.dbench.analysis import Estimate, RunData
from gossamer.dbench.failures import NONE
from gossamer.dbench.findings import shown
from gossamer.dbench.spec import differences
from gossamer.dbench.store import Store
from gossamer.errors import GossamerError

_MOST, _LONG = 8, 100  # differences between the specs that are listed, and the characters of each
_SPEED_NOISE = 0.15  # timings on one machine vary by about this much from run to run


def table(first: Store, second: Store) -> Table:
    found = differences(first.spec().model_dump(mode="json"), second.spec().model_dump(mode="json"))
    folders = f"{first.path.parent} and {second.path.parent}"
    if first.meta("task") != second.meta("task") or first.meta("metric") != second.meta("metric"):
        a_task, b_task = ({key: store.meta(key) for key in ("task", "metric")} for store in (first, second))
        found = differences(a_task, b_task)
        raise GossamerError(f"{folders} are of different tasks: {'; '.join(map(_short, found))}")
    a, b = analysis.load(first), analysis.load(second)
    if not a or not b:
        empty = first if not a else second
        raise GossamerError(f"{empty.path.parent} has no finished run yet, so there is nothing to compare")
    if not {(r.run.method, r.run.replicas) for r in a} & {(r.run.method, r.run.replicas) for r in b}:
        raise GossamerError(
            f"{folders} have no method in common at the same number of replicas: {'; '.join(map(_short, found))}"
        )
    metric, higher = first.meta("metric")["name"], first.meta("metric")["higher_is_better"]
    columns = ("method", "n", f"{metric} A", f"{metric} B", "B − A", "verdict", "speed B / A")
    made = Table(*columns, title=f"A: {first.path.parent}   B: {second.path.parent}")
    machines = [{key: str(value) for r in runs for key, value in json.loads(r.run.machine or "{}").items()} for runs in (a, b)]
    changed = [key for key in machines[0] if machines[0][key] != machines[1].get(key)]
    made.caption = "same machine and versions" if not changed else f"differs: {', '.join(changed)}"
    if found:
        shown_keys = found[:_MOST] + ([f"and {len(found) - _MOST} more"] if len(found) > _MOST else [])
        made.caption += "\nspecs differ (A there, B here): " + "; ".join(map(_short, shown_keys))
    for n, failures, method in itertools.product(
        analysis.scales([*a, *b]), first.spec().failures or (NONE,), analysis.methods([*a, *b])
    ):
        x, y = (analysis.select(failure_costs.among(runs, failures), method, n) for runs in (a, b))
        name = method if failures == NONE else f"{method}, {failures}"
        if x and y:
            made.add_row(*map(Text, (name, str(n), *_row(x, y, higher))))
        elif x or y:
            made.add_row(*map(Text, (name, str(n), "", "", "", f"not finished in {'B' if x else 'A'}", "")))
    return made


def _short(text: str) -> str:
    return text if len(text) <= _LONG else f"{text[: _LONG - 1]}…"


def _row(x: list[RunData], y: list[RunData], higher: bool) -> tuple[str, str, str, str, str]:
    values = [analysis.estimate(r.value for r in runs if r.value is not None) for runs in (x, y)]
    other = {r.run.seed: r for r in y}
    pairs = [(r, other[r.run.seed]) for r in x if r.run.seed in other]
    both = [(r.value, s.value) for r, s in pairs if r.value is not None and s.value is not None]
    difference = analysis.estimate(s - r for r, s in both)
    ratio = sum(r.run.seconds or 0 for r, _ in pairs) / max(1e-9, sum(s.run.seconds or 0 for _, s in pairs))
    speed = f"{ratio:.2f}×" + (" (noise)" if abs(math.log(ratio)) < _SPEED_NOISE else "") if ratio > 0 else "–"
    lost = [sum(r.value is None for r in runs) for runs in (x, y)]
    if [r.run.seed for r in x if r.value is None] != [r.run.seed for r in y if r.value is None]:
        verdict = f"differs: {lost[0]} diverged in A, {lost[1]} in B"
    else:
        verdict = _verdict(difference, both, higher) + (f" ({lost[0]} diverged in both)" if lost[0] else "")
    if len(pairs) < max(len(x), len(y)):
        verdict += f", {len(pairs)} seeds in both"
    return shown(values[0], 1), shown(values[1], 1), shown(difference, 1), verdict, speed


def _verdict(difference: Estimate, both: list[tuple[float, float]], higher: bool) -> str:
    if not both:
        return "nothing to compare"
    if all(r == s for r, s in both):
        return "identical"
    if math.isnan(difference.low):
        return "one seed: can't tell"
    if not difference.above_zero() and not difference.below_zero():
        return "within noise"
    return "differs: B is better" if difference.above_zero() == higher else "differs: B is worse"
