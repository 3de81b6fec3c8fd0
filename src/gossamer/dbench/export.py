"""Figures and tables for a paper: the report's figures drawn by matplotlib, without a browser; the table in LaTeX or Markdown."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from gossamer.dbench.figures import Figure, Trace
from gossamer.dbench.notebook import Results
from gossamer.errors import GossamerError

FIGURES = ("pdf", "svg", "png")
TABLES = {"latex": "tex", "markdown": "md"}
_SIZE, _DPI = (5.0, 3.2), 200  # inches: one column and a half
_LINES = {"dot": ":", "dash": "--", "solid": "-"}


def export(run: Results, out: Path, figures: Sequence[str] = (), tables: Sequence[str] = (), every: bool = False) -> list[Path]:
    """Write ``accuracy-n16.pdf`` and so on, and ``results.tex``. ``every``: all that the report's boxes can choose, not only what they
    show at first."""
    _refuse("figures", figures, FIGURES)
    _refuse("tables", tables, tuple(TABLES))
    texts = {TABLES[kind]: getattr(run.summary, kind)() for kind in tables}
    pictures = run.figures if figures else {}
    if figures:
        _matplotlib()
    try:
        out.mkdir(parents=True, exist_ok=True)
        written = []
        for ending, text in texts.items():
            written.append(out / f"results.{ending}")
            written[-1].write_text(text, encoding="utf-8")
        for name in pictures:
            figure = run.plain(name)
            for choice in list(figure.choices())[: None if every else 1]:
                stem = out / "-".join(
                    [run.metric if name == "epochs" else name, *(_slug(key, value) for key, value in choice.items())]
                )
                written += _draw(figure, figure.choose(choice), [Path(f"{stem}.{ending}") for ending in figures])
        return written
    except OSError as error:
        raise GossamerError(f"{error.filename or out} can't be written: {error.strerror}") from None


def _refuse(what: str, given: Sequence[str], known: Sequence[str]) -> None:
    for name in given:
        if name not in known:
            raise GossamerError(f"--{what} {name}: not known; there are {', '.join(known)}")


def _slug(key: str, value: str) -> str:
    return f"n{value}" if key == "replicas" else re.sub(r"[^\w.=]+", "-", value).strip("-").lower()


def _matplotlib() -> Any:
    try:
        import matplotlib
    except ImportError:
        raise GossamerError("figures for a paper need matplotlib; install it with: pip install 'gossamer[export]'") from None
    return matplotlib


def _draw(figure: Figure, variant: dict[str, Any], paths: Sequence[Path]) -> list[Path]:
    _matplotlib()
    from matplotlib.figure import Figure as Canvas

    settings = {
        "svg.fonttype": "none",
        "svg.hashsalt": "gossamer",
        "pdf.fonttype": 42,
        "font.size": 9,
        "axes.axisbelow": True,
        "axes.spines.top": False,
        "axes.spines.right": False,
    }
    with _matplotlib().rc_context(settings):
        canvas = Canvas(figsize=_SIZE, layout="constrained")
        axes = canvas.subplots()
        beside = axes.twinx() if "yaxis2" in variant["layout"] else None
        if not any(trace["x"] for trace in variant["data"]):
            axes.text(0.5, 0.5, "no data", ha="center", va="center", transform=axes.transAxes)
        for trace in variant["data"]:
            if trace["type"] == "heatmap":
                _heatmap(canvas, axes, trace)
            else:
                _line(beside if trace.get("yaxis") == "y2" else axes, trace)
        for target, ways in ((axes, "xy"), (beside, "2")):
            for way in ways if target is not None else "":
                _axis(target, "y" if way == "2" else way, variant["layout"][{"x": "xaxis", "y": "yaxis", "2": "yaxis2"}[way]])
        if beside is not None:
            axes.set_zorder(beside.get_zorder() + 1)  # what is away is the background
            axes.patch.set_visible(False)
        handles, labels = axes.get_legend_handles_labels()
        if handles:
            canvas.legend(handles, labels, loc="outside upper center", ncols=min(4, len(handles)), frameon=False)
        for path in paths:
            # Nothing that differs from one export to the next.
            when: dict[str, Any] = {"pdf": {"CreationDate": None}, "svg": {"Date": None}}.get(path.suffix[1:], {})
            canvas.savefig(path, dpi=_DPI, metadata={"Title": figure.title, **when})
    return list(paths)


def _numbers(values: Sequence[float | None]) -> list[float]:
    return [math.nan if value is None else value for value in values]


def _line(axes: Any, trace: Trace) -> None:
    x, y, line, marker = _numbers(trace["x"]), _numbers(trace["y"]), trace.get("line", {}), trace.get("marker", {})
    style: dict[str, Any] = {
        "color": line.get("color", marker.get("color")),
        "linewidth": 0.75 * line.get("width", 0),
        "linestyle": _LINES[line.get("dash", "solid")] if "lines" in trace["mode"] else "none",
        "marker": "o" if "markers" in trace["mode"] else None,
        "markersize": 0.5 * marker.get("size", 8),
        "drawstyle": "steps-post" if line.get("shape") == "hv" else "default",
        "label": trace["name"] if trace.get("showlegend", True) else f"_{trace['name']}",
    }
    if trace.get("fill") == "toself":
        axes.fill(x, y, color=trace["fillcolor"], alpha=trace["opacity"], linewidth=0)
        return
    if trace.get("fill"):
        axes.fill_between(x, y, step="post", color=style["color"], alpha=0.2, linewidth=0)
        return
    if "error_y" in trace:
        axes.errorbar(x, y, yerr=_numbers(trace["error_y"]["array"]), capsize=2, elinewidth=1, **style)
    else:
        axes.plot(x, y, **style)
    axes.grid(color="#dddddd", linewidth=0.5)


def _heatmap(canvas: Any, axes: Any, trace: Trace) -> None:
    grid = [_numbers(row) for row in trace["z"]]
    x = [float(value) for value in trace["x"]]
    drawn = axes.pcolormesh(
        x,
        range(len(grid)),
        grid,
        cmap="viridis",
        vmin=trace.get("zmin"),
        vmax=trace.get("zmax"),
        shading="nearest",
        rasterized=True,
    )
    names = trace["y"]
    some = range(0, len(names), -(-len(names) // 24))  # more can't be read
    axes.set_yticks(list(some), [names[k] for k in some])
    canvas.colorbar(drawn, ax=axes, label=trace["colorbar"]["title"]["text"])


def _axis(axes: Any, way: str, layout: dict[str, Any]) -> None:
    set_: Callable[[str], Callable[..., Any]] = lambda what: getattr(axes, f"set_{way}{what}")  # noqa: E731
    set_("label")(layout["title"]["text"])
    axis = getattr(axes, f"{way}axis")
    if layout.get("type") == "log":
        set_("scale")("log")
        low, high = getattr(axes, f"get_{way}lim")()
        if high < 100 * low:  # plain numbers: there is hardly a power of ten to be seen
            axis.set_major_formatter("{x:g}")
            axis.set_minor_formatter("{x:g}" if high < 8 * low else "")
    if "tickvals" in layout:
        low, high = getattr(axes, f"get_{way}lim")()
        shown = [
            (value, text) for value, text in zip(layout["tickvals"], layout["ticktext"], strict=True) if low <= value <= high
        ]
        axis.set_ticks(*map(list, zip(*shown, strict=True)) if shown else ([],))
        axis.set_minor_formatter("")
    if "range" in layout:
        set_("lim")(layout["range"])
    if "dtick" in layout:
        from matplotlib.ticker import MultipleLocator

        axis.set_major_locator(MultipleLocator(layout["dtick"]))


def export_command(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="An output folder of gossamer bench.")],
    figures: Annotated[str, typer.Option(help=f"Formats, with commas between: {', '.join(FIGURES)}.")] = "",
    tables: Annotated[str, typer.Option(help=f"Formats, with commas between: {', '.join(TABLES)}.")] = "",
    out: Annotated[Path | None, typer.Option(help="Where they go. (default: DIR/export)", show_default=False)] = None,
    every: Annotated[
        bool, typer.Option("--every", help="All scales, measures and methods, not only what the report shows at first.")
    ] = False,
) -> None:
    """Write the report's figures and its table as files for a paper."""
    drawn, printed = ([part for part in text.replace(" ", "").split(",") if part] for text in (figures, tables))
    if not drawn and not printed:
        raise GossamerError("export: nothing was asked for; give --figures pdf, --tables latex, or both")
    for path in export(Results(folder), out or folder / "export", drawn, printed, every):
        typer.echo(str(path))
