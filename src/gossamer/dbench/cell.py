"""One cell of the grid: train, record, checkpoint, finish. Killed at any moment, it goes on from its last checkpoint."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from gossamer.checkpoints import checkpoint
from gossamer.data import machine
from gossamer.data.tasks import Task
from gossamer.dbench import clock, logs
from gossamer.dbench.records import FOLDER, Number, RecordFile, Rows
from gossamer.dbench.spec import Cell, Spec
from gossamer.errors import TrainingDiverged
from gossamer.rows.backends import Backend
from gossamer.trainer import Trainer
from gossamer.transport.exchange import Exchange

Report = Callable[[int, int, float, float | None], None]  # step, steps, loss, latest value


def trainer_for(spec: Spec, cell: Cell, task: Task, device: str, exchange: Exchange | None = None) -> Trainer:
    settings = replace(spec.settings(cell), device=device)
    return Trainer(task, settings, clock.topology(spec, spec.method(cell.method), task, cell.replicas), exchange=exchange)


def timed_backend(spec: Spec, cell: Cell, task: Task, device: str) -> str:
    """The fastest way to run the replicas of a cell, by a step of a trainer that is not used for more."""
    trainer = trainer_for(spec, cell, task, device)
    if trainer.replicas.backend is None:
        trainer.replicas.gradients(task.loss, trainer.batches.batch(0), 0)
    return str(trainer.replicas.backend)


def run_cell(
    book: Book,
    spec: Spec,
    cell: Cell,
    task: Task,
    device: str,
    checkpoint_seconds: float,
    report: Report,
    stop: Callable[[], bool],
    exchange: Exchange | None = None,
    note: str | None = None,
) -> bool:
    """Returns whether the cell was finished (and not stopped). With several processes all of them call it, and only the first
    one writes records. ``note``: why the run begins anew."""
    if exchange is None and book.finished():
        return True  # by a worker whose bench was gone by then
    rows = Rows()
    trainer = trainer_for(spec, cell, task, device, exchange)
    trainer.on_profile, trainer.on_epoch = rows.profiles.append, rows.epochs.append
    trainer.on_step = lambda step, loss: report(
        step, trainer.steps, loss, trainer.history[-1].value if trainer.history else None
    )
    if every := spec.profile.every:
        # At the steps of the profile: what a method notes in each step would be more rows than it is worth.
        trainer.now.on_note = lambda step, noted: rows.numbers.extend(
            Number(step, *one) for one in noted.items() if step % every == 0
        )
    if book.backend is not None:
        trainer.replicas.backend = Backend.parse(book.backend)
    resumed, damage = _resume(trainer, book)
    if damage is not None:  # the trainer may hold some of it
        return run_cell(book, spec, cell, task, device, checkpoint_seconds, report, stop, exchange, damage)
    if not resumed:
        if trainer.replicas.backend is None and exchange is None:  # the bench has no such device
            trainer.replicas.backend = Backend.parse(timed_backend(spec, cell, task, device))
        where = machine.describe() | {"device": device} | ({"processes": exchange.size} if exchange else {})
        book.write(RecordFile.begin, where, str(trainer.replicas.backend), torch.get_num_threads(), trainer.replicas.slots)
        if note is not None:
            book.write(RecordFile.note, "checkpoint", note)

    def unsaved() -> Rows:
        found = Rows(rows.profiles.copy(), rows.epochs.copy(), trainer.schedule.changes, rows.numbers.copy())
        for some in (rows.profiles, rows.epochs, rows.numbers):
            some.clear()
        return found

    pause = _Pause(trainer, checkpoint_seconds)
    with logs.following(trainer, cell, book.log):
        try:
            while True:
                trainer.run(stop=lambda: stop() or pause.due())
                if trainer.step == trainer.steps:
                    break
                book.write(RecordFile.add, unsaved())  # before the checkpoint, so that the file holds all that it knows
                # A run that has gone wrong leaves no checkpoint; it is found out at the same step as if none had been tried.
                with contextlib.suppress(TrainingDiverged):
                    trainer.save(book.path)
                pause.reset()
                if trainer.agreed(stop()):
                    return False
            result = trainer.evaluate_unless(stop, spec.profile.singles)
            if result is None:  # trained, and evaluated next time
                book.write(RecordFile.add, unsaved())
                trainer.save(book.path)
                return False
            status, message = "done", None
        except TrainingDiverged as error:
            result, status, message = None, "diverged", str(error)
    final = {
        "value": result and result.value,
        "value_mean": result and result.mean,
        "value_worst": result and result.worst,
        "value_spread": result and result.spread,
        "value_own": result and result.own,
        "value_train": result and result.train,
        "steps": trainer.step,
        "bytes": trainer.bytes,
        "seconds": trainer.seconds,
        "consensus_distance": trainer.history[-1].consensus_distance if trainer.history else None,
    }
    book.write(RecordFile.finish, status, message, final, unsaved())
    checkpoint.remove(book.path)
    return True


@dataclass(frozen=True)
class Book:
    """Where one run is written down: its checkpoint, its file of records, its logger. A process that is not the first has no records."""

    path: Path
    records: RecordFile | None
    backend: str | None
    log: logs.Loggers | None = None

    def finished(self) -> bool:
        record = self.records.read() if self.records is not None else None
        return record is not None and record.finished

    def trusts(self, progress: dict[str, Any]) -> bool:
        """Whether the records hold all that a checkpoint knows."""
        if self.records is None:
            return True
        record = self.records.read()
        if record is None or record.finished:
            return False
        return {e["epoch"] for e in progress["history"]} <= {e.epoch for e in record.rows.epochs}

    def write(self, how: Callable[..., None], *what: Any) -> None:
        """``how``: a method of the file."""
        if self.records is not None:
            how(self.records, *what)


def book(out: Path, store: str, run: int, backend: str | None, processes: int = 1, log: logs.Loggers | None = None) -> Book:
    """In one process; with several, rank 0 tells the others what to write on theirs. ``store``: its identity."""
    name = f"{run}.ckpt" if processes == 1 else f"{run}.of-{processes}"
    return Book(out / "checkpoints" / name, RecordFile(records_path(out, run), store), backend, log)


def records_path(out: Path, run: int) -> Path:
    return out / FOLDER / f"{run}.records"


def backend_key(replicas: int, processes: int) -> str:
    return f"backend:{replicas}" if processes == 1 else f"backend:{replicas}/{processes}"


class _Pause:
    """Says when the next checkpoint is due, after one step at least."""

    def __init__(self, trainer: Trainer, seconds: float) -> None:
        self.trainer, self.seconds = trainer, seconds
        self.reset()

    def reset(self) -> None:
        self.step, self.time = self.trainer.step, time.monotonic()

    def due(self) -> bool:
        return self.trainer.step > self.step and time.monotonic() - self.time >= self.seconds


def _resume(trainer: Trainer, book: Book) -> tuple[bool, str | None]:
    """Go on from the checkpoint, if it can be read and the records hold all that it knows; else the run starts again. Returns whether
    it was loaded, and what is wrong with a checkpoint that can't be."""
    if trainer.exchange is None and not book.path.exists():
        return False, None
    try:
        if trainer.load(book.path, book.trusts):
            return True, None
    except checkpoint.Unreadable as error:  # damaged by the disk, or of another version
        return False, f"{error}; it is kept as {checkpoint.set_aside(book.path).name}, and the run begins anew"
    checkpoint.remove(book.path)
    return False, None
