"""Runs the grid of a spec, cell by cell or several side by side on an engine, with one thread each: so results do not depend on how many.

Finished cells are never repeated. One process at a time may write to an output folder.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, Future, wait
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import Any

import filelock
import torch
from torch import nn

from gossamer.checkpoints import checkpoint
from gossamer.data import machine
from gossamer.data.sampling import sampler
from gossamer.data.sources import source
from gossamer.data.tasks import Task
from gossamer.dbench import clock, engines, logs, partition, records, search, signals, work
from gossamer.dbench.cell import Book, Report, backend_key, book, run_cell, timed_backend, trainer_for
from gossamer.dbench.display import Display
from gossamer.dbench.failures import NONE
from gossamer.dbench.spec import Cell, Spec
from gossamer.dbench.store import FILE, FINISHED, Run, Store
from gossamer.dbench.work import Context
from gossamer.errors import GossamerError
from gossamer.members.outages import Attendance
from gossamer.optim import BlockOptimizer
from gossamer.rows import batch_norm
from gossamer.rows.replicas import Replicas, refuse_too_large
from gossamer.transport.exchange import Exchange
from gossamer.transport.routes import rows_of

_LOOK = 0.2  # seconds between two looks at what workers say
_TRIES = 3  # of a cell whose worker is lost


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
    on: str | Executor = engines.HERE,
    jobs: int | None = None,
    device: str = "cpu",
    devices: Sequence[str] = (),
    checkpoint_seconds: float = 10.0,
    quiet: bool = False,
    exchange: Exchange | None = None,
    log: logs.Loggers | None = None,
) -> Outcome:
    """Run what is not finished yet. ``task`` replaces the spec's named task by your own; unless ``jobs`` or ``on`` say more, it runs in
    this process.

    ``on``: where cells run, ``"local"`` or an executor of your own, whose workers are processes (or one thread). ``jobs``: so many cells
    side by side on this machine; ``devices``: they take these in turn. ``exchange``: the replicas of each cell are spread over its
    processes, all of which call this; the first one writes. ``log``: makes a logger of a run's name."""
    out = Path(out)
    declared, chosen = spec, None
    if spec.search is not None:
        tried = bench(
            search.grid(spec),
            out / search.FOLDER,
            task=task,
            on=on,
            jobs=jobs,
            device=device,
            devices=devices,
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
    device, where = devices[0] if devices else device, engines.Where(on, jobs, tuple(devices))
    where.check_package()
    if where.here:
        for one in devices or [device]:
            engines.check_device(one)
    context = Context(spec, out.absolute(), task, device, checkpoint_seconds, log, bench=uuid.uuid4().hex)
    made = context.made_task()
    if exchange is not None:
        return _together(_Asked(out, declared, chosen), context, made, exchange, quiet)
    default = 1 if task is not None or device != "cpu" else machine.cores()
    with _locked(out, context.bench), work.one_thread():
        grid = _Grid.opened(_Asked(out, declared, chosen), context, made)
        total, left = len(grid.runs), len(grid.pending)
        with signals.interruptible() as stop, Display(total, total - left, quiet) as display:
            if where.here or device == "cpu":
                grid.choose_backends(made, display)
            with where.executor(default, left, grid.context) as executor:
                if executor is None:
                    _in_this_process(grid, made, display, stop)
                else:
                    _on_engine(grid, executor, display, stop)
        finished = sum(run.status in FINISHED for run in grid.store.runs())
        grid.store.close()
    return Outcome(out, finished, total)


@dataclass(frozen=True)
class _Asked:
    """``declared``: what the person's spec says, before a search has ``chosen`` settings."""

    out: Path
    declared: Spec
    chosen: list[dict[str, Any]] | None


@dataclass(frozen=True)
class _Grid:
    """The store, its runs when it was opened, and the cells that are still to be run. Only this process writes the store."""

    context: Context
    store: Store
    runs: dict[Cell, Run]
    pending: list[Cell]

    @classmethod
    def opened(cls, asked: _Asked, context: Context, task: Task, processes: int = 1) -> _Grid:
        spec = context.spec
        model = _check(spec, task, context.device, processes)
        predicted = clock.predict(spec, task)
        shapes = {"name": task.name, "train": source(task.train).describe(), "test": source(task.test).describe()}
        store = Store.create(asked.out / FILE, asked.declared, (task.metric.name, task.metric.higher_is_better), shapes)
        if asked.chosen is not None:
            store.set_meta(search.KEY, asked.chosen)
        if store.meta("batch_norm_layers") is None:
            store.set_meta("batch_norm_layers", len(batch_norm.layers(model)))
        partition.keep(store, spec, task)
        if predicted is not None:
            store.set_meta(clock.KEY, predicted)
        runs = {run.cell: run for run in store.runs()}
        grid = cls(replace(context, store=store.identity()), store, runs, [])
        for cell, run in runs.items():
            if run.status not in FINISHED and not grid.take(cell):
                grid.pending.append(cell)
        return grid

    def book(self, cell: Cell, processes: int = 1) -> Book:
        context, backend = self.context, self.backend(cell.replicas, processes)
        return book(context.out, context.store, self.runs[cell].id, backend, processes, context.log)

    def backend(self, replicas: int, processes: int = 1) -> str | None:
        return self.store.meta(backend_key(replicas, processes))

    def take(self, cell: Cell, data: bytes | None = None) -> bool:
        """A finished run into the store, from its file or from what a worker has sent of it."""
        here = self.book(cell)
        assert here.records is not None
        record = here.records.read() if data is None else here.records.parse(data)
        if record is None or not record.finished:
            return False
        self.store.take(self.runs[cell].id, record)
        with contextlib.suppress(OSError):  # Windows: another process reads it; a finished run needs it no more
            here.records.path.unlink(missing_ok=True)
            checkpoint.remove(here.path)
            for left in here.path.parent.glob(f"{here.path.name}.*.tmp"):  # by a worker that was killed while it saved
                left.unlink(missing_ok=True)
        return True

    def choose_backends(self, task: Task, display: Display) -> None:
        """The backend is timed once per number of replicas and then kept, so that a resumed run takes the same path."""
        spec = self.context.spec
        for n in dict.fromkeys(cell.replicas for cell in self.pending):
            if self.backend(n) is not None:
                continue
            cell = next(cell for cell in self.pending if cell.replicas == n)
            if spec.backend == "auto":
                display.note(f"n={n}: finding the fastest way to run {n} replicas")
            self.store.set_meta(backend_key(n, 1), timed_backend(spec, cell, task, self.context.device))


def _in_this_process(grid: _Grid, task: Task, display: Display, stop: Callable[[], bool]) -> None:
    context = grid.context
    for cell in grid.pending:
        run, here = grid.runs[cell].id, grid.book(cell)
        grid.store.mark_running(run)
        with work.reporting(context.out, run, functools.partial(display.step, cell)) as report:
            finished = run_cell(here, context.spec, cell, task, context.device, context.checkpoint_seconds, report, stop)
        if finished and grid.take(cell):
            display.finished(cell, grid.store.run(run))
        if stop():
            return


def _on_engine(grid: _Grid, executor: Executor, display: Display, stop: Callable[[], bool]) -> None:
    """All cells at once: the engine has the queue. A cell whose worker is lost goes on from its checkpoint in another one. The other cells
    finish before a cell that is given up is an error; any other error stops all."""
    context, packed = grid.context, grid.context.packed()
    cells = {run.id: cell for cell, run in grid.runs.items()}
    lost, began = Counter[Cell](), set[int]()
    running: dict[Future[work.Answer], Cell] = {}
    failure: str | None = None
    given_up: list[str] = []
    stopping = False

    def submit(cell: Cell) -> None:
        try:
            future = executor.submit(work.work, packed, cell, grid.runs[cell].id, grid.backend(cell.replicas))
        except RuntimeError as error:
            raise GossamerError(f"{cell} can't be given to a worker: {error}") from None
        running[future] = cell

    try:
        for cell in grid.pending:
            submit(cell)
        while running:
            done, _ = wait(running, _LOOK, FIRST_COMPLETED)
            for run, said in work.said(context.out).items():
                if run not in cells:  # a file of another store
                    continue
                display.step(cells[run], said["step"], said["steps"], said["loss"], said["value"])
                if run not in began:
                    began.add(run)
                    grid.store.mark_running(run)
            for future in done:
                cell = running.pop(future)
                answer = _answer(future)
                if isinstance(answer, GossamerError):  # the engine's own: no other try would help
                    failure = failure or str(answer)
                elif isinstance(answer, Exception):
                    lost[cell] += 1
                    if lost[cell] < _TRIES and not stopping:
                        display.note(
                            f"{cell}: its worker is lost ({answer or type(answer).__name__}); the cell goes on in another one"
                        )
                        submit(cell)
                    elif not stopping:
                        given_up.append(
                            f"{cell}: its worker ended by itself {_TRIES} times ({answer or type(answer).__name__}); "
                            "that can mean too little memory: try fewer cells side by side"
                        )
                elif answer.error is not None:
                    failure = failure or answer.error
                elif answer.finished and grid.take(cell, answer.records):
                    display.finished(cell, grid.store.run(grid.runs[cell].id))
            if not stopping and (failure is not None or stop()):
                stopping = True
                _stop_workers(context)
                for future, cell in list(running.items()):
                    if grid.runs[cell].id not in began and future.cancel():
                        del running[future]
    finally:
        _stop_workers(context)
    if failure is not None or given_up:
        raise GossamerError(failure or given_up[0])


def _stop_workers(context: Context) -> None:
    with contextlib.suppress(OSError):  # the disk is full: they find out by themselves
        work.tell(context.out, context.bench, stop=True)


def _answer(future: Future[work.Answer]) -> work.Answer | Exception:
    """The cell's, or what the engine says of a worker that is lost."""
    try:
        return future.result()
    except Exception as error:
        return error


def _together(asked: _Asked, context: Context, task: Task, exchange: Exchange, quiet: bool) -> Outcome:
    """Every cell in all processes at once. Rank 0 has the store and the display, and tells the others what comes next."""
    p = exchange.size
    if any(name != NONE for name in context.spec.failures):
        raise GossamerError("failures: workers can leave and come back in one process only; run this spec without torchrun")
    for n in context.spec.replicas:
        rows_of(0, n, p)  # says so if it does not divide
    with contextlib.ExitStack() as stack:
        stack.enter_context(work.one_thread())
        stop = stack.enter_context(signals.interruptible())
        grid: _Grid | None = None
        failed: str | None = None
        if exchange.rank == 0:
            try:
                stack.enter_context(_locked(asked.out, context.bench))
                grid = _Grid.opened(asked, context, task, p)
            except GossamerError as error:
                failed = str(error)
        mine = (len(grid.runs), [list(astuple(c)) for c in grid.pending]) if grid is not None else (0, [])
        failed, total, names = exchange.share([failed, *mine])
        if failed:
            raise GossamerError(failed)
        display = stack.enter_context(Display(total, total - len(names), quiet or grid is None))
        finished = total - len(names)
        for cell in (Cell(*name) for name in names):
            page = _page(context, grid, cell, task, exchange, display)
            with contextlib.ExitStack() as reports:
                report: Report = lambda *message: None  # noqa: E731
                if grid is not None:
                    run = grid.runs[cell].id
                    grid.store.mark_running(run)
                    report = reports.enter_context(work.reporting(context.out, run, functools.partial(display.step, cell)))
                done = run_cell(
                    page, context.spec, cell, task, context.device, context.checkpoint_seconds, report, stop, exchange
                )
            finished += done
            if done and grid is not None and grid.take(cell):
                display.finished(cell, grid.store.run(run))
            if exchange.share(stop()):
                break
        return Outcome(asked.out, finished, total)


def _page(context: Context, grid: _Grid | None, cell: Cell, task: Task, exchange: Exchange, display: Display) -> Book:
    """The same checkpoint folder and backend for all processes."""
    n, p = cell.replicas, exchange.size
    mine = grid.book(cell, p) if grid is not None else None
    path, backend = exchange.share([str(mine.path), mine.backend] if mine is not None else None)
    if backend is None:
        trainer = trainer_for(context.spec, cell, task, context.device, exchange)
        if trainer.replicas.backend is None:
            display.note(f"n={n}: finding the fastest way to run {n // p} replicas in each of {p} processes")
            rows = trainer.mixer.rows
            trainer.replicas.gradients(task.loss, trainer.batches.batch(0, rows.start, len(rows)), 0)
        backend = exchange.share(str(trainer.replicas.backend))
        if grid is not None:
            grid.store.set_meta(backend_key(n, p), backend)
    return Book(Path(path), mine.records if mine is not None else None, backend, context.log)


def _check(spec: Spec, task: Task, device: str, processes: int) -> nn.Module:
    """What can only be known with the task at hand, before a store is made for it. Returns the task's model."""
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


@contextlib.contextmanager
def _locked(out: Path, bench: str) -> Iterator[None]:
    """The lock goes with the process that holds it, however it ends."""
    try:
        for folder in ("checkpoints", records.FOLDER):
            (out / folder).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise GossamerError(f"{out} can't be made: {error.strerror}; choose another --out") from None
    lock = filelock.FileLock(out / "lock")
    try:
        lock.acquire(timeout=0)
        work.tell(out, bench, stop=False)
    except filelock.Timeout:
        raise GossamerError(f"another gossamer bench (pid {work.teller(out) or 'unknown'}) is writing to {out}") from None
    except OSError as error:
        raise GossamerError(f"{out} can't be written: {error.strerror}; free some space or choose another --out") from None
    try:
        for left in (out / records.FOLDER).glob("*.progress*"):
            with contextlib.suppress(OSError):  # Windows: gossamer watch reads it
                left.unlink(missing_ok=True)  # by a worker that was killed
        yield
    finally:
        lock.release()
