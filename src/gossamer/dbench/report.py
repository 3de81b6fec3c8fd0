"""The report: one self-contained HTML file. The headline first, then the figures, then the spec and the machine."""

from __future__ import annotations

import html
import json
import os
from collections.abc import Sequence
from dataclasses import asdict
from importlib import resources
from pathlib import Path

from plotly.offline import get_plotlyjs

from gossamer import graphs
from gossamer.dbench import analysis, budgets, failure_costs, partition, search
from gossamer.dbench.analysis import RunData
from gossamer.dbench.failures import NONE
from gossamer.dbench.figures import Figure, figures
from gossamer.dbench.findings import findings
from gossamer.dbench.spec import Spec
from gossamer.dbench.store import FILE, FINISHED, Store
from gossamer.dbench.summary import Summary, summary
from gossamer.errors import GossamerError
from gossamer.graphs import picture
from gossamer.toml_files import written

NAME = "report.html"
_BYTES = (
    "<p>MB: what a replica receives; no graph costs more than an all-reduce, so dense ones cost the same (docs/graphs.md).</p>"
)


def write(folder: Path) -> Path:
    """Write ``report.html`` into the output folder of a bench and return its path."""
    store = Store(folder / FILE)
    runs = analysis.load(store)
    if not runs:
        raise GossamerError(f"{folder} has no finished run yet, so there is nothing to report; finish one with: gossamer bench")
    path = folder / NAME
    text = page(store, runs)
    store.close()
    temporary = path.with_suffix(".tmp")
    try:
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise GossamerError(f"{path} can't be written: {error.strerror}") from None
    return path


def page(store: Store, runs: Sequence[RunData]) -> str:
    spec = store.spec()
    metric = store.meta("metric")
    name, higher = metric["name"], metric["higher_is_better"]
    split = partition.kept(store)
    drawn = [asdict(figure) for figure in all_figures(store, runs)]
    every, runs = runs, failure_costs.reference(runs)
    said = findings(runs, spec, name, higher, split) + failure_costs.sentences(every, spec, name, higher)
    left = sum(run.status not in FINISHED for run in store.runs())
    parts = {
        "TITLE": html.escape(f"DBench: {spec.name}"),
        "DESCRIPTION": html.escape(spec.description),
        "UNFINISHED": f"<p class='note'>{left} runs are not finished; this report shows the others.</p>" if left else "",
        "TABLE": summarized(store, every).html() + _BYTES,
        "FINDINGS": "".join(f"<li>{html.escape(sentence)}</li>" for sentence in said),
        "BUDGETS": budgets.section(runs, name),
        "SEARCH": search.section(store),
        "FAILURES": failure_costs.section(every, spec, name, higher),
        "ADA": _pictures(runs),
        "SPEC": html.escape(_spec(spec)),
        "MACHINE": _machine(every),
        # "</" would end the script element early, wherever it stood in a name.
        "DATA": json.dumps(drawn, separators=(",", ":"), allow_nan=False).replace("</", "<\\/"),
        "PLOTLY": get_plotlyjs(),
    }
    text = resources.files("gossamer.dbench").joinpath("report.html").read_text(encoding="utf-8")
    for key, value in parts.items():
        text = text.replace(f"@@{key}@@", value)
    return text


def all_figures(store: Store, runs: Sequence[RunData]) -> list[Figure]:
    """None if all runs have diverged: the axes would be empty."""
    if all(r.value is None for r in failure_costs.reference(runs)):
        return []
    metric = store.meta("metric")
    name, higher = metric["name"], metric["higher_is_better"]
    through = [failure_costs.figure(runs, name, higher)] if failure_costs.scenarios(runs) else []
    return [*through, *figures(failure_costs.reference(runs), name, higher, partition.kept(store))]


def summarized(store: Store, runs: Sequence[RunData]) -> Summary:
    metric, reference = store.meta("metric"), failure_costs.reference(runs)
    more = _statistics(store, store.spec()) + _which(runs, reference)
    return summary(reference, metric["name"], metric["higher_is_better"], more)


def _spec(spec: Spec) -> str:
    """A file that makes these results again; defaults are left out."""
    said = spec.model_dump(mode="json", exclude_defaults=True, exclude_none=True)
    said["methods"] = [item["name"] if set(item) == {"name"} else item for item in said["methods"]]
    return written(said)


def _statistics(store: Store, spec: Spec) -> str:
    """Which BatchNorm statistics the averaged model had, if it has any."""
    if not store.meta("batch_norm_layers"):
        return ""
    how = "estimated anew on training data" if spec.task.batch_norm == "reestimate" else "the mean of the replicas'"
    return f" Its BatchNorm statistics are {how}."


def _which(every: Sequence[RunData], runs: Sequence[RunData]) -> str:
    """Which of the runs this is about, if there are such with failures."""
    if not failure_costs.scenarios(every):
        return ""
    name = runs[0].run.failures
    which = "in which no worker fails" if name == NONE else f"with failures “{name}”"
    return f" This table, and all below that does not speak of failures, is of the runs {which}."


def _pictures(runs: Sequence[RunData]) -> str:
    """For each method whose graph changes: the graph at the beginning, the middle and the end of its changes."""
    n = analysis.scales(runs)[-1]
    parts = []
    for method in analysis.methods(runs):
        changing = [r for r in analysis.select(runs, method, n) if len(r.changes) > 2]
        if not changing:
            continue
        changes = changing[0].changes
        for change in (changes[0], changes[len(changes) // 2], changes[-1]):
            graph = graphs.parse(change.graph, n)
            if picture.can_draw(graph):
                caption = f"{method}, from epoch {change.epoch + 1}: {change.graph} ({graph.degree()} connections)"
                parts.append(f"<figure>{picture.svg(graph, 0)}<figcaption>{html.escape(caption)}</figcaption></figure>")
    return (
        f"<section><h2>The graph at three moments, n={n}</h2><div class='row'>{''.join(parts)}</div></section>" if parts else ""
    )


def _machine(runs: Sequence[RunData]) -> str:
    machines = [json.loads(r.run.machine or "{}") for r in runs]
    keys = dict.fromkeys(key for one in machines for key in one)
    facts = {key: ", ".join(dict.fromkeys(str(one.get(key, "–")) for one in machines)) for key in keys}
    facts["backend"] = ", ".join(sorted({f"n={r.run.replicas}: {r.run.backend}" for r in runs}))
    facts["threads per run"] = ", ".join(sorted({str(r.run.threads) for r in runs}))
    facts["training time"] = f"{sum(r.run.seconds or 0 for r in runs):.0f} s over {len(runs)} runs"
    rows = "".join(f"<tr><th>{html.escape(str(k))}</th><td>{html.escape(str(v))}</td></tr>" for k, v in facts.items())
    return f"<table class='facts'>{rows}</table>"
