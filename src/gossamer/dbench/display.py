"""What a person sees while the grid runs: overall progress, each running cell with loss and metric so far, time left."""

from __future__ import annotations

from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from gossamer.dbench.spec import Cell
from gossamer.dbench.store import Run


class Display:
    """Bars on a terminal; elsewhere one line per finished run; nothing when quiet."""

    def __init__(self, total: int, done: int, quiet: bool) -> None:
        self._console = Console(stderr=True, quiet=quiet, markup=False)  # names in a spec may hold brackets
        self._live = self._console.is_terminal
        self._done, self._total = done, total
        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[state]}", markup=False),
        )
        self._progress = Progress(*columns, console=self._console, transient=True, disable=not self._live)
        self._overall = self._progress.add_task("all runs", total=total, completed=done, state="")
        self._bars: dict[Cell, TaskID] = {}

    def __enter__(self) -> Display:
        if self._done:
            self.note(f"{self._done} of {self._total} runs are already there")
        self._progress.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._progress.stop()

    def note(self, text: str) -> None:
        self._progress.console.print(text, highlight=False)

    def step(self, cell: Cell, step: int, steps: int, loss: float, value: float | None) -> None:
        if cell not in self._bars:
            self._bars[cell] = self._progress.add_task(f"  {cell}", total=steps, state="")
        state = f"loss {loss:.3f}" + ("" if value is None else f", test {value:.3f}")
        self._progress.update(self._bars[cell], completed=step, state=state)

    def finished(self, cell: Cell, run: Run) -> None:
        self._done += 1
        if cell in self._bars:
            self._progress.remove_task(self._bars.pop(cell))
        self._progress.update(self._overall, completed=self._done)
        if not self._live:
            what = "diverged" if run.value is None else f"{run.value:.4f}"
            self.note(f"[{self._done}/{self._total}] {cell}: {what} ({run.seconds or 0:.1f} s)")
