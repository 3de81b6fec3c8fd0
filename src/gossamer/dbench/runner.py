"""Runs the grid of a spec, cell by cell or several side by side, with one thread each: so results do not depend on how many.

Finished cells are never repeated. One process at a time may write to an output folder.
"""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import os
import queue
import signal
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from gossamer.apps import tasks
from gossamer.data import machine
from gossamer.data.locks import lock
from gossamer.data.sampling import sampler
from gossamer.data.sources import held_out, source
from gossamer.data.tasks import Task
from gossamer.dbench import clock, logs, partition, search, signals
from gossamer.dbench.cell import Book, backend_key, book, run_cell, trainer_for
from gossamer.dbench.display import Display
from gossamer.dbench.failures import NONE
from gossamer.dbench.spec import Cell, Spec
from gossamer.dbench.store import FILE, FINISHED, Run, Store
from gossamer.errors import GossamerError
from gossamer.members.outages import Attendance
from gossamer.optim import BlockOptimizer
from gossamer.rows import batch_norm
from gossamer.rows.replicas import Replicas, refuse_too_large
from gossamer.transport.exchange import Exchange
from gossamer.transport.routes import rows_of

_BEAT = 0.1  # seconds between two progress messages of one cell


@dataclass(frozen=True)
class Outcome:
    """What a call of :func:`bench` did."""

    out: Path
    finished: int
    total: int

    @property
    def complete(self) -> bool:
        return self.finished == self.total


def bench(
    spec: Spec,
    out: Path | str,
    *,
    task: Task | None = None,
    jobs: int | None = None,
    device: str = "cpu",
    checkpoint_seconds: float = 10.0,
    quiet: bool = False,
    exchange: Exchange | None = None,
    log: logs.Loggers | None = None,
) -> Outcome:
    """Run what is not finished yet. ``task`` replaces the spec's named task by your own (in this process, one job).

    ``exchange``: the replicas of each cell are spread over its processes, all of which call this; the first one writes. ``log``: makes
    a logger of a run's name; with several jobs it must be picklable."""
    out = Path(out)
    declared, chosen = spec, None
    if spec.search is not None:
        tried = bench(
            search.grid(spec),
            out / search.FOLDER,
            task=task,
            jobs=jobs,
            device=device,
            checkpoint_seconds=checkpoint_seconds,
            quiet=quiet,
            exchange=exchange,
        )
        if not tried.complete:
            return Outcome(out, 0, len(spec.cells()))
        chosen = search.choose(spec, tried.out / FILE) if exchange is None or exchange.rank == 0 else []
        if exchange is not None:
            chosen = exchange.share(chosen)
        spec = search.tuned(spec, chosen)
    context = _Context(spec, declared, chosen, out, task, device, checkpoint_seconds, log)
    made = context.made_task()
    if exchange is not None:
        return _together(context, made, exchange, quiet)
    if jobs is not None and jobs < 1:
        raise GossamerError(f"jobs={jobs} is out of range; at least one cell runs at a time")
    with _locked(out), _one_thread():
        store, runs, pending = _open(context, made)
        wanted = jobs or (1 if task is not None or device != "cpu" else machine.cores())
        with signals.interruptible() as stop, Display(len(runs), len(runs) - len(pending), quiet) as display:
            _choose_backends(store, spec, made, pending, device, display)
            if min(wanted, len(pending)) <= 1:
                _inline(context, store, made, pending, display, stop)
            else:
                _side_by_side(context, pending, min(wanted, len(pending)), display, stop)
        finished = sum(run.status in FINISHED for run in store.runs())
        store.close()
    return Outcome(out, finished, len(runs))


def _open(context: _Context, task: Task, processes: int = 1) -> tuple[Store, list[Run], list[Cell]]:
    """The store, its runs, and the cells that are still to be run."""
    model = _check(context.spec, task, context.device, processes)
    predicted = clock.predict(context.spec, task)
    shapes = {"name": task.name, "train": source(task.train).describe(), "test": source(task.test).describe()}
    store = Store.create(context.out / FILE, context.declared, (task.metric.name, task.metric.higher_is_better), shapes)
    if context.chosen is not None:
        store.set_meta(search.KEY, context.chosen)
    if store.meta("batch_norm_layers") is None:
        store.set_meta("batch_norm_layers", len(batch_norm.layers(model)))
    partition.keep(store, context.spec, task)
    if predicted is not None:
        store.set_meta(clock.KEY, predicted)
    runs = store.runs()
    return store, runs, [r.cell for r in runs if r.status not in FINISHED]


def _together(context: _Context, task: Task, exchange: Exchange, quiet: bool) -> Outcome:
    """Every cell in all processes at once. Rank 0 has the store and the display, and tells the others what comes next."""
    p = exchange.size
    if any(name != NONE for name in context.spec.failures):
        raise GossamerError("failures: workers can leave and come back in one process only; run this spec without torchrun")
    for n in context.spec.replicas:
        rows_of(0, n, p)  # says so if it does not divide
    with contextlib.ExitStack() as stack:
        stack.enter_context(_one_thread())
        stop = stack.enter_context(signals.interruptible())
        store: Store | None = None
        runs: list[Run] = []
        pending: list[Cell] = []
        failed: str | None = None
        if exchange.rank == 0:
            try:
                stack.enter_context(_locked(context.out))
                store, runs, pending = _open(context, task, p)
            except GossamerError as error:
                failed = str(error)
        failed, total, names = exchange.share([failed, len(runs), [list(astuple(c)) for c in pending]])
        if failed:
            raise GossamerError(failed)
        display = stack.enter_context(Display(total, total - len(names), quiet or store is None))
        finished = total - len(names)
        for cell in (Cell(*name) for name in names):
            page = _page(context, store, cell, task, exchange, display)
            report = _throttled(lambda *message, cell=cell: display.step(cell, *message))
            if run_cell(page, context.spec, cell, task, context.device, context.checkpoint_seconds, report, stop, exchange):
                finished += 1
                if store is not None:
                    display.finished(cell, store.find(cell))
            if exchange.share(stop()):
                break
        return Outcome(context.out, finished, total)


def _page(context: _Context, store: Store | None, cell: Cell, task: Task, exchange: Exchange, display: Display) -> Book:
    """The same run, checkpoint folder and backend for all processes."""
    n, p = cell.replicas, exchange.size
    mine = book(store, cell, p) if store is not None else None
    run, path, backend = exchange.share([mine.run, str(mine.path), mine.backend] if mine is not None else None)
    if backend is None:
        trainer = trainer_for(context.spec, cell, task, context.device, exchange)
        if trainer.replicas.backend is None:
            display.note(f"n={n}: finding the fastest way to run {n // p} replicas in each of {p} processes")
            rows = trainer.mixer.rows
            trainer.replicas.gradients(task.loss, trainer.batches.batch(0, rows.start, len(rows)), 0)
        backend = exchange.share(str(trainer.replicas.backend))
        if store is not None:
            store.set_meta(backend_key(n, p), backend)
    return Book(store, run, Path(path), backend, context.log)


def _check(spec: Spec, task: Task, device: str, processes: int) -> nn.Module:
    """What can only be known with the task at hand, before a store is made for it. Returns the task's model."""
    try:
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise GossamerError(f"device {device!r} can't be used here: {str(error).splitlines()[0]}") from None
    one = Replicas(task.build, 1)
    refuse_too_large(one.template, max(spec.replicas) // processes, torch.device(device))
    steps = {}
    for method in spec.methods:
        for n in spec.replicas:
            settings = spec.settings(Cell(method.name, n, spec.seeds[0]))
            steps[n] = sampler(settings.partition, task.train, n, settings.batch, settings.seed).steps_per_epoch
        BlockOptimizer(settings.optimizer, one)
    for n, seed, failures in itertools.product(spec.replicas, spec.seeds, spec.failures):
        Attendance(n, spec.outages(Cell(spec.methods[0].name, n, seed, failures)), steps[n])
    return one.template


@dataclass(frozen=True)
class _Context:
    """What a worker process needs to know. ``declared``: what the person's spec says, before a search has ``chosen`` settings."""

    spec: Spec
    declared: Spec
    chosen: list[dict[str, Any]] | None
    out: Path
    task: Task | None
    device: str
    checkpoint_seconds: float
    log: logs.Loggers | None = None

    def made_task(self) -> Task:
        named = self.spec.task
        task = self.task or tasks.make(named.name, Path(named.data) if named.data else None, named.options, named.batch)
        if named.validation is None:
            return task
        train, test = held_out(task.train, named.validation)
        return replace(task, train=train, test=test)


def _choose_backends(store: Store, spec: Spec, task: Task, pending: list[Cell], device: str, display: Display) -> None:
    """The backend is timed once per number of replicas and then kept, so that a resumed run takes the same path."""
    for n in dict.fromkeys(cell.replicas for cell in pending):
        if store.meta(backend_key(n, 1)) is not None:
            continue
        cell = next(cell for cell in pending if cell.replicas == n)
        trainer = trainer_for(spec, cell, task, device)
        if trainer.replicas.backend is None:
            display.note(f"n={n}: finding the fastest way to run {n} replicas")
            trainer.replicas.gradients(task.loss, trainer.batches.batch(0), 0)
        store.set_meta(backend_key(n, 1), str(trainer.replicas.backend))


def _inline(
    context: _Context, store: Store, task: Task, pending: list[Cell], display: Display, stop: Callable[[], bool]
) -> None:
    for cell in pending:
        report = _throttled(lambda *message, cell=cell: display.step(cell, *message))
        page = book(store, cell, log=context.log)
        if run_cell(page, context.spec, cell, task, context.device, context.checkpoint_seconds, report, stop):
            display.finished(cell, store.find(cell))
        if stop():
            return


def _side_by_side(context: _Context, pending: list[Cell], jobs: int, display: Display, stop: Callable[[], bool]) -> None:
    """``jobs`` worker processes take cells in turn. They end with this process, whatever ends it."""
    spawn = multiprocessing.get_context("spawn")
    todo: Any = spawn.SimpleQueue()
    messages: Any = spawn.Queue()
    stopping = spawn.Event()
    for cell in [*pending, *[None] * jobs]:
        todo.put(cell)
    workers = [spawn.Process(target=_worker, args=(context, os.getpid(), todo, messages, stopping)) for _ in range(jobs)]
    with signals.ctrl_c_waits():
        for worker in workers:
            worker.start()
    store = Store(context.out / FILE)
    failure: str | None = None
    try:
        while any(worker.is_alive() for worker in workers) or not messages.empty():
            if stop():
                stopping.set()
            try:
                kind, cell, content = messages.get(timeout=0.2)
            except queue.Empty:
                continue
            if kind == "step":
                display.step(cell, *content)
            elif kind == "finished":
                display.finished(cell, store.find(cell))
            elif kind == "error":
                failure = failure or content
                stopping.set()
    finally:
        stopping.set()
        for worker in workers:
            worker.join(timeout=60)
            if worker.is_alive():
                worker.kill()
        store.close()
    if failure is None and not stop() and any(worker.exitcode for worker in workers):
        codes = ", ".join(str(worker.exitcode) for worker in workers)
        failure = f"a worker process ended by itself (exit codes {codes}; -9 can mean too little memory: try a smaller --jobs)"
    if failure is not None:
        raise GossamerError(failure)


def _worker(context: _Context, parent: int, todo: Any, messages: Any, stopping: Any) -> None:
    signals.die_with(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent tells us what to do
    torch.set_num_threads(1)
    cell: Cell | None = None
    try:
        task = context.made_task()
        store = Store(context.out / FILE)
        while (cell := todo.get()) is not None and not stopping.is_set():
            here = cell
            report = _throttled(lambda *message, here=here: messages.put(("step", here, message)))
            page = book(store, cell, log=context.log)
            if run_cell(page, context.spec, cell, task, context.device, context.checkpoint_seconds, report, stopping.is_set):
                messages.put(("finished", cell, None))
        store.close()
    except GossamerError as error:
        messages.put(("error", cell, f"{cell}: {error}"))
    except OSError as error:
        messages.put(("error", cell, f"{cell}: {error}; finished runs are kept"))
    except Exception:
        messages.put(("error", cell, f"{cell} failed:\n{traceback.format_exc()}"))


def _throttled(send: Callable[..., None]) -> Callable[[int, int, float, float | None], None]:
    last = 0.0

    def report(step: int, steps: int, loss: float, value: float | None) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last >= _BEAT or step == steps:
            last = now
            send(step, steps, loss, value)

    return report


@contextlib.contextmanager
def _locked(out: Path) -> Iterator[None]:
    """The lock goes with the process that holds it, however it ends."""
    path = out / "lock"
    try:
        (out / "checkpoints").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise GossamerError(f"{out} can't be made: {error.strerror}; choose another --out") from None
    try:
        file = open(path, "a+")  # noqa: SIM115  (held open as long as we run)
    except OSError as error:
        raise GossamerError(f"{out} can't be written: {error.strerror}; choose another --out") from None
    with file:
        if not lock(file):
            file.seek(0)
            raise GossamerError(f"another gossamer bench (pid {file.read().strip() or 'unknown'}) is writing to {out}")
        try:
            file.truncate(0)
            file.write(str(os.getpid()))
            file.flush()
        except OSError as error:
            raise GossamerError(f"{out} can't be written: {error.strerror}; free some space or choose another --out") from None
        yield


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
