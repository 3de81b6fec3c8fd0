"""What failures cost: each run in which workers fail against the same one (method, n, seed) in which none does."""

from __future__ import annotations

import html
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from gossamer.dbench import analysis
from gossamer.dbench.analysis import Estimate, RunData, estimate
from gossamer.dbench.failures import NONE
from gossamer.dbench.figures import Figure, Trace, colours, line, over_seeds
from gossamer.dbench.findings import digits, interval, shown
from gossamer.dbench.spec import Spec
from gossamer.members.outages import Attendance
from gossamer.schedules import rebuilt, schedule
from gossamer.trainer import EpochRecord

_NAMED = 8  # workers that a hover text names, at most
_GREY = "#888888"
_TIMES = 300  # points of the curve of the workers that are away, at most


def among(runs: Sequence[RunData], failures: str) -> list[RunData]:
    return [r for r in runs if r.run.failures == failures]


def reference(runs: Sequence[RunData]) -> list[RunData]:
    """What the rest of a report is about: the runs in which no worker fails, or the first that there are."""
    return among(runs, NONE) or among(runs, runs[0].run.failures)


def scenarios(runs: Sequence[RunData]) -> list[str]:
    return list(dict.fromkeys(r.run.failures for r in runs if r.run.failures != NONE))


@dataclass(frozen=True)
class FailureCost:
    """Of one method at one scale, over the seeds. ``before``: at the last epoch's end before a worker failed; ``worst``: at the worst
    one from then on until all were back. Costs are above 0 where it got worse: on average until all were back, and at the end."""

    method: str
    replicas: int
    before: Estimate
    worst: Estimate
    end: Estimate
    cost_meanwhile: Estimate
    cost_end: Estimate
    diverged: int


def failure_costs(runs: Sequence[RunData], failures: str, higher_is_better: bool = True) -> list[FailureCost]:
    failing = among(runs, failures)
    return [_cost(cell, among(runs, NONE), higher_is_better) for cell in analysis.cells(failing)]


def _cost(cell: list[RunData], calm: list[RunData], higher: bool) -> FailureCost:
    sign, bad = (1, min) if higher else (-1, max)
    method, n = cell[0].run.method, cell[0].run.replicas
    before: list[float] = []
    worst: list[float] = []
    meanwhile: list[float] = []
    end: list[float] = []
    for r in cell:
        other = next(iter(analysis.select(calm, method, n, r.run.seed)), None)
        if other is not None and other.value is not None and r.value is not None:
            end.append(sign * (other.value - r.value))
        span = _span(r)
        values = [e.value for e in r.epochs]
        if span is None or not values[span]:
            continue
        before += values[: span.start][-1:]
        worst.append(bad(values[span]))
        if other is not None:
            pairs = zip([e.value for e in other.epochs][span], values[span], strict=False)
            meanwhile.append(sign * float(np.mean([c - f for c, f in pairs])))
    values_at_end = estimate(r.value for r in cell if r.value is not None)
    diverged = sum(r.value is None for r in cell)
    return FailureCost(
        method, n, estimate(before), estimate(worst), values_at_end, estimate(meanwhile), estimate(end), diverged
    )


def _span(r: RunData) -> slice | None:
    """The epochs at whose end a worker was away, or at least the one in which that was."""
    if not r.outages:
        return None
    first = math.floor(min(o.at for o in r.outages))
    last = max(math.inf if o.back is None else o.back for o in r.outages)
    return slice(first, None if last == math.inf else max(first + 1, math.floor(last)))


# --- In words and as a table ------------------------------------------------------------------------------------------------


def sentences(runs: Sequence[RunData], spec: Spec, metric: str, higher_is_better: bool) -> list[str]:
    """At the largest scale, seed by seed."""
    found = []
    n = analysis.scales(runs)[-1]
    for name in scenarios(runs):
        costly: list[str] = []
        rest: list[str] = []
        for cost in failure_costs(runs, name, higher_is_better):
            e = cost.cost_end
            if cost.replicas != n or cost.diverged or math.isnan(e.low):
                continue
            text = f"{cost.method} ({e.mean:+.{digits(e.mean)}f}, {interval(e)})"
            (costly if e.above_zero() else rest).append(text)
        if costly or rest:
            parts = [f"cost at the end in {metric}, seed by seed: {'; '.join(costly)}"] if costly else []
            no = "No" if costly else "no"  # it may be the second sentence
            parts += [f"{no} cost at the end that the seeds support: {'; '.join(rest)}"] if rest else []
            found.append(f"Failures “{name}” at n={n} ({spec.failures[name].describe(n)}): {'. '.join(parts)}.")
    return found


def section(runs: Sequence[RunData], spec: Spec, metric: str, higher_is_better: bool) -> str:
    """The part of the report, as HTML; nothing if no worker fails."""
    if not scenarios(runs):
        return ""
    head = "".join(
        f"<th>{text}</th>"
        for text in ("method", "n", "before", "worst meanwhile", "at the end", "cost meanwhile", "cost at the end")
    )
    parts = []
    for name in scenarios(runs):
        rows = []
        for cost in failure_costs(runs, name, higher_is_better):
            numbers = (cost.before, cost.worst, cost.end, cost.cost_meanwhile, cost.cost_end)
            more = f" ({cost.diverged} diverged)" if cost.diverged else ""
            cells = "".join(f"<td>{html.escape(shown(e)).replace('-0.000', '0.000')}</td>" for e in numbers)
            rows.append(f"<tr><th>{html.escape(cost.method + more)}</th><td>{cost.replicas}</td>{cells}</tr>")
        what = "; ".join(f"n={n}: {spec.failures[name].describe(n)}" for n in analysis.scales(among(runs, name)))
        parts.append(
            f"<h3>{html.escape(name)}</h3><p>{html.escape(what)}.{html.escape(_substitutes(runs, spec, name))}</p>"
            f"<div class='scroll'><table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table></div>"
        )
    against = (
        "Costs are against the same run in which no worker fails, seed by seed: above 0 is worse."
        if among(runs, NONE)
        else f"There are no runs without failures to hold these against; an empty table [failures.{NONE}] in the spec makes them."
    )
    about = (
        f"{metric.capitalize()} of the averaged model of the workers that are there, mean ± 95 % interval over seeds: at the end of the "
        f"last epoch before a worker failed, at the worst one from then on until all were back, and at the end of training. {against}"
    )
    return f"<section id='failure-costs'><h2>Through the failures</h2><p>{html.escape(about)}</p>{''.join(parts)}</section>"


def _substitutes(runs: Sequence[RunData], spec: Spec, failures: str) -> str:
    """Graphs that do not exist for the number of workers that was left, and what stood in for them."""
    cell = among(runs, failures)
    found = []
    for method, n in itertools.product(analysis.methods(cell), analysis.scales(cell)):
        planned = schedule(spec.method(method).topology, n)
        for left in sorted({left for r in _one_method(analysis.select(cell, n=n)) for left in _sizes(r)}):
            made, note = rebuilt(planned, left)
            if note:
                found.append(f"{method} with {left} workers was {made.describe()}{note}")
    return f" Graphs that do not exist for the workers that were left: {'. '.join(found)}." if found else ""


def _one_method(cell: list[RunData]) -> list[RunData]:
    """The same workers fail in all methods, so one is enough to see which."""
    return [r for r in cell if r.run.method == cell[0].run.method and r.epochs]


def _attendance(r: RunData) -> Attendance:
    return Attendance(r.run.replicas, r.outages, r.epochs[0].step)


def _sizes(r: RunData) -> set[int]:
    there = _attendance(r)
    return {len(there.members(step)) for step in there.turns if step < r.epochs[-1].step}


# --- The figure -------------------------------------------------------------------------------------------------------------


def figure(runs: Sequence[RunData], metric: str, higher_is_better: bool) -> Figure:
    on_y = (metric, "linear") if higher_is_better else (f"{metric} (lower is better)", "log")
    # The title and the scale of the axis, and the number of an epoch. On a logarithmic axis there is no 0.
    show: dict[str, tuple[str, str, Callable[[EpochRecord], float]]] = {
        metric: (*on_y, lambda e: e.value),
        "consensus distance": ("consensus distance", "log", lambda e: e.consensus_distance or math.nan),
    }
    sizes = [str(n) for n in reversed(analysis.scales(runs))]
    selectors = {"failures": scenarios(runs), "replicas": sizes, "show": list(show)}
    variants = []
    for name, n, what in itertools.product(*selectors.values()):
        title, scale, of = show[what]
        traces, most = _curves(runs, name, int(n), of)
        # The curves are drawn over the axis of the workers that are away, which is a background with ticks of its own.
        over = {"overlaying": "y2", "tickmode": "auto", "automargin": True}
        beside = {"side": "right", "range": [0, most], "dtick": -(-most // 5), "showgrid": False, "automargin": True}
        layout = {
            "xaxis": {"title": {"text": "epoch"}, "type": "linear"},
            "yaxis": {"title": {"text": title}, "type": scale, **over},
            "yaxis2": {"title": {"text": "workers away"}, **beside},
        }
        variants.append({"data": traces, "layout": layout})
    caption = (
        "Averaged model of the workers that are there, on test data, mean over seeds. Dotted: the same runs in which no worker fails. "
        "Shaded: how many are away; hover over its corners to see who."
    )
    return Figure("failures", f"{metric.capitalize()} through the failures", caption, selectors, variants)


def _curves(runs: Sequence[RunData], failures: str, n: int, of: Callable[[EpochRecord], float]) -> tuple[list[Trace], int]:
    failing, calm = among(runs, failures), among(runs, NONE)
    shade = _shade(_one_method(analysis.select(failing, n=n)))
    traces: list[Trace] = [shade]
    for method, colour in colours(runs).items():
        solid, dotted = (over_seeds(some, method, n, of) for some in (failing, calm))
        traces.append(line(method, colour, range(1, len(solid) + 1), solid, legendgroup=method))
        style, more = {"width": 1.5, "dash": "dot"}, {"legendgroup": method, "showlegend": False}
        traces.append(line(f"{method}, no worker fails", colour, range(1, len(dotted) + 1), dotted, style, **more))
    return traces, max([1, *(math.ceil(y) for y in shade["y"])])


def _shade(cell: list[RunData]) -> Trace:
    """How many are away over time, mean over seeds; each point says who."""
    there = [_attendance(r) for r in cell]
    per_epoch, end = (cell[0].epochs[0].step, max(len(r.epochs) for r in cell)) if cell else (1, 0)
    steps = sorted({0, *(step for one in there for step in one.turns if step < end * per_epoch)})
    steps = steps[:: max(1, -(-len(steps) // _TIMES))]
    away = [[set(range(one.n)).difference(one.members(step)) for one in there] for step in steps]
    counts = [float(np.mean([len(workers) for workers in of_seeds])) if of_seeds else 0.0 for of_seeds in away]
    text = [f"from epoch {step / per_epoch:.4g}: {_who(cell, workers)}" for step, workers in zip(steps, away, strict=True)]
    more = {
        "fill": "tozeroy",
        "fillcolor": "rgba(136,136,136,0.22)",
        "mode": "lines+markers",
        "marker": {"size": 5, "color": _GREY},
        "yaxis": "y2",
        "text": [*text, *text[-1:]],
        "hoverinfo": "text",
    }
    x, y = [*(step / per_epoch for step in steps), float(end)], [*counts, *counts[-1:]]
    return line("workers away", _GREY, x, y, {"width": 1, "shape": "hv"}, **more)


def _who(cell: list[RunData], away: list[set[int]]) -> str:
    if not away:
        return ""
    if all(one == away[0] for one in away):
        return _named(away[0])
    return "; ".join(f"seed {r.run.seed}: {_named(one)}" for r, one in zip(cell, away, strict=True))


def _named(workers: set[int]) -> str:
    if not workers:
        return "all are there"
    some = ", ".join(str(worker) for worker in sorted(workers)[:_NAMED])
    more = f" and {len(workers) - _NAMED} more" if len(workers) > _NAMED else ""
    return f"worker{'s' if len(workers) > 1 else ''} {some}{more} away"
