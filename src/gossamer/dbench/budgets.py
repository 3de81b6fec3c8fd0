"""Methods at equal cost: how good each was when it had spent as much as the others, in steps, in bytes, or in predicted time.

The value is that of the averaged model on the way, between two epochs on the straight line between them. A learning rate that falls until
the end of training has not fallen yet there: so a method is rather better, if it is trained for just this budget.
"""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from gossamer.dbench import analysis
from gossamer.dbench.analysis import Estimate, RunData
from gossamer.dbench.findings import shown

Cost = Literal["steps", "bytes", "seconds"]
COSTS: tuple[Cost, ...] = get_args(Cost)


@dataclass(frozen=True)
class AtBudget:
    """``share``: of its whole training, which the budget is worth."""

    method: str
    value: Estimate
    share: float


def spent(run: RunData, cost: Cost) -> list[float] | None:
    """After each epoch: steps, bytes that a replica received, or predicted seconds. None if the spec names no cluster."""
    if cost == "steps":
        return [float(e.step) for e in run.epochs]
    if cost == "bytes":
        return [float(e.bytes) for e in run.epochs]
    seconds = [run.seconds_at(e.step) for e in run.epochs]
    return [s for s in seconds if s is not None] if None not in seconds else None


def at_equal(runs: Sequence[RunData], n: int, cost: Cost, budget: float | None = None) -> tuple[float, list[AtBudget]]:
    """The budget, and each method there. By default it is all that the method which costs least has spent. A method whose first epoch costs
    more has no value (NaN); neither has one that diverged."""
    here = {name: analysis.select(runs, name, n) for name in analysis.methods(analysis.select(runs, n=n))}
    costs = {name: [s for run in some if (s := spent(run, cost)) and run.value is not None] for name, some in here.items()}
    if budget is None:
        budget = min((max(s[-1] for s in some) for some in costs.values() if some), default=math.nan)
    found = []
    for name, some in here.items():
        values = [_value(run, cost, budget) for run in some]
        ends = [s[-1] for s in costs[name]]
        share = min(1.0, budget / float(np.mean(ends))) if ends and np.mean(ends) > 0 else math.nan
        found.append(AtBudget(name, analysis.estimate(values), share))
    return budget, found


def _value(run: RunData, cost: Cost, budget: float) -> float:
    costs = spent(run, cost)
    if not costs or run.value is None or budget < costs[0]:
        return math.nan
    return float(np.interp(budget, costs, [e.value for e in run.epochs]))


def section(runs: Sequence[RunData], metric: str) -> str:
    """For the report: at equal steps, bytes and predicted time, at the largest scale."""
    n = analysis.scales(runs)[-1]
    tables = {cost: at_equal(runs, n, cost) for cost in COSTS}
    tables = {cost: table for cost, table in tables.items() if table[0] > 0}
    names = analysis.methods(analysis.select(runs, n=n))
    if len(names) < 2 or "bytes" not in tables:
        return ""
    heads = {"steps": "{:,.0f} steps", "bytes": "{:.3g} MB received", "seconds": "{:.3g} s, predicted"}
    shown_budget = {
        cost: heads[cost].format(budget / 1e6 if cost == "bytes" else budget) for cost, (budget, _) in tables.items()
    }
    rows = []
    for k, name in enumerate(names):
        cells = "".join(f"<td>{html.escape(_cell(found[k]))}</td>" for _, found in tables.values())
        rows.append(f"<tr><th>{html.escape(name)}</th>{cells}</tr>")
    return (
        f"<section><h2>At equal cost, n={n}</h2><p>{html.escape(metric.capitalize())} of the averaged model when each method had spent as "
        "much as the cheapest one in all; in brackets the share of its training that this is. On the way: a learning rate that "
        "falls until the end has not fallen yet.</p>"
        f"<div class='scroll'><table><thead><tr><th>method</th>{''.join(f'<th>{h}</th>' for h in shown_budget.values())}</tr></thead>"
        f"<tbody>{''.join(rows)}</tbody></table></div></section>"
    )


def _cell(found: AtBudget) -> str:
    if math.isnan(found.value.mean):
        return "–"
    return f"{shown(found.value)} ({found.share:.0%})"
