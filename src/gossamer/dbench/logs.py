"""A running cell's numbers for a logger: at the steps of the profile, and at the end of each epoch."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator

from gossamer.dbench.spec import Cell
from gossamer.rows.profile import Profile
from gossamer.trainer import EpochRecord, Trainer

Log = Callable[[dict[str, float | str], int], object]
Loggers = Callable[[str], Log]  # of a run's name, such as ada-n16-seed0; called in the process that runs the cell


def name(cell: Cell) -> str:
    return re.sub(r"[^\w.=:+-]+", "-", str(cell).replace("n=", "n").replace("seed ", "seed"))


@contextlib.contextmanager
def following(trainer: Trainer, cell: Cell, loggers: Loggers | None) -> Iterator[None]:
    """In this block, what the trainer tells goes to a logger, too. With several processes the first one logs."""
    if loggers is None or (trainer.exchange is not None and trainer.exchange.rank):
        yield
        return
    log = loggers(name(cell))
    before = trainer.on_profile, trainer.on_epoch, trainer.on_step
    losses: list[float] = []
    graph, waited = "", 0.0

    def look(seen: Profile) -> None:
        nonlocal graph, waited
        now, numbers = trainer.now, dict[str, float | str](seen.signals())
        numbers |= {"bytes_received": trainer.bytes, "members": len(trainer.members), "connections": now.round.degree}
        if trainer.exchange is not None:
            numbers["exposed_wait_ms"] = 1e3 * (trainer.exchange.traffic.exposed - waited)
            waited = trainer.exchange.traffic.exposed
        if losses:
            numbers["train_loss"] = sum(losses) / len(losses)
            losses.clear()
        if now.graph.name != graph:
            graph = numbers["graph"] = now.graph.name
        log({f"gossamer/{key}": value for key, value in numbers.items()}, seen.step)
        if before[0] is not None:
            before[0](seen)

    def epoch(record: EpochRecord) -> None:
        numbers = {
            trainer.task.metric.name: record.value,
            "epoch": record.epoch + 1,
            "epoch_train_loss": record.train_loss,
            "lr": record.lr,
            "epoch_connections": record.degree,
            "epoch_consensus_distance": record.consensus_distance,
            "epoch_bytes_received": record.bytes,
            "seconds": record.seconds,
        }
        log({f"gossamer/{key}": value for key, value in numbers.items()}, record.step)
        if before[1] is not None:
            before[1](record)

    def step(number: int, loss: float) -> None:
        losses.append(loss)
        if before[2] is not None:
            before[2](number, loss)

    trainer.on_profile, trainer.on_epoch, trainer.on_step = look, epoch, step
    try:
        yield
    finally:
        trainer.on_profile, trainer.on_epoch, trainer.on_step = before
        if (close := getattr(log, "close", None)) is not None:
            close()
