"""What a bench will cost, from a timed step of each of its cells, and what it has cost."""

from __future__ import annotations

import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

from rich import box
from rich.table import Table
from rich.text import Text

from gossamer.data import machine
from gossamer.data.tasks import Task
from gossamer.dbench import search
from gossamer.dbench.cell import trainer_for
from gossamer.dbench.engines import Where, check_device
from gossamer.dbench.spec import Cell, Spec
from gossamer.dbench.store import Store
from gossamer.dbench.work import Context, one_thread
from gossamer.runtime.figure import show

_STEPS = 3  # that are timed, after one that is not


@dataclass(frozen=True)
class Cost:
    """Of the cells of a method with so many replicas, which are ``cells`` ones. In seconds of one core."""

    method: str
    replicas: int
    cells: int
    step: float
    evaluation: float
    seconds: float  # of all of them

    @property
    def hours(self) -> float:
        return self.seconds / 3600


def estimate(spec: Spec, task: Task, device: str = "cpu") -> list[Cost]:
    """A few steps of a cell, and one evaluation, count for all of its method and number of replicas."""
    found = []
    with one_thread():
        for n in sorted(spec.replicas):
            for part in spec.methods:
                cells = [cell for cell in spec.cells() if (cell.method, cell.replicas) == (part.name, n)]
                found.append(_timed(spec, cells, task, device))
    return found


def _timed(spec: Spec, cells: list[Cell], task: Task, device: str) -> Cost:
    cell = cells[0]
    trainer = trainer_for(spec, cell, task, device)
    per_epoch = trainer.batches.steps_per_epoch
    first = 1 if per_epoch > 2 else 0  # an epoch ends with an evaluation, which is timed apart
    trainer.run(until=first)
    last = min(first + _STEPS, max(per_epoch - 1, 1))
    began = time.perf_counter()
    trainer.run(until=last)
    step = (time.perf_counter() - began) / (last - first)
    began = time.perf_counter()
    trainer.value()
    evaluation = time.perf_counter() - began
    singles = min(spec.profile.singles or cell.replicas, cell.replicas)
    evaluations = (
        spec.task.epochs + singles + 2
    )  # each epoch; at the end replicas one by one, and the averaged model on two sets
    seconds = len(cells) * (trainer.steps * step + evaluations * evaluation)
    return Cost(cell.method, cell.replicas, len(cells), step, evaluation, seconds)


def show_estimate(spec: Spec, where: Where, device: str) -> None:
    """What ``gossamer bench --dry-run`` prints: of the search, if there is one, and of the grid."""
    devices = where.devices or (device,)
    for one in devices:
        check_device(one)
    jobs = where.jobs or len(where.devices) or machine.cores()
    for part in [search.grid(spec), spec.model_copy(update={"search": None})] if spec.search is not None else [spec]:
        task = Context(part, Path(), None, devices[0], 0.0).made_task()
        found = estimate(part, task, devices[0])
        show(table(found))
        total = sum(cost.hours for cost in found)
        print(f"{part.name}: about {total:.2g} processor hours; {total / jobs:.2g} hours with {jobs} cells at a time")


def table(costs: list[Cost]) -> Table:
    made = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    made.add_column("method", overflow="fold")
    for name in ("replicas", "runs", "ms per step", "processor hours"):
        made.add_column(name, justify="right")
    for cost in costs:
        numbers = (str(cost.replicas), str(cost.cells), f"{1e3 * cost.step:.3g}", f"{cost.hours:.2g}")
        made.add_row(Text(cost.method), *numbers)
    return made


def spent(store: Store) -> str:
    """Processor hours by method, in one line; empty if the store does not know them."""
    seconds: dict[str, float] = defaultdict(float)
    for run in store.runs():
        if run.processor_seconds is not None:
            seconds[run.method] += run.processor_seconds
    if not seconds:
        return ""
    each = ", ".join(f"{method} {value / 3600:.2g}" for method, value in seconds.items())
    return f"Processor hours: {sum(seconds.values()) / 3600:.2g} ({each})"
