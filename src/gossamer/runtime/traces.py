"""The traces of all workers (``model.trace(folder)``) in one file for Perfetto, and a table: how long each worker waited for which."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from gossamer.errors import GossamerError

NAME = "trace.json"
Waits = Counter[tuple[int, int]]  # (rank, the rank that it waited for) -> seconds


def merge(folder: Path) -> tuple[Path, Waits]:
    """Write ``trace.json`` from the ``rank-K.json`` in a folder. Times begin with the first event."""
    parts = [_read(path) for path in sorted(folder.glob("rank-*.json"))]
    if not parts:
        raise GossamerError(
            f"{folder} holds no traces (rank-0.json …); training writes them inside: with model.trace({str(folder)!r})"
        )
    events = [event for part in parts for event in part["traceEvents"]]
    start = min((event["ts"] for event in events if "ts" in event), default=0.0)
    waits: Waits = Counter()
    for event in events:
        if "ts" in event:
            event["ts"] = round(event["ts"] - start, 1)
        if "for" in event.get("args", {}):
            waits[event["pid"], event["args"]["for"]] += event["dur"] / 1e6
    path = folder / NAME
    try:
        path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}), encoding="utf-8")
    except OSError as error:
        raise GossamerError(f"{path} can't be written: {error.strerror}") from None
    return path, waits


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if {"traceEvents", "gossamer"} <= set(found):
            return found
    except (OSError, ValueError, TypeError):
        pass
    raise GossamerError(f"{path} is not a trace that model.trace() has written")


def trace_command(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The folder that was given to model.trace().")],
) -> None:
    """Put the traces of all workers into one file for Perfetto, and print which worker waited for which."""
    path, waits = merge(folder)
    ranks = sorted({rank for pair in waits for rank in pair})
    table = Table(box=box.SIMPLE_HEAD, title="Seconds that a worker (row) stood still for another one (column)")
    for name in ("", *(f"rank {rank}" for rank in ranks), "all"):
        table.add_column(name, justify="right")
    for rank in ranks:
        mine = [waits[rank, other] for other in ranks]
        table.add_row(f"rank {rank}", *(f"{seconds:.3f}" if seconds else "–" for seconds in mine), f"{sum(mine):.3f}")
    Console().print(table)
    typer.echo(f"The trace, for https://ui.perfetto.dev or chrome://tracing: {path}")
