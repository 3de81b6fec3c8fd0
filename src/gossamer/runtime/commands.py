"""``gossamer plan`` and ``gossamer calibrate``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich import box
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn
from rich.table import Table
from rich.text import Text

from gossamer.apps import tasks
from gossamer.errors import GossamerError
from gossamer.runtime import cluster as clusters
from gossamer.runtime import figure
from gossamer.runtime import plan as planning
from gossamer.runtime.cluster import Cluster
from gossamer.runtime.plan import Plan
from gossamer.runtime.workload import Workload

if TYPE_CHECKING:
    from gossamer.runtime.fit import Fit


def plan_command(
    cluster: Annotated[
        str | None,
        typer.Argument(metavar="CLUSTER", help=f"A TOML file, or a shipped one: {', '.join(clusters.shipped())}."),
    ] = None,
    params: Annotated[str | None, typer.Option(help="The model's size, such as 124M.", show_default=False)] = None,
    task: Annotated[
        str | None, typer.Option(help="A task of gossamer (see gossamer tasks), instead of --params.", show_default=False)
    ] = None,
    samples: Annotated[int, typer.Option(help="Tokens or images that each worker computes per step.")] = 8192,
    compute_ms: Annotated[
        float | None,
        typer.Option(help="Forward and backward of one worker, if you know it. (default: from tflops)", show_default=False),
    ] = None,
    workload: Annotated[
        str | None,
        typer.Option(help="A workload that calibrate has put into the file. (default: its first)", show_default=False),
    ] = None,
    workers: Annotated[
        str | None, typer.Option(help="Numbers of workers, such as 8,16,32. (default: the cluster's)", show_default=False)
    ] = None,
    method: Annotated[
        list[str] | None,
        typer.Option(
            help="A method to compare, such as 'ring, bfloat16'; may be repeated. (default: thirteen)", show_default=False
        ),
    ] = None,
    figure_file: Annotated[Path, typer.Option("--figure", help="Where the figure goes.")] = Path("runs/plan.html"),
    fit_file: Annotated[
        Path | None,
        typer.Option(
            "--fit", help="Instead: fit the model to a table of measured times (docs/runtime-model.md).", show_default=False
        ),
    ] = None,
) -> None:
    """Predict how long an iteration takes on a cluster, with DDP and with Gossamer's graphs, and say what to use.

    gossamer plan office-1g --params 124M

    gossamer plan cluster.toml --workers 8,16,32        with a file from gossamer calibrate
    """
    console = Console()
    if fit_file is not None:
        from gossamer.runtime import fit  # scipy.optimize takes half a second to load

        for table in fit.load(fit_file):
            with console.status(f"Fitting {table.name}"):
                found = fit.fit(table)
            figure.show(fit_table(found))
        return
    if cluster is None:
        raise GossamerError(f"plan: which cluster? Give a TOML file or one of {', '.join(clusters.shipped())}")
    loaded = clusters.load(cluster)
    sizes = _sizes(workers, loaded)
    work = choose_workload(loaded, params, task, samples, compute_ms, workload)
    plans = []
    with Progress(SpinnerColumn(), TextColumn("{task.description}"), console=console, transient=True) as progress:
        line = progress.add_task("")
        for n in sizes:
            made = planning.plan(
                loaded.sized(n),
                work,
                tuple(method) if method else planning.DEFAULT,
                lambda label, n=n: progress.update(line, description=f"{n} workers: {label}"),  # type: ignore[misc]
            )
            plans.append(made)
    for made in plans:
        figure.show(plan_table(made))
        owning = [f"{row.label} {row.method.vectors}" for row in made.rows if row.method.vectors]
        if owning:
            console.print(Text(f"Vectors that a method keeps, each as large as the parameters: {'; '.join(owning)}"))
        for reason in made.left_out:
            console.print(Text(f"Left out: {reason}", style="dim"))
        console.print(Text(made.advice, style="bold"))
    figure.write(plans, figure_file)
    typer.echo(f"The figure: {figure_file}. All times are predicted; docs/runtime-model.md says how, and how far to trust it.")


def _sizes(text: str | None, cluster: Cluster) -> list[int]:
    if text is None:
        return [cluster.n]
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise GossamerError(f"--workers {text!r} is not a list of numbers; use commas, such as 8,16,32") from None


def choose_workload(
    cluster: Cluster,
    params: str | None,
    task: str | None,
    samples: int,
    compute_ms: float | None,
    name: str | None,
) -> Workload:
    given = [what for what, value in (("--params", params), ("--task", task), ("--workload", name)) if value is not None]
    if len(given) > 1:
        raise GossamerError(f"{' and '.join(given)} contradict each other; give one of them")
    if params is not None:
        return planning.estimated(cluster, planning.parameters(params), samples, compute_ms, f"{params} parameters")
    if task is not None:
        return planning.of_task(
            cluster, tasks.make(task, batch=min(samples, planning.COUNTED), blank=True), samples, compute_ms
        )
    held = {one.name: one for one in cluster.workload}
    if name is not None and name not in held:
        raise GossamerError(f"cluster {cluster.name!r} has no workload {name!r}; it has {', '.join(held) or 'none'}")
    if not held:
        raise GossamerError(f"cluster {cluster.name!r} holds no measured workload; give --params, such as 124M, or --task")
    return (held[name] if name is not None else cluster.workload[0]).made()


def plan_table(made: Plan) -> Table:
    """Fits a terminal of 80 columns."""
    table = Table(
        title=f"{made.workers} workers: {made.workload.name} on {made.cluster.name} (predicted)",
        caption="Per iteration. speed: against DDP; MB: sent by a worker; gap: how well\n"
        "a step mixes (spectral gap); use, wait: percent of the time in which\n"
        "workers compute, and wait for slower ones; the rest goes to the network",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
        show_edge=False,
    )
    table.add_column("method", min_width=21, overflow="fold")  # "one-peer-exponential," on a line of its own, if need be
    for column in ("ms", "10–90 %", "speed", "10–90 %", "MB", "gap", "use", "wait"):
        table.add_column(column, justify="right", no_wrap=True)
    for row in made.rows:
        gap = "–" if row.gap is None else "exact" if row.gap >= 1 - 1e-9 else f"{row.gap:.2g}"
        cells = (
            row.label,
            _short(row.seconds * 1e3),
            f"{_short(row.low * 1e3)}–{_short(row.high * 1e3)}",
            _gain(row.speedup),
            f"{_gain(row.speedup_low)}–{_gain(row.speedup_high)}",
            _short(row.sent / 1e6),
            gap,
            f"{100 * row.utilization:.0f}",
            f"{100 * row.waiting:.0f}",
        )
        table.add_row(*map(Text, cells), style="bold" if row.label == made.choice else None)
    return table


def _short(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def _gain(value: float) -> str:
    return f"{value:.2f}" if value < 10 else f"{value:.0f}"


def fit_table(found: Fit) -> Table:
    u = found.unknowns
    own = f"; SGP's own: {u.overhead * 1e3:.1f} ms" if u.overhead else ""
    title = (
        f"{found.table.name}. Five unknowns: {u.fixed * 1e3:.1f} ms + {u.divided * 1e3:.0f} ms / workers of computing, "
        f"{u.gbit:.1f} Gbit/s, {u.latency_us:.1f} µs, sigma {u.sigma:.3f}{own}"
    )
    table = Table(title=title)
    for column in ("workers", "method", "measured ms", "model ms", "error", ""):
        table.add_column(column, justify="left" if column in ("method", "") else "right")
    for cell in found.cells:
        values = (str(cell.workers), cell.method, f"{cell.measured:.1f}", f"{cell.predicted:.1f}", f"{cell.error:+.1%}")
        table.add_row(*map(Text, (*values, "fitted" if cell.fitted else "predicted")))
    return table


def calibrate_command(
    out: Annotated[Path, typer.Option(help="Where the cluster file goes.")] = Path("cluster.toml"),
    task: Annotated[str | None, typer.Option(help="A task of gossamer to time.", show_default=False)] = None,
    batch: Annotated[int, typer.Option(help="Samples per worker and step, with --task.")] = 32,
    module: Annotated[
        list[str] | None,
        typer.Option(
            help="Your own instead: package.module:function, which returns (model, loss) or (model, loss, optimizer), where loss() "
            "is the loss of one batch. May be repeated.",
            show_default=False,
        ),
    ] = None,
    name: Annotated[str, typer.Option(help="What to call the cluster.")] = "calibrated",
    megabytes: Annotated[float, typer.Option(help="The largest single transfer.", min=1)] = 32.0,
) -> None:
    """Measure this cluster for gossamer plan: links, contention, all-reduce, and the times of a workload. About half a minute.

    torchrun --nproc-per-node 4 -m gossamer calibrate --out cluster.toml --task digits/mlp

    Start it on all hosts with the number of processes that training will have. On CPUs, over gloo.
    """
    from gossamer.runtime import calibrate

    if task is not None and module:
        raise GossamerError("--task and --module contradict each other; give one of them")
    calibrate.check_out(out)
    with calibrate.started():
        if not module:  # a wrong --module is a mistake with any number of workers
            calibrate.refuse_alone()
        jobs = [calibrate.of_function(where) for where in module or ()] or [calibrate.of_task(task or "digits/mlp", batch)]
        first = calibrate.is_first()
        with Progress(SpinnerColumn(), TextColumn("{task.description}"), transient=True, disable=not first) as progress:
            line = progress.add_task("starting")
            console = progress.console

            def say(what: str) -> None:
                progress.update(line, description=what)
                if first and not console.is_terminal:
                    typer.echo(f"calibrate: {what}")

            measured = calibrate.calibrate(jobs, name, megabytes, say)
        if first:
            clusters.save(measured, out)
            typer.echo(f"{measured.description}\nThe cluster file: {out}. Next: gossamer plan {out}")
