"""The command line. Every mistake is one line on standard error and exit code 2; a traceback is a bug of ours."""

from __future__ import annotations

import json
import platform
import re
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.table import Table

import gossamer
from gossamer import graphs
from gossamer.apps import data_cli, tasks
from gossamer.dbench import compare as comparing
from gossamer.dbench import costs, engines, start
from gossamer.dbench import report as reporting
from gossamer.dbench.export import export_command
from gossamer.dbench.results import as_csv, as_table, results
from gossamer.dbench.runner import bench
from gossamer.dbench.spec import load, shipped
from gossamer.dbench.store import FILE, Store
from gossamer.dbench.watch import watch_command
from gossamer.errors import GossamerError
from gossamer.graphs import picture
from gossamer.integrations.loggers import Named
from gossamer.runtime import commands as runtime
from gossamer.runtime import doctor
from gossamer.runtime.figure import show
from gossamer.runtime.traces import trace_command

app = typer.Typer(
    help="Decentralized data-parallel training: compare it, look inside it.",
    epilog="Start with: gossamer bench quickstart. If something does not work: gossamer doctor",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
_SHOWN = 5  # runs that diverged
_DENSE = 2048  # replicas up to which n × n matrices are cheap
Folder = Annotated[Path, typer.Argument(metavar="DIR", help="An output folder of gossamer bench.")]


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"gossamer {gossamer.__version__} (torch {torch.__version__}, Python {platform.python_version()})")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None: ...


@app.command("bench")
def bench_command(
    spec: Annotated[
        str,
        typer.Argument(
            metavar="SPEC|NAME", help=f"A TOML file, or a shipped spec: {', '.join(shipped())}.", autocompletion=shipped
        ),
    ],
    changes: Annotated[
        list[str] | None,
        typer.Argument(metavar="KEY=VALUE", help="Keys of the spec with other values.", show_default=False),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Where results go. (default: runs/NAME)", show_default=False)] = None,
    jobs: Annotated[
        int | None,
        typer.Option(help="Cells that run side by side, one thread each. (default: one per core)", show_default=False),
    ] = None,
    on: Annotated[
        str, typer.Option("--on", metavar="ENGINE", help=f"Where runs are computed: {engines.KNOWN} (docs/engines.md).")
    ] = engines.HERE,
    device: Annotated[str, typer.Option(help="Where to compute: cpu, cuda …")] = "cpu",
    devices: Annotated[
        str | None,
        typer.Option(metavar="LIST", help="Several of this machine, as in cuda:0,cuda:1: a cell on each.", show_default=False),
    ] = None,
    checkpoint_seconds: Annotated[float, typer.Option(help="Save the running cells about this often.")] = 10.0,
    resume: Annotated[
        bool, typer.Option("--resume/--no-resume", help="Go on with what the output folder holds, or refuse to.")
    ] = True,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Run nothing: estimate the cost from a few steps of each cell.")
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress display.")] = False,
    log: Annotated[
        str | None,
        typer.Option(
            metavar="KIND[=WHERE]",
            help="Log each run while it trains: tensorboard[=FOLDER], wandb[=PROJECT], mlflow[=URI] or trackio[=PROJECT].",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Run the grid of a spec and write a report.

    Finished runs are never repeated: after Ctrl-C, a crash or a power cut, give the same command again and it goes on.

    KEY=VALUE changes a key of the spec for this once, as in TOML: 'seeds=[0]', task.epochs=2, methods='["ring", "ada"]'.
    Results then go to a folder of their own, whose name says what was changed. The keys: docs/spec.md.

    Under torchrun (torchrun --nproc-per-node 2 -m gossamer bench NAME) the replicas of each run are spread over its processes.

    gossamer bench quickstart

    gossamer bench quickstart 'seeds=[0]' task.epochs=2

    gossamer init fashion-mnist/mlp --out mine.toml && gossamer bench mine.toml

    Exit code: 0 if all runs are finished, 1 if some of them diverged, 130 after Ctrl-C, 2 for a mistake in the spec or this command.
    """
    read = load(spec, changes or ())
    name = " ".join([read.name, *(changes or ())])
    folder = out or Path("runs") / (re.sub(r"[^\w.-]+", "-", name).strip("-.")[:100] or "bench")
    several = tuple(devices.split(",")) if devices else ()
    if dry_run:
        costs.show_estimate(read, engines.Where(on, jobs, several), device)
        return
    if not resume and (folder / FILE).exists():
        raise GossamerError(f"{folder} holds results already, and --no-resume was given; choose another --out")
    loggers = Named(log, read.name, folder) if log else None
    exchange, device = engines.torchrun(device, jobs is not None or devices is not None or on != engines.HERE)
    outcome = bench(
        read,
        folder,
        on=on,
        jobs=jobs,
        device=device,
        devices=several,
        checkpoint_seconds=checkpoint_seconds,
        quiet=quiet,
        exchange=exchange,
        log=loggers,
    )
    if exchange is not None and exchange.rank:
        return  # the first one says it all
    diverged = []
    if outcome.finished:
        diverged = [run for run in Store(outcome.out / FILE).runs() if run.status == "diverged"]
        some = f", {len(diverged)} of them diverged" if diverged else ""
        typer.echo(f"{outcome.finished} of {outcome.total} runs are finished{some}. The report: {reporting.write(outcome.out)}")
        typer.echo(costs.spent(Store(outcome.out / FILE)))
        for run in diverged[:_SHOWN]:
            typer.echo(f"gossamer: {run.cell} diverged: {run.message}", err=True)
        if len(diverged) > _SHOWN:
            typer.echo(
                f"gossamer: and {len(diverged) - _SHOWN} more; gossamer results {outcome.out} --json has their messages",
                err=True,
            )
    if not outcome.complete:
        typer.echo("Stopped. Give the same command again to go on.", err=True)
        raise typer.Exit(130)
    if diverged:
        raise typer.Exit(1)


@app.command("report")
def report_command(folder: Folder) -> None:
    """Write report.html again from what the folder holds."""
    typer.echo(str(reporting.write(folder)))


@app.command("results")
def results_command(
    folder: Folder,
    as_json: Annotated[bool, typer.Option("--json", help="A JSON list, one object per run.")] = False,
    csv: Annotated[bool, typer.Option("--csv", help="Comma-separated, one line per run.")] = False,
) -> None:
    """Print one row per run: a table, JSON or CSV. The keys are documented in docs/results.md."""
    if as_json and csv:
        raise GossamerError("results: --json or --csv, not both")
    store = Store(folder / FILE)
    rows = results(store)
    if as_json:
        typer.echo(json.dumps(rows, indent=1, allow_nan=False))
    elif csv:
        typer.echo(as_csv(rows), nl=False)
    else:
        show(as_table(rows, with_failures=bool(store.spec().failures)))


@app.command("compare")
def compare_command(first: Folder, second: Folder) -> None:
    """Show what differs between two outputs of the same task, method by method, and whether that is more than noise."""
    show(comparing.table(Store(first / FILE), Store(second / FILE)))


@app.command("graph")
def graph_command(
    name: Annotated[str, typer.Argument(help="A graph with its parameters, such as ring or lattice:k=10.")],
    n: Annotated[int, typer.Option("-n", help="Replicas.")] = 16,
    picture_file: Annotated[
        Path | None, typer.Option("--picture", help="Where the SVG goes. (default: runs/NAME-N.svg)", show_default=False)
    ] = None,
) -> None:
    """Print a graph's properties and draw it."""
    graph = graphs.parse(name, n)
    table = Table(show_header=False)
    one = graph.cost(1_000_000) / 1e6
    table.add_row("graph", f"{graph.name}, n={n}")
    table.add_row("what it is", graphs.describe(graph.name.partition(":")[0]))
    table.add_row("period", f"{graph.period} round{'s' if graph.period > 1 else ''}")
    table.add_row("connections", f"{graph.mean_degree():g} at a time")
    gap = (
        f"{graph.spectral_gap():.4g} (1: the exact mean after one period, 0: never)"
        if n <= _DENSE
        else f"not computed above n={_DENSE}"
    )
    table.add_row("spectral gap", gap)
    table.add_row("doubly stochastic", "yes: averaging keeps the mean" if graph.is_doubly_stochastic() else "no")
    table.add_row(
        "bytes per step", f"{one:.3g} model sizes per replica (all-reduce: {graphs.complete(n).cost(1_000_000) / 1e6:.3g})"
    )
    show(table)
    if picture.can_draw(graph):
        path = picture_file or Path(f"runs/{name.replace(':', '-').replace('=', '').replace(',', '-')}-{n}.svg")
        try:
            if picture_file is None:
                path.parent.mkdir(exist_ok=True)
            path.write_text(picture.svg(graph, size=600), encoding="utf-8")
        except OSError as error:
            raise GossamerError(f"{path} can't be written: {error.strerror}") from None
        typer.echo(f"A picture of it: {path}")
    else:
        typer.echo(f"n={n} is too large to draw.")


@app.command("tasks")
def tasks_command() -> None:
    """List the tasks that a spec can name, with their options and what these are by default."""
    for name in tasks.names():
        options = ", ".join(f"{key} = {json.dumps(value)}" for key, value in tasks.defaults(name).items() if value is not None)
        typer.echo(f"{name:<22}{options}")
    typer.echo("Of all: train and test, the number of samples (or tokens) to use. In a spec: [task] options = { … }")


@app.command("launch", context_settings={"allow_interspersed_args": False, "ignore_unknown_options": True})
def launch_command(
    script: Annotated[str, typer.Argument(metavar="SCRIPT", help="A Python file, or -m MODULE, or any program.")],
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="[ARGS]…", help="Its own arguments.", show_default=False)
    ] = None,
    workers: Annotated[int, typer.Option("-n", help="Workers on this host.")] = 2,
    restart: Annotated[int, typer.Option(help="Start each worker that fails again, up to this many times.")] = 0,
    min_workers: Annotated[
        int | None,
        typer.Option(
            help="Workers of this host that must finish for exit code 0. (default: half of them, rounded up)",
            show_default=False,
        ),
    ] = None,
    evict_after: Annotated[float, typer.Option(help="Seconds without a heartbeat after which a worker is given up.")] = 10.0,
    address: Annotated[
        str,
        typer.Option(help="HOST:PORT where the store listens. Several hosts: an address of the first one, the same for all."),
    ] = "127.0.0.1:0",
    nodes: Annotated[int, typer.Option(help="Hosts. The command is given on each of them, with the same -n.")] = 1,
    node: Annotated[int, typer.Option(help="Which of them this is, from 0.")] = 0,
    join: Annotated[bool, typer.Option("--join", help="These are new workers of a job that runs at --address.")] = False,
) -> None:
    """Start workers on this host and keep the survivors.

    As torchrun does, each process gets RANK, WORLD_SIZE, MASTER_ADDR …, so a script runs unchanged. A worker that dies or hangs is left
    out, and the others go on.

    With --restart it comes back as long as another worker trains, on any host, and takes over the state of one of them. If a worker dies
    before model.gossip() has been called, there is nothing to join: then all workers of the job are started again.

    Exit code: 0 if at least --min-workers workers of this host have finished with exit code 0, at their last start. Otherwise the code of
    the first one that failed, or the number of the signal that killed it. 130 after Ctrl-C, 2 for a mistake in this command.

    Example: gossamer launch -n 4 --restart 3 train.py --epochs 10
    """
    from gossamer.members.launch import Job, Launcher, command_for

    command = command_for(script, arguments or [])
    outcome = Launcher(Job(command, workers, restart, evict_after, address, nodes, node, join, min_workers)).run()
    raise typer.Exit(outcome.exit_code)


@app.command("init")
def init_command(
    task: Annotated[
        str, typer.Argument(metavar="[TASK]", help="What to train; gossamer tasks lists them.", autocompletion=tasks.names)
    ] = "digits/mlp",
    out: Annotated[
        Path | None, typer.Option(help="The file to write. (default: TASK.toml, / as -)", show_default=False)
    ] = None,
) -> None:
    """Write a spec to begin with: one for a task, that runs as it is, and says of each key what it means.

    gossamer init

    gossamer init cifar10/resnet8 --out mine.toml
    """
    file = out or Path(task.replace("/", "-") + ".toml")
    text = start.spec_for(task, file.stem)
    if file.exists():
        raise GossamerError(f"{file} is there already; choose another --out")
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise GossamerError(f"{file} can't be written: {error.strerror}") from None
    typer.echo(f"{file} is a spec for {task}. Run it: gossamer bench {file}")
    missing = start.missing_data(task)
    if missing:
        typer.echo(f"Its data are not here yet: {missing}")


@app.command("doctor")
def doctor_command() -> None:
    """Try what Gossamer needs, and say what works on this machine, what does not, and what to do about it.

    The exit code is 1 if training can't work; what is only good to have (root for the lab, data sets, a browser) does not count.

    gossamer doctor
    """
    found = doctor.examine()
    for finding in found:
        typer.echo(str(finding))
    if any(finding.state == "broken" for finding in found):
        raise typer.Exit(1)


app.command("export")(export_command)
app.command("watch")(watch_command)
app.command("trace")(trace_command)
app.command("plan")(runtime.plan_command)
app.command("calibrate")(runtime.calibrate_command)
app.add_typer(data_cli.app, name="data")
lab_app = typer.Typer(help="Linux only: several hosts with limited links, on this one machine.", no_args_is_help=True)
app.add_typer(lab_app, name="lab")


@lab_app.command("run", context_settings={"allow_interspersed_args": False})
def lab_run_command(
    command: Annotated[
        list[str], typer.Argument(metavar="COMMAND", help="What to run, such as: python train.py. It may follow --.")
    ],
    hosts: Annotated[int, typer.Option(help="Hosts, each in a network namespace of its own.")] = 2,
    rate: Annotated[
        str | None,
        typer.Option(
            help="What a host can send: 1gbit for all, or 1gbit,200mbit one by one. (default: no limit)", show_default=False
        ),
    ] = None,
    workers_per_host: Annotated[int, typer.Option(help="Processes on each host.")] = 1,
    keep_going: Annotated[bool, typer.Option("--keep-going", help="When one fails, leave the others alone.")] = False,
) -> None:
    """Run a command on every host of a small network, as root.

    Each process gets RANK, WORLD_SIZE, MASTER_ADDR …, so init_process_group("gloo") just works. torchrun is started once per host.
    """
    from gossamer.runtime.lab import Lab

    try:
        with Lab(hosts, rate) as lab:
            result = lab.run(command, workers_per_host=workers_per_host, keep_going=keep_going)
    except KeyboardInterrupt:
        typer.echo("gossamer: interrupted; everything in the lab has ended", err=True)
        raise typer.Exit(130) from None
    sums = "; ".join(f"host {h} {c.sent_bytes / 1e6:.1f} / {c.received_bytes / 1e6:.1f}" for h, c in enumerate(result.traffic))
    typer.echo(f"{result.seconds:.1f} s. MB sent / received: {sums}")
    if result.first_failed is not None:
        typer.echo(f"gossamer: [{result.names[result.first_failed]}] failed first, with exit code {result.exit_code}", err=True)
        raise typer.Exit(result.exit_code)


def main() -> None:
    try:
        app()
    except GossamerError as error:
        typer.echo(f"gossamer: {error}", err=True)
        raise SystemExit(2) from None
    except (KeyboardInterrupt, SystemExit) as end:
        # typer makes a quiet exit of Ctrl-C, as if a command had ended so by itself.
        if isinstance(end, SystemExit) and not isinstance(getattr(end.__context__, "__cause__", None), KeyboardInterrupt):
            raise
        typer.echo("gossamer: interrupted; finished runs are kept", err=True)
        raise SystemExit(130) from None
