"""Plain SVG for the pages in ``docs/``: horizontal bars and lines, on white, without a plotting library.

    python -m benchmarks.chart docs/step-time.json > docs/step-time.svg

The reports of DBench use plotly; these figures are for a README, where only a picture is shown.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

# Told apart by colour-blind people (Okabe and Ito); grey is for what is only there to compare with.
COLOURS = {"ours": "#0072b2", "ddp": "#d55e00", "other": "#cc79a7", "none": "#9a9a9a"}
LINES = ("#d55e00", "#0072b2", "#009e73", "#cc79a7", "#8c6d00", "#56b4e9")

_INK, _FAINT, _GRID = "#222222", "#666666", "#dddddd"
_FONT = "system-ui, -apple-system, 'Segoe UI', Helvetica, Arial, sans-serif"
_DIGIT = 0.56  # the width of a character, as a part of the font size: there is nothing here to measure text with


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
    size, row, gap, side, between = 12, 20, 26, 20, 36
    columns = max(1, min(columns, len(panels)))
    width = max(480, _width(title, 16) if columns == 1 else 0, _width(note, size) if columns == 1 else 0)
    label = max((_width(bar.label, size) for panel in panels for bar in panel.bars), default=0) + 10
    text = max((_width(_text(bar), size) for panel in panels for bar in panel.bars), default=0) + 12
    room = max(width - label - text, 80)
    top = 16 + (26 if title else 0) + (18 if note else 0) + (30 if legend else 0)
    ends = [float(top)] * columns
    parts = _heading(title, note, side)
    if legend:
        parts += _legend([(name, COLOURS[kind]) for kind, name in legend.items()], side, top - 26, size)[0]
    for panel in panels:
        column = ends.index(min(ends))
        x, y = side + column * (width + between), ends[column]
        scale = room / max([bar.value for bar in panel.bars] + [mark or 0] + [1e-12])
        parts.append(_say(panel.title, x, y + 14, 13, weight="600"))
        drawn = [_bar(bar, x + label, y + 24 + k * row, scale, size, row) for k, bar in enumerate(panel.bars)]
        bottom = y + 24 + row * len(panel.bars)
        parts += [bar for bar, _ in drawn]
        if mark is not None:
            parts.append(_rule(x + label + mark * scale, y + 24, x + label + mark * scale, bottom, _INK, dash=True))
        parts += [text for _, text in drawn]  # over the mark
        ends[column] = bottom + gap
    return _svg(2 * side + columns * width + (columns - 1) * between, max(ends), parts)


def _bar(bar: Bar, x: float, y: float, scale: float, size: int, row: int) -> tuple[str, str]:
    """The bar, and what stands on both sides of it."""
    weight = "600" if bar.kind == "ddp" else "400"
    length = max(bar.value * scale, 1)
    label = _say(bar.label, x - 8, y + row / 2 + 4, size, anchor="end", weight=weight)
    text = _say(_text(bar), x + length + 6, y + row / 2 + 4, size, weight=weight)
    return (
        f'<rect x="{x:.1f}" y="{y + 2:.1f}" width="{length:.1f}" height="{row - 5}" rx="2" fill="{COLOURS[bar.kind]}"/>',
        f'{label}\n<g paint-order="stroke" stroke="#ffffff" stroke-width="5">{text}</g>',
    )


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
    width, height, left, right, size = 860, 460, 64, 24, 12
    names = list(dict.fromkeys(line.name for line in series))
    colours = {name: LINES[k % len(LINES)] for k, name in enumerate(names)}
    below = 28 + (26 if title else 0) + (18 if note else 0)  # the heading
    legend, rows = _legend([(name, colours[name]) for name in names], left, below, size, width)
    top = below + 18 * rows
    bottom = height - 52
    xs = [x for line in series for x in line.x]
    ys = [y for line in series for y in line.y] + ([level[0]] if level else [])
    scale = math.log if log else float
    right_end = max(xs, default=1.0) or 1.0
    left_end = min(xs, default=0.1) if log_x else 0.0
    lowest, highest = (min(ys, default=1.0), max(ys, default=2.0)) if log else (min([0.0, *ys]), max(ys, default=1.0))
    if span:
        lowest, highest = span
    low, high = scale(lowest), scale(highest)
    if not span:
        low, high = (
            (low - 0.04 * (high - low) if log or low < 0 else low),
            high + (0.2 if marks else 0.04) * (high - low) + 1e-9,
        )

    def place(x: float, y: float) -> tuple[float, float]:
        part = math.log(x / left_end) / math.log(right_end / left_end) if log_x else x / right_end
        return left + part * (width - left - right), bottom - (scale(y) - low) / (high - low) * (bottom - top)

    parts = _heading(title, note, 20) + legend
    for tick in log_ticks(lowest, highest) if log else ticks(lowest, highest):
        _, y = place(right_end, tick)
        if not top <= y <= bottom:
            continue
        parts.append(_rule(left, y, width - right, y, _GRID))
        parts.append(_say(f"{tick:g}", left - 8, y + 4, size, anchor="end", colour=_FAINT))
    x_ticks = ticks(0, right_end)
    if log_x:  # a few values, as 12, 24, 48, 96, are their own ticks
        x_ticks = sorted(set(xs)) if len(set(xs)) <= 6 else log_ticks(left_end, right_end)
    for tick in (tick for tick in x_ticks if left_end <= tick <= right_end):
        x, _ = place(tick, highest)
        parts.append(_rule(x, bottom, x, bottom + 5, _FAINT))
        parts.append(_say(f"{tick:g}", x, bottom + 19, size, anchor="middle", colour=_FAINT))
    parts.append(_rule(left, bottom, width - right, bottom, _FAINT))
    parts.append(_say(x_label, (left + width - right) / 2, height - 12, size, anchor="middle"))
    middle = (top + bottom) / 2
    parts.append(
        f'<g transform="rotate(-90 16 {middle:.1f})">{_say(y_label, 16, middle, size, anchor="middle")}</g>' if y_label else ""
    )
    if span:
        parts.append(f'<clipPath id="inside"><rect x="0" y="{top}" width="{width}" height="{bottom - top}"/></clipPath>')
        parts.append('<g clip-path="url(#inside)">')
    for line in series:
        points = " ".join(f"{x:.1f},{y:.1f}" for x, y in (place(*point) for point in zip(line.x, line.y, strict=True)))
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colours[line.name]}" stroke-width="1.8"/>')
    if span:
        parts.append("</g>")
    for k, (at, text) in enumerate(marks):
        x, _ = place(at, highest)
        parts.append(_rule(x, top, x, bottom, _INK, dash=True))
        late = x > 0.75 * width
        parts.append(_say(text, x - 5 if late else x + 5, top + 14 + 16 * (k % 3), size, anchor="end" if late else "start"))
    if level:
        _, y = place(right_end, level[0])
        parts.append(_rule(left, y, width - right, y, _INK, dash=True))
        parts.append(_say(level[1], width - right, y - 6, size, anchor="end"))
    return _svg(width, height, parts)


def scatters(panels: Sequence[Scatter], title: str = "", note: str = "", x_label: str = "", columns: int = 2) -> str:
    """Panels of dots with intervals over a logarithmic x in percent, which all panels share."""
    width, height, gap, side = 470, 300, 30, 20
    columns = max(1, min(columns, len(panels)))
    top = 16 + (26 if title else 0) + (18 if note else 0)
    xs = [dot.x for panel in panels for dot in panel.dots if dot.x > 0]
    ends = (min(xs, default=1) / 1.5, max(xs, default=100) * 1.5)
    parts = _heading(title, note, side)
    for k, panel in enumerate(panels):
        x, y = side + k % columns * (width + gap), top + k // columns * (height + gap)
        parts += _scatter(panel, ends, x_label, x, y, width, height)
    rows = -(-len(panels) // columns)
    return _svg(2 * side + columns * width + (columns - 1) * gap, top + rows * (height + gap), parts)


def _scatter(
    panel: Scatter, ends: tuple[float, float], x_label: str, x0: float, y0: float, width: float, height: float
) -> list[str]:
    size, left, right, top, bottom = 11, x0 + 52, x0 + width - 8, y0 + 30, y0 + height - 38
    values = [dot.y for dot in panel.dots if math.isfinite(dot.y)]
    high_is_best = panel.best == "highest"
    best = (max if high_is_best else min)(values)
    kept = [dot for dot in panel.dots if abs(dot.y - best) <= panel.reach]
    spans = [end for dot in kept for end in (dot.low, dot.high, dot.y) if math.isfinite(end)]
    margin = 0.1 * (max(spans) - min(spans) or 1)
    low, high = min(spans) - margin, max(spans) + margin
    if len(kept) < len(panel.dots):
        low, high = (low - margin, high) if high_is_best else (low, high + margin)

    def across(value: float) -> float:
        return left + math.log(value / ends[0]) / math.log(ends[1] / ends[0]) * (right - left)

    def up(value: float) -> float:
        return bottom - (min(max(value, low), high) - low) / (high - low) * (bottom - top)

    parts = [_say(panel.title, x0, y0 + 14, 13, weight="600")]
    for tick in ticks(low, high, 5):
        if low <= tick <= high:
            parts.append(_rule(left, up(tick), right, up(tick), _GRID))
            parts.append(_say(f"{tick:g}", left - 6, up(tick) + 4, size, anchor="end", colour=_FAINT))
    for tick in (tick for tick in log_ticks(*ends) if ends[0] <= tick <= ends[1]):
        parts.append(_rule(across(tick), bottom, across(tick), bottom + 4, _FAINT))
        parts.append(_say(f"{tick:g}", across(tick), bottom + 16, size, anchor="middle", colour=_FAINT))
    parts.append(_rule(left, bottom, right, bottom, _FAINT))
    parts.append(_say(x_label, (left + right) / 2, bottom + 32, size, anchor="middle"))
    middle = (top + bottom) / 2
    turned = _say(panel.y_label, x0 + 10, middle, size, anchor="middle")
    parts.append(f'<g transform="rotate(-90 {x0 + 10:.1f} {middle:.1f})">{turned}</g>')
    texts: list[tuple[float, float]] = []
    for dot in sorted(panel.dots, key=lambda dot: up(dot.y) if math.isfinite(dot.y) else bottom):
        colour, inside = COLOURS[dot.kind], low <= dot.y <= high
        x, y = across(dot.x), up(dot.y) if math.isfinite(dot.y) else bottom
        if inside and math.isfinite(dot.low):
            parts.append(f'<g stroke-width="1.6">{_rule(x, up(dot.low), x, up(dot.high), colour)}</g>')
        parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{colour if inside else "#ffffff"}" stroke="{colour}"/>')
        text = dot.label if inside else f"{dot.label}: {dot.y:.4g}"
        late = x + 10 + _width(text, size) > right
        at = y + 4
        while any(abs(at - other) < 12 and abs(x - there) < 110 for there, other in texts):
            at += 2
        texts.append((x, at))
        weight = "600" if dot.kind == "ours" else "400"
        parts.append(_say(text, x - 8 if late else x + 8, at, size, anchor="end" if late else "start", weight=weight))
    return parts


def step_time(results: Mapping[str, Mapping[str, Any]]) -> str:
    """The figure of ``step_time.py``: per setting, how long a step is against one without communication."""
    panels = []
    for result in results.values():
        setting, methods = result["setting"], result["methods"]
        base = methods["none"]["ms"]
        # In one order everywhere: what is compared with first, then ours, the fastest first.
        order = sorted(methods, key=lambda name: (_ORDER.get(_kind(name), 3), methods[name]["ms"]))
        made = [
            Bar(
                name,
                methods[name]["ms"] / base,
                _kind(name),
                f"{methods[name]['ms'] / base:.2f} ({methods[name]['ms']:.0f} ms)",
            )
            for name in order
        ]
        panels.append(Panel(_describe(setting), made))
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


# --- Ticks -----------------------------------------------------------------------------------------------------------------


def ticks(low: float, high: float, about: int = 6) -> list[float]:
    """Round numbers from at most ``low`` to at least ``high``."""
    if not high > low:
        high = low + 1
    rough = (high - low) / about
    unit = 10 ** math.floor(math.log10(rough))
    step = next(m * unit for m in (1, 2, 5, 10) if m * unit >= rough * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [float(f"{k * step:.12g}") for k in range(first, last + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """1, 2, 5, 10, … from at most ``low`` to at least ``high``, both above 0."""
    all_ticks = [float(f"{m}e{e}") for e in range(-12, 13) for m in (1, 2, 5)]
    first = max(k for k, tick in enumerate(all_ticks) if tick <= low * 1.001)
    last = min(k for k, tick in enumerate(all_ticks) if tick >= high * 0.999)
    return all_ticks[first : max(last, first + 1) + 1]


# --- Pieces of SVG ---------------------------------------------------------------------------------------------------------


def _text(bar: Bar) -> str:
    return bar.text or f"{bar.value:.3g}"


def _width(text: str, size: int) -> float:
    return len(text) * size * _DIGIT


def _say(text: str, x: float, y: float, size: int, anchor: str = "start", colour: str = _INK, weight: str = "400") -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}" fill="{colour}" '
        f'font-weight="{weight}">{escape(text)}</text>'
    )


def _rule(x1: float, y1: float, x2: float, y2: float, colour: str, dash: bool = False) -> str:
    dashes = ' stroke-dasharray="5 4"' if dash else ""
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{colour}"{dashes}/>'


def _heading(title: str, note: str, x: float) -> list[str]:
    parts = [_say(title, x, 28, 16, weight="600")] if title else []
    return parts + ([_say(note, x, 48 if title else 24, 12, colour=_FAINT)] if note else [])


def _legend(
    entries: Sequence[tuple[str, str]], left: float, y: float, size: int, width: float = math.inf
) -> tuple[list[str], int]:
    """And how many rows it has, 18 apart: what would be beyond ``width`` begins a new one."""
    parts: list[str] = []
    x, rows = left, 1
    for name, colour in entries:
        if x > left and x + 18 + _width(name, size) > width:
            x, y, rows = left, y + 18, rows + 1
        parts.append(f'<rect x="{x:.1f}" y="{y:.1f}" width="12" height="12" rx="2" fill="{colour}"/>')
        parts.append(_say(name, x + 18, y + 10, size))
        x += 18 + _width(name, size) + 20
    return parts, rows


def _svg(width: float, height: float, parts: Sequence[str]) -> str:
    body = "\n".join(part for part in parts if part)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height:.0f}" '
        f'viewBox="0 0 {width:.0f} {height:.0f}" font-family="{escape(_FONT)}">\n'
        f'<rect width="100%" height="100%" fill="#ffffff"/>\n{body}\n</svg>\n'
    )


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m benchmarks.chart STEP_TIME.json > FIGURE.svg")
    sys.stdout.write(step_time(json.loads(Path(sys.argv[1]).read_text())))
