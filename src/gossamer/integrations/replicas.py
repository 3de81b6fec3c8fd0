"""What all trainers need: the averaged model for evaluation and files, and the replicas of all workers beside a trainer's own checkpoint.

A trainer writes one model and one optimizer's state, of rank 0. Where gradients are averaged that is all there is. Otherwise the model in
the file is the mean of all, and each worker's own state is in a folder beside it, for resuming exactly.
"""

from __future__ import annotations

import contextlib
import shutil
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

from gossamer.graphs import Graph
from gossamer.methods import ALL_REDUCE, Averaging
from gossamer.parallel import DecentralizedDataParallel
from gossamer.parallel.checks import with_graph
from gossamer.schedules import Schedule, schedule


def by_epoch(graph: str | Graph | Schedule, workers: int) -> bool:
    """Whether ``epochs=`` and ``steps_per_epoch=`` are needed."""
    return schedule(with_graph(Averaging.of(graph, None)).graph, workers, (ALL_REDUCE,)).by_epoch


def differ(model: object) -> bool:
    """Whether the workers' replicas may differ."""
    return isinstance(model, DecentralizedDataParallel) and model.size > 1 and not model.averages_gradients


@contextlib.contextmanager
def averaged(*models: object) -> Iterator[None]:
    """In this block these models are their mean over the workers. All workers enter it. Inside of another such block it does nothing."""
    with contextlib.ExitStack() as stack:
        for model in models:
            if isinstance(model, DecentralizedDataParallel) and differ(model) and not model._driver.averaged:
                stack.enter_context(model.consensus())
        yield


def finish(model: DecentralizedDataParallel) -> None:
    """The end of training: each worker has the averaged model. Micro-batches that no step followed leave rows in flight."""
    if model._driver.busy:
        model._driver.idle_step()
    if differ(model):
        model.average_()


def save(model: DecentralizedDataParallel, folder: Path, write: Callable[[], None] = lambda: None) -> None:
    """All workers' states, in the place of those of another step. All workers call it. ``write``: the trainer's own file. Until it is
    written, what belongs to the one before stays."""
    if model._driver.busy:
        write()
        _warn(
            model,
            f"{folder} is not written between a forward and step() (step {model.steps}): a job that goes on from there begins with the "
            "averaged model; save after step()",
        )
        return
    model.save(folder / f"step-{model.steps}")
    write()
    if model.rank == 0:
        for other in folder.glob("step-*"):
            if other.name != f"step-{model.steps}":
                shutil.rmtree(other, ignore_errors=True)


def load(model: DecentralizedDataParallel, folder: Path, step: int | None = None) -> None:
    """What :func:`save` has written; by another number of workers, its mean. Without it the model stays as the trainer has loaded it.
    ``step``: of the trainer's own file."""
    found = sorted(folder.glob("step-*" if step is None else f"step-{step}"), key=lambda path: path.stat().st_mtime)
    if found:
        model.load(found[-1], resize="average")
    else:
        _warn(
            model,
            f"{folder} has no states of the workers: all begin with the model and the optimizer's state of the trainer's checkpoint",
        )


def _warn(model: DecentralizedDataParallel, text: str) -> None:
    if model.rank == 0:
        warnings.warn(text, stacklevel=4)
