"""Figures for the pages in ``docs/``: horizontal bars, lines and dots, as SVG on white, drawn by matplotlib.

    python -m benchmarks.chart docs/step-time.json > docs/step-time.svg

The reports of DBench use plotly; these figures are for a README, where only a picture is shown. The same results give the same file.
"""

from __future__ import annotations

import io
import json
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator, NullLocator, StrMethodFormatter

# Told apart by colour-blind people (Okabe and Ito); grey is for what is only there to compare with.
COLOURS = {"ours": "#0072b2", "ddp": "#d55e00", "other": "#cc79a7", "none": "#9a9a9a"}
LINES = ("#d55e00", "#0072b2", "#009e73", "#cc79a7", "#8c6d00", "#56b4e9")

_INK, _FAINT, _GRID = "#222222", "#666666", "#dddddd"
_STYLE: Any = {
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "gossamer",
    "font.size": 9,
    "text.color": _INK,
    "axes.edgecolor": _FAINT,
    "axes.labelcolor": _INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.unicode_minus": False,
    "grid.color": _GRID,
    "xtick.color": _FAINT,
    "ytick.color": _FAINT,
}
_DASHED: dict[str, Any] = {"color": _INK, "linestyle": (0, (5, 4)), "linewidth": 0.8}
_PLAIN = StrMethodFormatter("{x:g}")


@dataclass(frozen=True)
class Bar:
    label: str
    value: float
    kind: str = "ours"  # a key of COLOURS
    text: str = ""  # at the end of the bar; the value if empty


@dataclass(frozen=True)
class Panel:
    title: str
    bars: Sequence[Bar]


@dataclass(frozen=True)
class Line:
    """Lines of the same ``name`` (repeats) share a colour and one entry in the legend."""

    name: str
    x: Sequence[float]
    y: Sequence[float]


@dataclass(frozen=True)
class Dot:
    """``low`` to ``high``: its interval."""

    label: str
    x: float
    y: float
    low: float
    high: float
    kind: str = "ours"  # a key of COLOURS


@dataclass(frozen=True)
class Scatter:
    """``best``: "highest" or "lowest". ``reach``: what is further than that from the best y stands at the edge, with its value."""

    title: str
    y_label: str
    dots: Sequence[Dot]
    reach: float
    best: str = "highest"


@mpl.rc_context(_STYLE)
def bars(
    panels: Sequence[Panel],
    title: str = "",
    note: str = "",
    columns: int = 2,
    legend: Mapping[str, str] | None = None,
    mark: float | None = None,
) -> str:
    """Panels of horizontal bars, each in the column that is shorter so far, and each with a scale of its own.

    ``legend``: kind -> its name. ``mark``: a value at which every panel has a line.
    """
    columns = max(1, min(columns, len(panels)))
    row, width, label, top = 15, 400, 150, 48 + (26 if legend else 0)
    ends = [float(top)] * columns
    places = []
    for panel in panels:
        column = ends.index(min(ends))
        places.append((column, ends[column] + 18))
        ends[column] += 18 + row * len(panel.bars) + 14
    figure = _figure(width * columns + 20, max(ends), title, note)
    for panel, (column, y) in zip(panels, places, strict=True):
        height = row * len(panel.bars)
        axes = _axes(figure, 16 + column * width + label, y, width - label - 90, height)
        names = range(len(panel.bars))
        axes.barh(names, [bar.value for bar in panel.bars], 0.75, color=[COLOURS[bar.kind] for bar in panel.bars])
        axes.set(ylim=(len(panel.bars) - 0.5, -0.5), xlim=(0, max([bar.value for bar in panel.bars] + [mark or 0])))
        axes.axis("off")
        axes.set_title(panel.title, loc="left", size=10, weight="bold", x=-label / (width - label - 90), pad=5)
        for k, bar in enumerate(panel.bars):
            weight = "bold" if bar.kind == "ddp" else "normal"
            axes.annotate(bar.label, (0, k), (-6, 0), textcoords="offset points", ha="right", va="center", weight=weight)
            text = bar.text or f"{bar.value:.3g}"
            beside: dict[str, Any] = {"textcoords": "offset points", "va": "center", "weight": weight, "zorder": 4}
            axes.annotate(text, (bar.value, k), (5, 0), **beside, bbox={"fc": "white", "ec": "none", "pad": 1})
        if mark is not None:
            axes.axvline(mark, zorder=3, **_DASHED)
    if legend:
        _legend(figure, 12, 46, [(name, COLOURS[kind]) for kind, name in legend.items()], len(legend))
    return _svg(figure)


@mpl.rc_context(_STYLE)
def lines(
    series: Sequence[Line],
    title: str = "",
    note: str = "",
    x_label: str = "",
    y_label: str = "",
    level: tuple[float, str] | None = None,
    log: bool = False,
    marks: Sequence[tuple[float, str]] = (),
    log_x: bool = False,
    span: tuple[float, float] | None = None,
) -> str:
    """``level``: a horizontal line and what it says; ``marks``: vertical ones. ``log``, ``log_x``: y, x are logarithmic.

    ``span``: lines are cut off below and above, so that one which goes astray does not press the others flat; say so in the note.
    """
    names = list(dict.fromkeys(line.name for line in series))
    colours = {name: LINES[k % len(LINES)] for k, name in enumerate(names)}
    per_row = max(1, int(130 / (max(map(len, names), default=1) + 6)))
    top = 58 + 15 * -(-len(names) // per_row)
    figure = _figure(720, 400, title, note)
    axes = _axes(figure, 56, top, 720 - 72, 400 - top - 42)
    for line in series:
        axes.plot(line.x, line.y, color=colours[line.name], linewidth=1.5)
    _logarithmic(axes, log, log_x, sorted({x for line in series for x in line.x}))
    axes.set(xlabel=x_label, ylabel=y_label)
    axes.grid(axis="y", linewidth=0.8)
    axes.spines["left"].set_visible(False)
    axes.tick_params(axis="y", length=0)
    axes.margins(x=0, y=0.04)
    if not log_x:
        axes.set_xlim(left=0)
    if not log:
        lowest, highest = min([0.0, *(y for line in series for y in line.y)]), axes.get_ylim()[1]
        axes.set_ylim(lowest, highest * (1.15 if marks else 1))
    if span:
        axes.set_ylim(span)
    for k, (at, text) in enumerate(marks):
        axes.axvline(at, **_DASHED)
        late = at > 0.75 * axes.get_xlim()[1]
        place: dict[str, Any] = {"xycoords": axes.get_xaxis_transform(), "textcoords": "offset points", "va": "top"}
        axes.annotate(text, (at, 1), (-4 if late else 4, -2 - 13 * (k % 3)), ha="right" if late else "left", **place)
    if level:
        axes.axhline(level[0], **_DASHED)
        axes.annotate(
            level[1], (1, level[0]), (0, 4), xycoords=axes.get_yaxis_transform(), textcoords="offset points", ha="right"
        )
    _legend(figure, 52, 46, colours.items(), per_row)
    return _svg(figure)


@mpl.rc_context(_STYLE)
def scatters(panels: Sequence[Scatter], title: str = "", note: str = "", x_label: str = "", columns: int = 2) -> str:
    """Panels of dots with intervals over a logarithmic x in percent, which all panels share."""
    columns = max(1, min(columns, len(panels)))
    width, height = 400, 260
    figure = _figure(width * columns, 44 + height * -(-len(panels) // columns), title, note)
    xs = [dot.x for panel in panels for dot in panel.dots if dot.x > 0]
    for k, panel in enumerate(panels):
        axes = _axes(figure, k % columns * width + 52, 70 + k // columns * height, width - 66, height - 66)
        axes.set_title(panel.title, loc="left", size=10, weight="bold")
        axes.set(xlabel=x_label, ylabel=panel.y_label)
        _logarithmic(axes, False, True, ())
        axes.set_xlim(min(xs, default=1) / 1.5, max(xs, default=100) * 1.5)
        axes.grid(axis="y", linewidth=0.8)
        axes.tick_params(axis="y", length=0)
        _dots(axes, panel)
    return _svg(figure)


def _dots(axes: Axes, panel: Scatter) -> None:
    values = [dot.y for dot in panel.dots if math.isfinite(dot.y)]
    best = (max if panel.best == "highest" else min)(values)
    kept = [dot for dot in panel.dots if abs(dot.y - best) <= panel.reach]
    ends = [end for dot in kept for end in (dot.low, dot.high, dot.y) if math.isfinite(end)]
    margin = 0.1 * (max(ends) - min(ends) or 1)
    low, high = min(ends) - margin, max(ends) + margin
    if len(kept) < len(panel.dots):
        low, high = (low - margin, high) if panel.best == "highest" else (low, high + margin)
    axes.set_ylim(low, high)
    written: list[tuple[float, float]] = []  # where text stands, in points
    for dot in sorted(panel.dots, key=lambda dot: -dot.y if math.isfinite(dot.y) else -low):
        colour, inside = COLOURS[dot.kind], low <= dot.y <= high
        y = min(max(dot.y, low), high) if math.isfinite(dot.y) else low
        if inside and math.isfinite(dot.low):
            axes.plot([dot.x, dot.x], [dot.low, dot.high], color=colour, linewidth=1.4)
        axes.plot(dot.x, y, "o", markersize=6, mfc=colour if inside else "white", mec=colour, clip_on=False)
        text = dot.label if inside else f"{dot.label}: {dot.y:.4g}"
        x_at, y_at = axes.transData.transform((dot.x, y))
        late = x_at + 8 + 5.2 * len(text) > axes.transAxes.transform((1, 0))[0]
        moved = 0.0
        while any(abs(y_at + moved - other) < 10 and abs(x_at - there) < 95 for there, other in written):
            moved -= 2
        written.append((x_at, y_at + moved))
        place: dict[str, Any] = {"textcoords": "offset points", "va": "center", "ha": "right" if late else "left"}
        weight = "bold" if dot.kind == "ours" else "normal"
        axes.annotate(text, (dot.x, y), (-7 if late else 7, moved), size=8, weight=weight, **place)


def step_time(results: Mapping[str, Mapping[str, Any]]) -> str:
    """The figure of ``step_time.py``: per setting, how long a step is against one without communication."""
    panels = []
    for result in results.values():
        methods = result["methods"]
        base = methods["none"]["ms"]
        # In one order everywhere: what is compared with first, then ours, the fastest first.
        order = sorted(methods, key=lambda name: (_ORDER.get(_kind(name), 3), methods[name]["ms"]))
        values = {name: methods[name]["ms"] / base for name in order}
        made = [Bar(name, values[name], _kind(name), f"{values[name]:.2f} ({methods[name]['ms']:.0f} ms)") for name in order]
        panels.append(Panel(_describe(result["setting"]), made))
    return bars(
        panels,
        "One training step, against the same step without communication (= 1)",
        "MLP of 6.3 M parameters (25 MB). All processes share the machine's cores, so compare within a panel. Shorter is better.",
        legend={"none": "no communication", "ddp": "PyTorch DDP", "other": "others", "ours": "Gossamer"},
        mark=1,
    )


_ORDER = {"none": 0, "ddp": 1, "other": 2}


def _kind(method: str) -> str:
    if method == "none":
        return "none"
    return "ddp" if method.startswith("ddp") else "other" if method.startswith(("decent-dp", "plain")) else "ours"


def _describe(setting: Mapping[str, Any]) -> str:
    workers, hosts = setting["workers"], setting["hosts"]
    each = f" × {workers // hosts}" if hosts and workers > hosts else ""
    where = f"{hosts} hosts{each}, {setting['rate']} each" if hosts else f"{workers} workers, loopback"
    slow = f", one worker {setting['slow']:g} times slower" if setting.get("slow", 1) != 1 else ""
    noise = ", uneven steps" if setting.get("noise") else ""
    return f"{where}, batch {setting['batch']}{slow}{noise}"


# --- What all figures share. Lengths are in points, from the top left ----------------------------------------------------------------


def _figure(width: float, height: float, title: str, note: str) -> Figure:
    figure = Figure(figsize=(width / 72, height / 72), dpi=72)
    figure.text(16 / width, 1 - 20 / height, title, size=13, weight="bold")
    figure.text(16 / width, 1 - 36 / height, note, color=_FAINT)
    return figure


def _axes(figure: Figure, x: float, y: float, width: float, height: float) -> Axes:
    across, down = 72 * figure.get_figwidth(), 72 * figure.get_figheight()
    return figure.add_axes((x / across, 1 - (y + height) / down, width / across, height / down))


def _logarithmic(axes: Axes, log: bool, log_x: bool, xs: Sequence[float]) -> None:
    """Ticks at 1, 2, 5, 10 …; a few values, as 12, 24, 48, 96, are their own."""
    for wanted, axis, scale in ((log, axes.yaxis, axes.set_yscale), (log_x, axes.xaxis, axes.set_xscale)):
        if wanted:
            scale("log")
            axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axis.set_major_formatter(_PLAIN)
            axis.set_minor_locator(NullLocator())
    if log_x and 0 < len(xs) <= 6:
        axes.set_xticks(list(xs))


def _legend(figure: Figure, x: float, y: float, entries: Iterable[tuple[str, str]], columns: int) -> None:
    handles = [Line2D([], [], marker="s", linestyle="", markersize=8, color=colour, label=name) for name, colour in entries]
    across, down = 72 * figure.get_figwidth(), 72 * figure.get_figheight()
    place = (x / across, 1 - y / down)
    figure.legend(
        handles=handles, loc="upper left", bbox_to_anchor=place, ncols=columns, frameon=False, borderpad=0, handletextpad=0.2
    )


def _svg(figure: Figure) -> str:
    file = io.StringIO()
    figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None})
    return "\n".join(line.rstrip() for line in file.getvalue().splitlines()) + "\n"


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m benchmarks.chart STEP_TIME.json > FIGURE.svg")
    sys.stdout.write(step_time(json.loads(Path(sys.argv[1]).read_text())))
