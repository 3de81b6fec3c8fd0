"""What a worker of any engine does: one cell. What it says meanwhile, and what it is told, are small files beside its records, so that an
engine needs to do no more than to call a function somewhere."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import platform
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import cloudpickle
import torch

from gossamer.apps import tasks
from gossamer.data.sources import held_out
from gossamer.data.tasks import Task
from gossamer.dbench import logs, records
from gossamer.dbench.cell import Report, book, run_cell
from gossamer.dbench.spec import Cell, Spec
from gossamer.errors import GossamerError
from gossamer.methods import METHODS, method

_BEAT = 0.1  # seconds between two reports of one cell, and between two looks at what the bench says
_BENCH = "bench.json"


@dataclass(frozen=True)
class Context:
    """What a worker needs to know. ``store`` and ``bench``: the identities of the store and of this call of the bench."""

    spec: Spec
    out: Path
    task: Task | None
    device: str
    checkpoint_seconds: float
    log: logs.Loggers | None = None
    store: str = ""
    bench: str = ""
    methods: tuple[tuple[str, bytes], ...] = ()  # of the person's own: name, class

    def made_task(self) -> Task:
        named = self.spec.task
        task = self.task or tasks.make(named.name, Path(named.data) if named.data else None, named.options, named.batch)
        if named.validation is None:
            return task
        train, test = held_out(task.train, named.validation)
        return replace(task, train=train, test=test)

    def packed(self) -> bytes:
        """With the person's own task, as it is in this process: only our own workers get it, and unpack it."""
        try:
            return cloudpickle.dumps(replace(self, methods=_own_methods(self.spec)))
        except Exception as error:
            what = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise GossamerError(
                f"task {self.spec.task.name!r} can't be sent to workers: {what}; open files and connections in build() or in the "
                "data set's methods, or run it in this process with jobs=1"
            ) from None


@dataclass(frozen=True)
class Answer:
    """``records``: the file of a finished run, for a bench that shares no folder with its worker."""

    finished: bool
    records: bytes = b""
    error: str | None = None


def work(context: bytes, cell: Cell, run: int, backend: str | None) -> Answer:
    """Raises nothing, so an error of the engine is one of its own: this worker is lost."""
    try:
        return _work(context, cell, run, backend)
    except KeyboardInterrupt:  # where Ctrl-C reaches workers, it reaches the bench
        return Answer(False)
    except GossamerError as error:
        return Answer(False, error=f"{cell}: {error}")
    except OSError as error:
        return Answer(False, error=f"{cell}: {error}; finished runs are kept")
    except Exception:
        return Answer(False, error=f"{cell} failed:\n{traceback.format_exc()}")


_device: str | None = None  # of this worker, if its engine gives each its own


def use(device: str | None) -> None:
    global _device
    _device = device


def _work(packed: bytes, cell: Cell, run: int, backend: str | None) -> Answer:
    torch.set_num_threads(1)
    context, task = _unpacked(packed)
    folder = context.out / records.FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    here = book(context.out, context.store, run, backend, log=context.log)
    stop = _every_beat(lambda: _told_to_stop(folder, context.bench))
    if stop():
        return Answer(False)
    with reporting(context.out, run) as report:
        if not run_cell(here, context.spec, cell, task, _device or context.device, context.checkpoint_seconds, report, stop):
            return Answer(False)
    assert here.records is not None
    return Answer(True, here.records.path.read_bytes())


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """As each cell is run."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@functools.lru_cache(maxsize=1)
def _unpacked(packed: bytes) -> tuple[Context, Task]:
    """Once for all cells of this worker: the task has the data."""
    context: Context = cloudpickle.loads(packed)
    for name, made in context.methods:
        if name not in METHODS.makers:
            cloudpickle.loads(made)  # a class that is defined is known
    return context, context.made_task()


def _own_methods(spec: Spec) -> tuple[tuple[str, bytes], ...]:
    """Those that the spec uses and Gossamer does not have: in a worker no import may bring them."""
    rules = [method(part.rule(spec.algorithm)) for part in spec.methods]
    used = {type(one).name: type(one) for rule in rules for one in (rule, rule.inner)}
    own = {name: made for name, made in used.items() if made.__module__.partition(".")[0] != "gossamer"}
    return tuple((name, cloudpickle.dumps(made)) for name, made in own.items())


# --- What a worker says ---------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def reporting(out: Path, run: int, also: Callable[..., None] | None = None) -> Iterator[Report]:
    """In this block, what a cell reports can be seen by the bench and by ``gossamer watch``. ``also``: is told, too."""
    path = out / records.FOLDER / f"{run}.progress"
    where = f"{platform.node()}, pid {os.getpid()}"
    last = 0.0

    def report(step: int, steps: int, loss: float, value: float | None) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last < _BEAT and step != steps:
            return
        last = now
        with contextlib.suppress(OSError):  # the disk is full: records will say so
            _replace(path, {"step": step, "steps": steps, "loss": loss, "value": value, "worker": where})
        if also is not None:
            also(step, steps, loss, value)

    try:
        yield report
    finally:
        with contextlib.suppress(OSError):  # Windows: the bench reads it, and removes it when it begins again
            path.unlink(missing_ok=True)


def said(out: Path) -> dict[int, dict[str, Any]]:
    """By the number of the run: its last report, if it runs now."""
    found = {}
    for path in (out / records.FOLDER).glob("*.progress"):
        with contextlib.suppress(OSError, ValueError):  # gone in the meantime
            found[int(path.stem)] = json.loads(path.read_text())
    return found


# --- What the bench says --------------------------------------------------------------------------------------------------------


def tell(out: Path, bench: str, stop: bool) -> None:
    """Which bench all workers of this folder are of, and whether they are to stop. Those of an earlier bench stop by that."""
    _replace(out / records.FOLDER / _BENCH, {"pid": os.getpid(), "bench": bench, "stop": stop})


def teller(out: Path) -> int | None:
    """The process of the last bench in this folder."""
    with contextlib.suppress(OSError, ValueError, KeyError):
        return int(json.loads((out / records.FOLDER / _BENCH).read_text())["pid"])
    return None


def _told_to_stop(folder: Path, bench: str) -> bool:
    try:
        told = json.loads((folder / _BENCH).read_text())
    except (OSError, ValueError):  # another machine, which does not see the folder of the bench
        return False
    return told["stop"] or told["bench"] != bench


def _every_beat(ask: Callable[[], bool]) -> Callable[[], bool]:
    """The last answer, if it is fresh. Yes is for good."""
    last, answer = -_BEAT, False

    def asked() -> bool:
        nonlocal last, answer
        if not answer and time.monotonic() - last >= _BEAT:
            answer, last = ask(), time.monotonic()
        return answer

    return asked


def _replace(path: Path, content: dict[str, Any]) -> None:
    new = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    new.write_text(json.dumps(content))
    os.replace(new, path)
