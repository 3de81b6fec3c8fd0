"""``[search]``: each method gets the learning rate (and one option of its own) that is best for it, before the grid is run.

The settings are tried on seeds of their own, and judged by training data that were held out: neither the seeds nor the test data of the
results are seen. It is a bench of its own in the folder ``search``: resumable, and with a report. The grid and what was chosen are kept in
the store, and the report shows them.
"""

from __future__ import annotations

import dataclasses
import html
import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from gossamer.dbench.spec import MethodPart, SearchPart, Spec
from gossamer.dbench.store import FINISHED, Run, Store
from gossamer.errors import GossamerError
from gossamer.methods import method as parse_method

FOLDER = "search"
KEY = "search"  # of the store: what was tried, and what was chosen


class Setting(NamedTuple):
    """``value``: of the option that is searched; None if the method does not have it."""

    lr: float
    value: Any = None

    def shown(self, option: str | None) -> str:
        return f"lr={self.lr:g}" + (f", {option}={self.value}" if self.value is not None else "")


def settings(spec: Spec, method: MethodPart) -> list[Setting]:
    search = _search(spec)
    values: Sequence[Any] = search.values if _has_option(spec, method, search.option) else (None,)
    return [Setting(lr, value) for lr, value in itertools.product(search.lr, values)]


def grid(spec: Spec) -> Spec:
    """The bench that tries all settings of all methods."""
    search = _search(spec)
    tried = [_named(spec, method, setting) for method in spec.methods for setting in settings(spec, method)]
    if len(tried) * len(search.seeds) > search.runs:
        raise GossamerError(
            f"search: {len(tried)} settings with {len(search.seeds)} seeds are {len(tried) * len(search.seeds)} runs, and its budget is "
            f"runs={search.runs}; try fewer, or allow more"
        )
    changed = {"epochs": search.epochs, "partition": search.partition, "validation": search.validation}
    task = spec.task.model_copy(update={key: value for key, value in changed.items() if value is not None})
    return spec.model_copy(
        update={
            "name": f"{spec.name}, search",
            "description": f"Settings for {spec.name}, by {search.validation:.0%} of the training data, which are held out.",
            "replicas": (search.replicas or min(spec.replicas),),
            "methods": tuple(tried),
            "seeds": search.seeds,
            "task": task,
            "profile": spec.profile.model_copy(update={"every": 0, "singles": 1}),
            "search": None,
            "target": None,
            "clock": None,
            "failures": {},
        }
    )


def choose(spec: Spec, path: Path) -> list[dict[str, Any]]:
    """One row for each setting of each method: its values, and whether it is the one. A setting that diverged on a seed is not; if all
    did, the smallest learning rate is taken."""
    searched = Store(path)
    higher, runs = searched.meta("metric")["higher_is_better"], searched.runs()
    searched.close()
    rows = []
    for method in spec.methods:
        tried = settings(spec, method)
        found = [_judged([run for run in runs if run.method == _named(spec, method, s).name]) for s in tried]
        scores = [(mean if higher else -mean) if mean is not None else -math.inf for mean, _ in found]
        best = max(range(len(tried)), key=lambda k: (scores[k], -tried[k].lr))
        for k, (setting, (mean, diverged)) in enumerate(zip(tried, found, strict=True)):
            rows.append(
                {"method": method.name, "lr": setting.lr, "value": setting.value, "mean": mean, "diverged": diverged}
                | {"chosen": k == best}
            )
    return rows


def _judged(runs: Sequence[Run]) -> tuple[float | None, int]:
    """The mean over the seeds, and how many of them diverged."""
    assert all(run.status in FINISHED for run in runs)
    values = [run.value for run in runs if run.value is not None]
    whole = len(values) == len(runs) and all(map(math.isfinite, values))
    return statistics.fmean(values) if whole else None, len(runs) - len(values)


def tuned(spec: Spec, rows: Sequence[Mapping[str, Any]]) -> Spec:
    """The spec, with what was chosen for each method."""
    chosen = {row["method"]: Setting(row["lr"], row["value"]) for row in rows if row["chosen"]}
    return spec.model_copy(update={"methods": tuple(_with(spec, method, chosen[method.name]) for method in spec.methods)})


def ran(store: Store) -> Spec:
    """The spec of a store, with what a search has chosen: what its runs were run with."""
    spec, rows = store.spec(), store.meta(KEY)
    return spec if rows is None else tuned(spec, rows)


def section(store: Store) -> str:
    """For the report: the grid that was searched, the best of each method in bold."""
    rows, search = store.meta(KEY), store.spec().search
    if rows is None or search is None:
        return ""
    heads = list(dict.fromkeys(Setting(row["lr"], row["value"]).shown(search.option) for row in rows))
    lines = []
    for method in dict.fromkeys(row["method"] for row in rows):
        mine = {Setting(row["lr"], row["value"]).shown(search.option): row for row in rows if row["method"] == method}
        cells = "".join(f"<td>{_cell(mine.get(head))}</td>" for head in heads)
        lines.append(f"<tr><th>{html.escape(method)}</th>{cells}</tr>")
    metric = html.escape(store.meta("metric")["name"])
    edges = [name for name in dict.fromkeys(row["method"] for row in rows) if _at_edge(rows, name)]
    more = f" At the edge of the grid, so a wider one may be better: {html.escape(', '.join(edges))}." if edges else ""
    return (
        f"<section><h2>The settings that were tried</h2><p>Mean {metric} over {_seeds(search.seeds)} on "
        f"{search.validation:.0%} of the training data, which were held out; {len(rows) * len(search.seeds)} runs. "
        f"The results above are of other seeds, on the test data, with the setting in bold.{more}</p>"
        f"<div class='scroll'><table><thead><tr><th>method</th>{''.join(f'<th>{html.escape(h)}</th>' for h in heads)}</tr></thead>"
        f"<tbody>{''.join(lines)}</tbody></table></div></section>"
    )


def _seeds(seeds: Sequence[int]) -> str:
    return f"seed{'s' * (len(seeds) > 1)} {', '.join(map(str, seeds))}"


def _cell(row: Mapping[str, Any] | None) -> str:
    if row is None:
        return "–"
    text = f"{row['mean']:.4g}" if row["mean"] is not None else f"{row['diverged']} diverged"
    return f"<strong>{text}</strong>" if row["chosen"] else text


def _at_edge(rows: Sequence[Mapping[str, Any]], method: str) -> bool:
    rates = sorted({row["lr"] for row in rows if row["method"] == method})
    chosen = next(row["lr"] for row in rows if row["method"] == method and row["chosen"])
    return len(rates) > 1 and chosen in (rates[0], rates[-1])


def _search(spec: Spec) -> SearchPart:
    assert spec.search is not None
    return spec.search


def _algorithm(spec: Spec, method: MethodPart) -> str:
    return method.rule(spec.algorithm)


def _has_option(spec: Spec, method: MethodPart, option: str | None) -> bool:
    rule = parse_method(_algorithm(spec, method))
    return option is not None and option in {field.name for field in dataclasses.fields(rule)}


def _with(spec: Spec, method: MethodPart, setting: Setting) -> MethodPart:
    changed: dict[str, Any] = {"lr": setting.lr}
    if setting.value is not None:
        rule = parse_method(_algorithm(spec, method))
        changed["algorithm"] = dataclasses.replace(rule, **{_search(spec).option or "": setting.value}).describe()
    return method.model_copy(update=changed)


def _named(spec: Spec, method: MethodPart, setting: Setting) -> MethodPart:
    """As a method of the search, with a name of its own."""
    name = f"{method.name} @ {setting.shown(_search(spec).option)}"
    made = _with(spec, method, setting)
    rule = made.algorithm or ("all-reduce" if method.centralized else None)
    return made.model_copy(update={"name": name, "graph": method.topology, "algorithm": rule})
