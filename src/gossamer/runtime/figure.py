"""The planner's figure, one HTML page without anything from outside; and tables on the terminal."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path

import plotly.graph_objects as go
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

from gossamer.errors import GossamerError
from gossamer.runtime.plan import Plan

# Told apart by colour-blind people (Okabe and Ito, and greys).
_COLOURS = ("#d55e00", "#0072b2", "#56b4e9", "#009e73", "#cc79a7", "#e69f00", "#8c6d00", "#9a9a9a", "#444444")


def write(plans: Sequence[Plan], path: Path) -> None:
    figure = go.Figure()
    labels = list(dict.fromkeys(row.label for plan in plans for row in plan.rows))
    for k, label in enumerate(labels):
        found = [(plan.workers, row) for plan in plans for row in plan.rows if row.label == label]
        figure.add_bar(
            name=label,
            x=[str(workers) for workers, _ in found],
            y=[row.seconds * 1e3 for _, row in found],
            error_y={
                "type": "data",
                "symmetric": False,
                "array": [(row.high - row.seconds) * 1e3 for _, row in found],
                "arrayminus": [(row.seconds - row.low) * 1e3 for _, row in found],
            },
            customdata=[[row.speedup, row.network, row.waiting] for _, row in found],
            hovertemplate=f"{label}<br>%{{x}} workers: %{{y:.4g}} ms<br>DDP / it: %{{customdata[0]:.2f}}"
            "<br>network %{customdata[1]:.0%}, waiting %{customdata[2]:.0%}<extra></extra>",
            marker_color=_COLOURS[k % len(_COLOURS)],
        )
    first = plans[0]
    advice = "<br>".join(line for plan in plans for line in textwrap.wrap(plan.advice, 141, break_on_hyphens=False))
    figure.update_layout(
        template="plotly_white",
        title={"text": f"Predicted time per iteration: {first.workload.name} on {first.cluster.name}"},
        xaxis={"title": "workers", "type": "category"},
        yaxis={"title": "ms per iteration (predicted)", "rangemode": "tozero"},
        barmode="group",
        margin={"b": 120 + 60 * len(plans)},
        annotations=[
            {"text": advice, "xref": "paper", "yref": "paper", "x": 0, "y": -0.18, "xanchor": "left", "yanchor": "top"}
            | {"showarrow": False, "align": "left"}
        ],
        height=560 + 60 * len(plans),
    )
    try:
        if path.parent == Path("runs"):  # where the default is
            path.parent.mkdir(exist_ok=True)
        path.write_text(figure.to_html(include_plotlyjs=True, full_html=True), encoding="utf-8")
    except OSError as error:
        raise GossamerError(f"{path} can't be written: {error.strerror}") from None


def show(table: Table) -> None:
    """On the terminal. No column is lost where it is too narrow; in a pipe or a file, lines are as long as they need to be."""
    console, roomy = Console(), Console(width=1000)
    width = Measurement.get(roomy, roomy.options, table)
    Console(width=max(console.width, width.minimum if console.is_terminal else width.maximum)).print(table)
