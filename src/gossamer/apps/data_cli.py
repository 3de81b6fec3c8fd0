"""``gossamer data``: which data sets there are, where they were looked for, and how to get them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.table import Column, Table
from rich.text import Text

from gossamer.apps.data import catalog, download

app = typer.Typer(
    help="Data sets: where they are, and how to get them.",
    epilog="A spec may name a folder of its own: task.data. Layouts: docs/data.md",
    invoke_without_command=True,
)


@app.callback()
def list_command(context: typer.Context) -> None:
    """List the data sets: found or not, where they were looked for, how to get them."""
    if context.invoked_subcommand is not None:
        return
    table = Table("name", "what it is", Column("where", overflow="fold"), "how to get it", show_lines=True)
    for dataset in catalog.ALL:
        found = dataset.find()
        if not dataset.marks:
            where, how = Text("built in", style="green"), ""
        elif found is not None:
            where, how = Text(f"found: {found}", style="green"), ""
        else:
            where = Text("not in\n" + "\n".join(map(str, dataset.places())))
            how = dataset.advice
        what = f"{dataset.title}: {dataset.size}. Licence: {dataset.licence}"
        table.add_row(Text(dataset.name), Text(what), where, Text(how))
    console = Console()
    console.print(table)
    console.print(Text(f"Looked for in ${catalog.VARIABLE}/NAME, {catalog.cache()}/NAME and the system's places."), style="dim")


@app.command("get")
def get_command(
    name: Annotated[str, typer.Argument(metavar="NAME", help="One of the names that gossamer data lists.")],
    to: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="The folder to make; ~/.cache/gossamer/NAME if not given.", show_default=False),
    ] = None,
    source: Annotated[
        str | None,
        typer.Option(
            "--from", metavar="URL", help="Another address of the same official files: of the file, or of its folder."
        ),
    ] = None,
) -> None:
    """Download a data set, check it and put it in place.

    Stopped or broken off, it goes on where it was when the same command is given again.

    A file whose checksum is not the official one is refused, wherever it came from.
    """
    dataset = catalog.named(name)
    found = dataset.find()
    if to is None and found is not None:
        typer.echo(f"{dataset.title} is there already: {found.parent}")
        return
    folder = to if to is not None else catalog.cache() / dataset.name
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as display:
        rows: dict[str, int] = {}

        def progress(file: str, done: int, total: int | None) -> None:
            if file not in rows:
                rows[file] = display.add_task(file, total=total)
            display.update(rows[file], completed=done, total=total)  # type: ignore[arg-type]

        try:
            made = download.get(dataset, folder, source, progress)
        except KeyboardInterrupt:
            display.stop()
            typer.echo("gossamer: stopped; what came is kept, give the same command again to go on", err=True)
            raise typer.Exit(130) from None
    typer.echo(f"{dataset.title} is in {made}" + (f"; name it in a spec: task.data = {str(made)!r}" if to is not None else ""))
