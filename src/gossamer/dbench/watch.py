"""``gossamer watch``: how far a bench is. It reads what the bench and its workers write, so it runs beside them, or after them."""

from __future__ import annotations

import contextlib
import html
import json
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import resources
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from gossamer.dbench import work
from gossamer.dbench.cell import records_path
from gossamer.dbench.records import RecordFile
from gossamer.dbench.store import FILE, FINISHED, Run, Store
from gossamer.errors import GossamerError

_LOOK = 1.0  # seconds between two looks
_CURVES = 8  # at most: those of the runs that were finished last, and of those at work


def status(out: Path) -> dict[str, Any]:
    """As plain data. ``seconds_left``: None until a run is finished. ``curves``: by run, epoch and value."""
    store = Store(out / FILE)
    runs, said, name = store.runs(), work.said(out), store.spec().name
    metric = store.meta("metric")["name"]
    by_id = {run.id: run for run in runs}
    at_work = [
        {"run": str(by_id[run].cell), **{key: now[key] for key in ("step", "steps", "loss", "value", "worker")}}
        for run, now in sorted(said.items())
        if run in by_id
    ]
    finished = [run for run in runs if run.status in FINISHED]
    curves = {str(run.cell): [(e.epoch + 1, e.value) for e in store.epochs(run.id)] for run in finished[-_CURVES:]}
    for run in sorted(said):
        record = RecordFile(records_path(out, run), store.identity()).read() if run in by_id else None
        if record is not None:
            curves[str(by_id[run].cell)] = sorted({e.epoch + 1: e.value for e in record.rows.epochs}.items())
    store.close()
    return {
        "name": name,
        "metric": metric,
        "total": len(runs),
        "finished": len(finished),
        "diverged": Counter(run.status for run in runs)["diverged"],
        "seconds_left": _left(runs, said),
        "at_work": at_work,
        "curves": dict(list(curves.items())[-_CURVES:]),
    }


def _left(runs: list[Run], said: dict[int, dict[str, Any]]) -> float | None:
    """By what runs with as many replicas have taken; those of which none is finished, by the mean of all."""
    took: dict[int, list[float]] = defaultdict(list)
    for run in runs:
        if run.status in FINISHED and run.seconds is not None:
            took[run.replicas].append(run.seconds)
    if not took:
        return None
    overall = statistics.fmean(seconds for some in took.values() for seconds in some)
    left = 0.0
    for run in runs:
        if run.status not in FINISHED:
            now = said.get(run.id)
            share = 1 - now["step"] / now["steps"] if now else 1.0
            left += share * (statistics.fmean(took[run.replicas]) if run.replicas in took else overall)
    return left / max(1, len(said))


def shown(now: dict[str, Any]) -> Group:
    """For a terminal."""
    left = now["seconds_left"]
    diverged = f", {now['diverged']} of them diverged" if now["diverged"] else ""
    rest = f"; about {_span(left)} left" if left and now["at_work"] else ""
    head = Text(f"{now['name']}: {now['finished']} of {now['total']} runs are finished{diverged}{rest}")
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in ("at work", "step", "loss", now["metric"], "worker"):
        table.add_column(name, justify="left" if name in ("at work", "worker") else "right")
    for one in now["at_work"]:
        value = "–" if one["value"] is None else f"{one['value']:.4g}"
        step = f"{one['step']}/{one['steps']}"
        table.add_row(Text(one["run"]), step, f"{one['loss']:.3g}", value, Text(one["worker"]))
    return Group(head, table) if now["at_work"] else Group(head)


def _span(seconds: float) -> str:
    minutes = round(seconds / 60)
    return f"{seconds:.0f} s" if seconds < 90 else f"{minutes} min" if minutes < 90 else f"{minutes / 60:.1f} h"


def looks(out: Path) -> Iterator[dict[str, Any]]:
    """Until all runs are finished."""
    while True:
        now = status(out)
        yield now
        if now["finished"] == now["total"]:
            return
        time.sleep(_LOOK)


def in_terminal(out: Path) -> None:
    with Live(shown(status(out)), auto_refresh=False) as live:
        for now in looks(out):
            live.update(shown(now), refresh=True)


def server(out: Path, port: int = 0) -> ThreadingHTTPServer:
    """On loopback alone. ``port`` 0: any that is free."""
    page = resources.files("gossamer.dbench").joinpath("watch.html").read_text(encoding="utf-8")
    title = html.escape(status(out)["name"])

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            host = (self.headers.get("Host") or "").rpartition(":")[0]
            if host not in ("127.0.0.1", "localhost"):  # a page from elsewhere, by a name of its own for this machine
                self.send_error(403)
            elif self.path == "/":
                self._send("text/html; charset=utf-8", page.replace("@@TITLE@@", title))
            elif self.path == "/status.json":
                self._send("application/json", json.dumps(_finite(status(out)), allow_nan=False))
            else:
                self.send_error(404)

        def _send(self, kind: str, text: str) -> None:
            data = text.encode()
            self.send_response(200)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: Any) -> None: ...

    try:
        return ThreadingHTTPServer(("127.0.0.1", port), Handler)
    except (OSError, OverflowError) as error:  # in use, or out of range
        raise GossamerError(
            f"--port {port} can't be used: {getattr(error, 'strerror', None) or error}; 0 takes any that is free"
        ) from None


def _finite(value: Any) -> Any:
    """What JSON has no number for becomes null."""
    if isinstance(value, dict):
        return {key: _finite(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(one) for one in value]
    return None if isinstance(value, float) and not abs(value) < float("inf") else value


def watch_command(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="An output folder of gossamer bench.")],
    browser: Annotated[
        bool, typer.Option("--browser", help="As a page on this machine (127.0.0.1), instead of in the terminal.")
    ] = False,
    port: Annotated[int, typer.Option(help="Of the page; 0: any that is free.")] = 0,
) -> None:
    """Show how far a bench is: runs, workers, time left and curves so far. It ends with the bench; Ctrl-C ends it alone."""
    if not browser:
        in_terminal(folder)
        return
    with server(folder, port) as page:
        typer.echo(f"http://127.0.0.1:{page.server_port}/ (Ctrl-C ends the page, not the bench)")
        with contextlib.suppress(KeyboardInterrupt):
            page.serve_forever()
