"""The figures of the report as plotly's plain data: no drawing here, the page does that.

A figure has one variant per choice of its selectors (number of replicas, measure, method).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from gossamer.dbench import analysis
from gossamer.dbench.analysis import RunData
from gossamer.dbench.findings import FEW
from gossamer.dbench.partition import Partition
from gossamer.errors import GossamerError
from gossamer.rows.profile import MEASURES
from gossamer.trainer import EpochRecord

# Okabe and Ito's colours, which most people can tell apart, on white and on black.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8C6D31", "#7F7F7F", "#B279A2", "#54A24B")
_USUAL = ("centralized", "ring", "torus", "exponential", "complete", "ada", "one-peer-exponential", "ada-auto")
_NAMES = {
    "gini": "Gini coefficient",
    "iod": "index of dispersion",
    "cv": "coefficient of variation",
    "qcd": "quartile coefficient",
}
_LOOKS = 150  # points on a curve, at most: more can't be seen and make the page heavy

Trace = dict[str, Any]
Numbers = Sequence[float] | np.ndarray


@dataclass(frozen=True)
class Figure:
    """``selectors``: {label: choices}; ``variants``: one per combination, in the order of ``itertools.product``."""

    id: str
    title: str
    caption: str
    selectors: dict[str, list[str]]
    variants: list[dict[str, Any]]

    def choices(self) -> Iterator[dict[str, str]]:
        """One for each variant."""
        return (dict(zip(self.selectors, choice, strict=True)) for choice in itertools.product(*self.selectors.values()))

    def choose(self, choice: Mapping[str, str]) -> dict[str, Any]:
        """The variant for this choice; of a selector that it leaves out, the first one. Measures have short names, too."""
        named = {key: _NAMES.get(value, value) if key == "measure" else value for key, value in choice.items()}
        for key, value in named.items():
            if value not in self.selectors.get(key, ()):
                there = "; ".join(f"{name}: {', '.join(options)}" for name, options in self.selectors.items()) or "nothing"
                raise GossamerError(f"figure {self.id!r} has no {key}={value!r}; to choose there is {there}")
        return next(v for v, c in zip(self.variants, self.choices(), strict=True) if named.items() <= c.items())


def figures(
    runs: Sequence[RunData], metric: str, higher_is_better: bool, partition: Partition | None = None
) -> Iterator[Figure]:
    sizes = [str(n) for n in reversed(analysis.scales(runs))]  # the largest first: it is what is shown at the start
    colour = colours(runs)
    measures = {_NAMES[m]: m for m in MEASURES}
    profiled = [m for m in analysis.methods(runs) if any(len(r.steps) for r in analysis.select(runs, m))]
    decentralized = [r for r in runs if not r.centralized]
    scale = {"replicas": sizes}
    by_measure = {"replicas": sizes, "measure": list(measures)}
    epochs = max((len(r.epochs) for r in runs), default=0)
    # What is better lower (perplexity, loss) is above 0 and spans decades.
    on_y: dict[str, Any] = {"y": metric} if higher_is_better else {"y": f"{metric} (lower is better)", "ylog": True}
    yield _figure(
        "epochs",
        f"{metric.capitalize()} by epoch",
        f"Averaged model on test data, mean over seeds; shaded: 95 % intervals, from {FEW} seeds on.",
        scale,
        lambda n: _bands(runs, int(n), colour) + _by_epoch(runs, int(n), colour, lambda e: e.epoch + 1, lambda e: e.value),
        _layout("epoch", whole=epochs, **on_y),
    )
    yield _figure(
        "connections",
        f"Final {metric} against connections",
        "Each dot is one run. Connections are averaged over training.",
        scale,
        lambda n: _by_run(runs, int(n), colour, lambda r: r.connections),
        _layout("connections per replica and step", xlog=True, **on_y),
    )
    if len(sizes) > 1:
        yield _figure(
            "scale",
            f"Final {metric} against scale",
            "Mean over seeds; bars are 95 % intervals.",
            {},
            lambda: _against_scale(runs, colour),
            _layout("replicas", **on_y),
        )
    yield _figure(
        "bytes",
        f"{metric.capitalize()} against bytes",
        "What each replica has received when each has its own worker; mean over seeds.",
        scale,
        lambda n: _by_epoch(runs, int(n), colour, lambda e: e.bytes / 1e6, lambda e: e.value),
        _layout("MB per replica", **on_y),
    )
    if decentralized:
        yield _figure(
            "models",
            f"{metric.capitalize()} against models received",
            "As the field counts it: connections × steps, one whole model each. Gossamer sends less on dense graphs (docs/graphs.md).",
            scale,
            lambda n: _against_models(decentralized, int(n), colour),
            _layout("models per replica", **on_y),
        )
    if any(r.step_seconds is not None for r in runs):
        yield _figure(
            "clock",
            f"{metric.capitalize()} against predicted time",
            "Predicted, not measured: what the runtime model says that these steps take on the cluster that the spec names, one "
            "replica per worker. Averaged model on test data, mean over seeds. With small models latency decides: DDP's all-reduce "
            "is 2(n − 1) messages around a ring, one after the other; dense graphs need two rounds of messages side by side.",
            scale,
            lambda n: _against_clock(runs, int(n), colour),
            _layout("predicted seconds", **on_y),
        )
    if profiled:
        yield _figure(
            "dispersion",
            "Dispersion by step",
            "How much the replicas' tensor norms differ just before averaging; mean over tensors and seeds.",
            by_measure,
            lambda n, m: _dispersion(runs, int(n), measures[m], colour),
            _layout("step", "dispersion", ylog=True),
        )
        yield _figure(
            "ranks",
            "Ranks by dispersion",
            "Methods ranked at each step and tensor (1: least dispersion), mean over tensors and seeds. Centralized is not ranked.",
            by_measure,
            lambda n, m: _ranks(runs, int(n), measures[m], colour),
            _layout("step", "mean rank"),
        )
        yield _figure(
            "early",
            f"Final {metric} against early dispersion",
            "Each dot is one run; dispersion over the first tenth of training.",
            by_measure,
            lambda n, m: _by_run(decentralized, int(n), colour, lambda r: r.early(measures[m])),
            _layout("early dispersion", xlog=True, **on_y),
        )
        yield _figure(
            "tensors",
            "Dispersion by tensor",
            "Base-10 logarithm of the Gini coefficient, mean over seeds.",
            {"method": [m for m in profiled if analysis.select(decentralized, m)] or profiled, "replicas": sizes},
            lambda m, n: _tensors(runs, m, int(n)),
            _layout("step", "", names=True),
        )
    if any(len(r.changes) > 1 for r in runs):
        yield _figure(
            "degree",
            "Connections over time",
            "How the graph thins out: connections of a replica, averaged over the steps of each epoch.",
            scale,
            lambda n: _degrees(runs, int(n), colour),
            _layout("epoch", "connections per replica", ylog=True, whole=epochs),
        )
    if controlled := [r for r in runs if len(r.noted("control_target").steps)]:
        where = {"replicas": [str(n) for n in reversed(analysis.scales(controlled))]}
        yield _figure(
            "control",
            "Consensus control: distance and target",
            "What bounds the replicas' distance after the rounds of a step (line), and the target that ends them (dashes). A line above "
            "its dashes: the rounds were used up. Each run, at the steps of the profile.",
            where,
            lambda n: _control(
                controlled, int(n), colour, {"control_reached": {}, "control_target": {"dash": "dash", "width": 1}}
            ),
            _layout("step", "distance", ylog=True),
        )
        yield _figure(
            "control-rounds",
            "Consensus control: rounds per step",
            "Rounds that a step has added to the method's own average. Each run, at the steps of the profile.",
            where,
            lambda n: _control(controlled, int(n), colour, {"control_rounds": {}}),
            _layout("step", "rounds"),
        )
    if partition is not None:
        yield _figure(
            "partition",
            "Labels of each replica",
            f"What each replica holds for good ({partition.name}, seed {partition.seed}): the share of each label in "
            "its samples, or their number. Blank: none.",
            {"replicas": sizes, "show": ["share", "samples"]},
            lambda n, show: _partition(partition, int(n), show),
            _layout("replica", "label", names=True),
        )


def colours(runs: Sequence[RunData]) -> dict[str, str]:
    """Usual methods have the same colour in each report."""
    methods = analysis.methods(runs)
    made = {m: _COLOURS[_USUAL.index(m)] for m in methods if m in _USUAL}
    free = itertools.cycle([c for c in _COLOURS if c not in made.values()] or _COLOURS)
    return {m: made.get(m) or next(free) for m in methods}


def _layout(
    x: str, y: str, xlog: bool = False, ylog: bool = False, names: bool = False, whole: int = 0
) -> dict[str, dict[str, Any]]:
    """``names``: the y axis has names, not numbers. ``whole``: x counts up to this number, and ticks are whole numbers."""
    ticks = {"tick0": 0, "dtick": -(-whole // 10)} if whole else _ticks(x, xlog)
    on_y = "category" if names else "log" if ylog else "linear"
    return {
        "xaxis": {"title": {"text": x}, "type": "log" if xlog else "linear", **ticks},
        "yaxis": {"title": {"text": y}, "type": on_y, "automargin": True, **_ticks(y, ylog)},
    }


def _ticks(title: str, log: bool) -> dict[str, Any]:
    """Connections are few: 1, 2, 5, 10 … in letters of one size, where plotly makes 2 and 5 smaller."""
    if not log or not title.startswith("connections"):
        return {}
    counts = [digit * 10**power for power in range(4) for digit in (1, 2, 5)]
    return {"tickmode": "array", "tickvals": counts, "ticktext": [f"{count:,}" for count in counts]}


def _figure(
    id: str,
    title: str,
    caption: str,
    selectors: dict[str, list[str]],
    traces: Callable[..., list[Trace]],
    layout: dict[str, dict[str, Any]],
) -> Figure:
    variants = [{"data": traces(*choice), "layout": layout} for choice in itertools.product(*selectors.values())]
    return Figure(id, title, caption, selectors, variants)


def line(name: str, colour: str, x: Numbers, y: Numbers, style: Mapping[str, Any] | None = None, **more: Any) -> Trace:
    drawn = {"color": colour, "width": 2, **(style or {})}
    return {"type": "scatter", "mode": "lines", "name": name, "line": drawn, "x": _list(x), "y": _list(y), **more}


def _list(values: Numbers) -> list[float | None]:
    """Five digits, and None where there is no number: JSON has no nan."""
    return [None if v is None or not math.isfinite(v) else float(f"{v:.5g}") for v in values]


def _thin(*columns: np.ndarray) -> list[np.ndarray]:
    step = max(1, -(-len(columns[0]) // _LOOKS))
    return [column[::step] for column in columns]


def over_seeds(runs: Sequence[RunData], method: str, n: int, of: Callable[[EpochRecord], float]) -> list[float]:
    """A number of each epoch, averaged over the seeds that reached that epoch."""
    histories = [r.epochs for r in analysis.select(runs, method, n)]
    length = max((len(h) for h in histories), default=0)
    return [float(np.mean([of(h[e]) for h in histories if len(h) > e])) for e in range(length)]


def _by_epoch(
    runs: Sequence[RunData],
    n: int,
    colour: dict[str, str],
    x: Callable[[EpochRecord], float],
    y: Callable[[EpochRecord], float],
    **style: str,
) -> list[Trace]:
    return [line(m, c, over_seeds(runs, m, n, x), over_seeds(runs, m, n, y), style, legendgroup=m) for m, c in colour.items()]


def _bands(runs: Sequence[RunData], n: int, colour: dict[str, str]) -> list[Trace]:
    """The intervals of the metric, behind the curves."""
    made = []
    for m, c in colour.items():
        histories = [r.epochs for r in analysis.select(runs, m, n)]
        length = min(map(len, histories)) if len(histories) >= FEW else 0
        spread = [analysis.estimate(h[e].value for h in histories) for e in range(length)]
        x, y = list(range(1, length + 1)), [e.high for e in spread]
        x, y = x + x[::-1], y + [e.low for e in reversed(spread)]
        area = {"mode": "none", "fill": "toself", "fillcolor": c, "opacity": 0.15, "hoverinfo": "skip", "showlegend": False}
        if length:
            made.append({"type": "scatter", "name": "", "legendgroup": m, "x": x, "y": _list(y), **area})
    return made


def _degrees(runs: Sequence[RunData], n: int, colour: dict[str, str]) -> list[Trace]:
    """Each epoch is as wide as the others, the last one too."""
    made = []
    for m, c in colour.items():
        degrees = over_seeds(runs, m, n, lambda e: e.degree)
        made.append(line(m, c, [e + 0.5 for e in range(len(degrees) + 1)], degrees + degrees[-1:], {"shape": "hv"}))
    return made


def _against_models(runs: Sequence[RunData], n: int, colour: dict[str, str]) -> list[Trace]:
    made = []
    for m in dict.fromkeys(r.run.method for r in runs):
        steps = np.diff([0.0, *over_seeds(runs, m, n, lambda e: e.step)])
        models = np.cumsum(steps * np.array(over_seeds(runs, m, n, lambda e: e.degree)))
        made.append(line(m, colour[m], models, over_seeds(runs, m, n, lambda e: e.value)))
    return made


def _against_clock(runs: Sequence[RunData], n: int, colour: dict[str, str]) -> list[Trace]:
    made = []
    for m in colour:
        cell = analysis.select(runs, m, n)
        if any(r.step_seconds is not None for r in cell):
            steps = [round(s) for s in over_seeds(runs, m, n, lambda e: e.step)]
            each = [[r.seconds_at(s) or 0.0 for r in cell] for s in steps]
            made.append(line(m, colour[m], [sum(s) / len(s) for s in each], over_seeds(runs, m, n, lambda e: e.value)))
    return made


def _by_run(runs: Sequence[RunData], n: int, colour: dict[str, str], x: Callable[[RunData], float]) -> list[Trace]:
    made = []
    for m in colour:
        cell = [r for r in analysis.select(runs, m, n) if r.value is not None]
        if cell:
            dots = {"x": _list([x(r) for r in cell]), "y": _list([r.value or 0.0 for r in cell])}
            text = [f"{m}, seed {r.run.seed}" for r in cell]
            marker = {"color": colour[m], "size": 9}
            made.append({"type": "scatter", "mode": "markers", "name": m, "marker": marker, **dots, "text": text})
    return made


def _against_scale(runs: Sequence[RunData], colour: dict[str, str]) -> list[Trace]:
    made = []
    finals = analysis.finals(runs)
    for m in colour:
        mine = [f for f in finals if f.method == m]
        bars = {"type": "data", "array": _list([f.value.half for f in mine]), "thickness": 1}
        trace = line(m, colour[m], [f.replicas for f in mine], [f.value.mean for f in mine], error_y=bars)
        made.append(trace | {"mode": "lines+markers"})
    return made


def _dispersion(runs: Sequence[RunData], n: int, measure: str, colour: dict[str, str]) -> list[Trace]:
    made = []
    for m in colour:
        curve = analysis.dispersion_over_time(runs, m, n, measure)
        if len(curve.steps) and curve.mean.max() > 0:
            x, y = _thin(curve.steps, np.where(curve.mean > 0, curve.mean, np.nan))
            made.append(line(m, colour[m], x, y))
    return made


def _control(runs: Sequence[RunData], n: int, colour: dict[str, str], styles: Mapping[str, Mapping[str, Any]]) -> list[Trace]:
    """A line for each run and each of its numbers; the legend has one for each method."""
    made = []
    for m in analysis.methods(runs):
        for k, r in enumerate(analysis.select(runs, m, n)):
            for number, style in styles.items():
                curve = r.noted(number)
                x, y = _thin(curve.steps, curve.mean)
                first = number == next(iter(styles))
                legend = {"legendgroup": m, "showlegend": first and not k, "text": f"seed {r.run.seed}"}
                made.append(line(m if first else f"{m}: {number.split('_')[1]}", colour[m], x, y, style, **legend))
    return made


def _ranks(runs: Sequence[RunData], n: int, measure: str, colour: dict[str, str]) -> list[Trace]:
    steps, ranks = analysis.ranks_over_time(runs, n, measure)
    made = []
    for m, rank in ranks.items():
        x, y = _thin(steps, rank)
        made.append(line(m, colour[m], x, y))
    return made


def _tensors(runs: Sequence[RunData], method: str, n: int) -> list[Trace]:
    cell = [r for r in analysis.select(runs, method, n) if len(r.steps)]
    if not cell:
        return []
    length = min(len(r.steps) for r in cell)
    mean = np.mean([r.dispersion["gini"][:length] for r in cell], axis=0)
    steps, values = _thin(cell[0].steps[:length], mean)
    with np.errstate(divide="ignore"):
        z = np.log10(values.T)
    rounded = [[None if not math.isfinite(v) else round(float(v), 2) for v in row] for row in z]
    return _heatmap(steps.tolist(), cell[0].run.tensors, rounded, "log10")


def _partition(partition: Partition, n: int, show: str) -> list[Trace]:
    counts = np.array(partition.counts[n], dtype=float)
    values = counts / counts.sum(axis=0) if show == "share" else counts
    shown = [_list(row) for row in np.where(counts > 0, values, np.nan)]
    return _heatmap(range(n), partition.labels, shown, show, zmin=0, zmax=1 if show == "share" else float(counts.max()))


def _heatmap(x: Sequence[int], y: Sequence[str], z: list[list[float | None]], title: str, **more: float) -> list[Trace]:
    bar = {"title": {"text": title}, "thickness": 12}
    return [{"type": "heatmap", "x": list(x), "y": list(y), "z": z, **more, "colorscale": "Viridis", "colorbar": bar}]
