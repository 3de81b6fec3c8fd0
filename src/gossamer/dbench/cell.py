"""One cell of the grid: train, record, checkpoint, finish. Killed at any moment, it goes on from its last checkpoint."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from gossamer import checkpoint
from gossamer.backends import Backend
from gossamer.dbench import machine
from gossamer.dbench.spec import Cell, Spec
from gossamer.dbench.store import Store
from gossamer.errors import GossamerError
from gossamer.profile import Profile
from gossamer.tasks import Task
from gossamer.trainer import EpochRecord, Trainer, TrainingDiverged

Report = Callable[[int, int, float, float | None], None]  # step, steps, loss, latest value


def trainer_for(spec: Spec, cell: Cell, task: Task, device: str) -> Trainer:
    return Trainer(task, replace(spec.settings(cell), device=device), spec.method(cell.method).topology)


def run_cell(
    store: Store,
    spec: Spec,
    cell: Cell,
    task: Task,
    device: str,
    checkpoint_seconds: float,
    report: Report,
    stop: Callable[[], bool],
) -> bool:
    """Returns whether the cell was finished (and not stopped)."""
    run = store.find(cell).id
    profiles: list[Profile] = []
    epochs: list[EpochRecord] = []
    trainer = trainer_for(spec, cell, task, device)
    trainer.on_profile, trainer.on_epoch = profiles.append, epochs.append
    trainer.on_step = lambda step, loss: report(
        step, trainer.steps, loss, trainer.history[-1].value if trainer.history else None
    )
    known = store.meta(f"backend:{cell.replicas}")
    if known is not None:
        trainer.replicas.backend = Backend.parse(known)
    path = store.path.parent / "checkpoints" / f"{run}.ckpt"
    if not _resume(trainer, path, store, run):
        where = machine.describe() | {"device": device}
        store.begin(run, where, str(trainer.replicas.backend), torch.get_num_threads(), trainer.replicas.slots)

    def unsaved() -> tuple[list[Profile], list[EpochRecord], list]:
        rows = (profiles.copy(), epochs.copy(), trainer.schedule.changes)
        profiles.clear()
        epochs.clear()
        return rows

    clock = _Clock(trainer, checkpoint_seconds)
    try:
        while True:
            trainer.run(stop=lambda: stop() or clock.due())
            if trainer.step == trainer.steps:
                break
            store.add(run, *unsaved())  # before the checkpoint: see store.py
            # A run that has gone wrong leaves no checkpoint; it is found out at the same step as if none had been tried.
            with contextlib.suppress(TrainingDiverged):
                trainer.save(path)
            clock.reset()
            if stop():
                return False
        result = trainer.evaluate()
        numbers: dict[str, float | int | None] = {
            "value": result.value,
            "value_mean": result.mean,
            "value_worst": result.worst,
            "value_train": result.train,
        }
        status, message = "done", None
    except TrainingDiverged as error:
        numbers = dict.fromkeys(("value", "value_mean", "value_worst", "value_train"))
        status, message = "diverged", str(error)
    rest: dict[str, float | int | None] = {
        "steps": trainer.step,
        "bytes": trainer.bytes,
        "seconds": trainer.seconds,
        "consensus_distance": trainer.history[-1].consensus_distance if trainer.history else None,
    }
    store.finish(run, status, message, numbers | rest, unsaved())
    path.unlink(missing_ok=True)
    return True


class _Clock:
    """Says when the next checkpoint is due, after one step at least."""

    def __init__(self, trainer: Trainer, seconds: float) -> None:
        self.trainer, self.seconds = trainer, seconds
        self.reset()

    def reset(self) -> None:
        self.step, self.time = self.trainer.step, time.monotonic()

    def due(self) -> bool:
        return self.trainer.step > self.step and time.monotonic() - self.time >= self.seconds


def _resume(trainer: Trainer, path: Path, store: Store, run: int) -> bool:
    """Go on from the checkpoint, if it can be read and the store holds all that it knows; else the run starts again."""
    if not path.exists():
        return False
    header = _peek(path)
    known = {e.epoch for e in store.epochs(run)}
    if header is None or not {e["epoch"] for e in header["history"]} <= known or store.run(run).status != "running":
        path.unlink()
        return False
    trainer.load(path)
    return True


def _peek(path: Path) -> dict[str, Any] | None:
    try:
        return checkpoint.load(path)[1]
    except GossamerError:
        return None  # of another version, or damaged by the disk
