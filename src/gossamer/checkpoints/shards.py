"""Checkpoints of a job of several workers: one file per worker and step, and a job that was killed goes on from the last step
that all of them have on disk, readable and right."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gossamer.checkpoints import checkpoint, snapshot
from gossamer.checkpoints.background import Writer
from gossamer.checkpoints.checkpoint import Unreadable
from gossamer.checkpoints.snapshot import AVERAGED, INSTEAD, Layout, Snapshot
from gossamer.errors import GossamerError
from gossamer.transport.exchange import Exchange

_KEPT = 2  # steps on disk: the new one, and the one before in case a worker did not get that far, or its file is damaged later
_LISTED = 16
_RESIZE = "let the library go on with another number of workers, model.load(…, resize='average')"


def save(
    folder: Path,
    step: int,
    parts: dict[str, Any],
    setup: Mapping[str, Any],
    averaged: dict[str, Tensor] | None,
    exchange: Exchange | None,
) -> None:
    """Returns when all workers have written theirs. Older steps are removed then."""
    place, size = (exchange.rank, exchange.size) if exchange else (0, 1)
    write(folder, step, place, size, parts, setup, averaged)
    if exchange is not None:
        exchange.gather(torch.zeros(1), "save()")
    prune(folder, step, size)


def write(
    folder: Path,
    step: int,
    place: int,
    size: int,
    parts: dict[str, Any],
    setup: Mapping[str, Any],
    averaged: dict[str, Tensor] | None = None,
) -> None:
    """The file of the worker at ``place`` of ``size``, and the averaged model if it is given."""
    remove_later(folder, step)
    snapshot.save(path_of(folder, step, place, size), Snapshot(step, setup, parts))
    if averaged is not None:
        checkpoint.write(folder / AVERAGED, averaged, {"step": str(step)})


def remove_later(folder: Path, step: int) -> None:
    """Later steps are of another run that this one did not go on from. Removed first: load() would take them for the newest."""
    for file in _files(folder):
        if file.step > step:
            file.path.unlink(missing_ok=True)


def write_later(
    writer: Writer, folder: Path, step: int, place: int, size: int, parts: dict[str, Any], setup: Mapping[str, Any]
) -> None:
    """As :func:`write`, by a thread: what is written is copied now, and what can't be is refused now."""
    tensors, listed = snapshot.pack(parts)
    path, metadata = (
        path_of(folder, step, place, size),
        checkpoint.metadata({"step": step, "setup": dict(setup), "parts": listed}),
    )
    copies = writer.copy(tensors)

    def work() -> None:
        remove_later(folder, step)
        checkpoint.write(path, copies, metadata)

    writer.start(work)


def prune(folder: Path, step: int, size: int) -> None:
    """When all of ``size`` workers have written ``step``: remove what is older than it and the step before it, of any number of workers,
    and the same step of another number, which is of another run."""
    files = _files(folder)
    before = {file.step for file in files if file.step < step}
    # A step that some workers did not get to is no step to go back to, if there is another one.
    whole = {file.step for file in files if file.step in before and _whole(files, file.step, file.size)}
    oldest = max(whole or before, default=step)
    for file in files + _files(folder, unfinished=True):
        if file.step < oldest or (file.step == step and file.size != size):
            file.path.unlink(missing_ok=True)


def load(
    folder: Path,
    setup: Mapping[str, Any],
    exchange: Exchange | None,
    layout: Layout,
    device: torch.device | str = "cpu",
    check: Callable[[Snapshot, str], object] = lambda snapshot, where: None,
) -> Snapshot | None:
    """The last step that all workers can read, and my state at it; None if there is none. What is newer is removed.

    ``check`` refuses what does not fit, before anything is changed. If it does so on one worker, all refuse.
    """
    place, size = (exchange.rank, exchange.size) if exchange else (0, 1)
    files = _files(folder)
    mine = _Mine(folder, place, size, layout, device)
    rows = _everyone(sorted(mine.right), sorted(mine.damaged), _newest_other(files, size), exchange)
    common = set(rows[0].right).intersection(*(row.right for row in rows[1:]))
    other = max((row.other for row in rows), default=(-1, 0))
    if not common:
        _refuse_incomplete(folder, size, rows, other)
        for useless in mine.right:  # the first save of all was cut short
            path_of(folder, useless, place, size).unlink(missing_ok=True)
        return None
    step = max(common)
    if other[0] > step:
        raise GossamerError(
            f"{folder} holds step {other[0]} of {other[1]} workers, and {step} is the last step of {size} workers; start with "
            f"-n {other[1]} to go on from {other[0]}, or {_RESIZE}, or remove the files *-of-{other[1]}.ckpt to go on from {step}; "
            f"{INSTEAD}"
        )
    found = mine.take(step)
    problem = _problem(found, setup, layout, check, path_of(folder, step, place, size))
    refuse_together(problem, kinds_of_all(problem, exchange))
    assert isinstance(found, Snapshot)
    for newer in (s for s in mine.right if s > step):
        path_of(folder, newer, place, size).unlink(missing_ok=True)
    for damaged, error in mine.damaged.items():
        kept = checkpoint.set_aside(path_of(folder, damaged, place, size))
        warnings.warn(f"{error}; it is kept as {kept.name}, and training goes on from step {step}", stacklevel=3)
    return found


class _Mine:
    """The files of this worker, each read in full. ``right``: those that are not damaged; the newest one's content is kept."""

    def __init__(self, folder: Path, place: int, size: int, layout: Layout, device: torch.device | str) -> None:
        self.read = lambda step: read(path_of(folder, step, place, size), step, layout, device)
        self.right: dict[int, Snapshot | GossamerError | None] = {}
        self.damaged: dict[int, Unreadable] = {}
        steps = {file.step for file in _files(folder) if (file.rank, file.size) == (place, size)}
        for step in sorted(steps)[: -_LISTED - 1 : -1]:
            try:
                found = self.read(step)
                self.right[step] = None if self.right else found
            except Unreadable as error:
                self.damaged[step] = error

    def take(self, step: int) -> Snapshot | GossamerError:
        return self.right[step] or self.read(step)


def read(path: Path, step: int, layout: Layout, device: torch.device | str) -> Snapshot | GossamerError:
    """A state, or why this Gossamer can't take it though it is not damaged."""
    try:
        found = snapshot.load(path, layout, device)
    except Unreadable:
        raise
    except GossamerError as error:
        return error
    if found.step != step:
        raise Unreadable(f"{path} is damaged: it is of step {found.step}, and its name is not")
    return found


@dataclass(frozen=True)
class _Row:
    """What one worker has on disk. ``other``: the newest step of another number of workers, and that number."""

    right: list[int]
    damaged: list[int]
    other: tuple[int, int]


def _everyone(right: list[int], damaged: list[int], other: tuple[int, int], exchange: Exchange | None) -> list[_Row]:
    padded = [steps + [-1] * (_LISTED - len(steps)) for steps in (right, damaged)]
    listed = torch.tensor([*padded[0], *padded[1], *other])
    rows = exchange.gather(listed, "load()") if exchange else listed.unsqueeze(0)
    parts = [(row[:_LISTED], row[_LISTED:-2], row[-2:]) for row in rows.tolist()]
    return [_Row([s for s in a if s >= 0], [s for s in b if s >= 0], (c[0], c[1])) for a, b, c in parts]


def _problem(
    found: Snapshot | GossamerError,
    setup: Mapping[str, Any],
    layout: Layout,
    check: Callable[[Snapshot, str], object],
    path: Path,
) -> GossamerError | None:
    """Why this state can't be taken."""
    if isinstance(found, GossamerError):
        return found
    try:
        snapshot.refuse_other(found, setup, layout, str(path))
        check(found, str(path))
    except GossamerError as error:
        return error
    return None


def kinds_of_all(problem: GossamerError | None, exchange: Exchange | None) -> list[int]:
    """What each worker has: 0, no problem; 1, a file that does not fit; 2, a damaged one."""
    kind = 0 if problem is None else 2 if isinstance(problem, Unreadable) else 1
    return exchange.gather(torch.tensor([kind]), "load()").flatten().tolist() if exchange else [kind]


def refuse_together(problem: GossamerError | None, kinds: list[int]) -> None:
    """If one worker can't load its checkpoint, none does: the others would wait for it."""
    if problem is not None:
        raise problem
    if any(kinds):
        ranks = ", ".join(str(rank) for rank, kind in enumerate(kinds) if kind)
        refusal = Unreadable if max(kinds) == 2 else GossamerError
        raise refusal(f"the checkpoint of worker {ranks} can't be loaded (that worker says why), so no worker loads its own")


def _refuse_incomplete(folder: Path, size: int, rows: list[_Row], other: tuple[int, int]) -> None:
    """No step is there for all. That is a first run, or one that was cut short in its first save; anything else is an error."""
    damaged = [f"step {step} of worker {place}" for place, row in enumerate(rows) for step in row.damaged]
    if damaged:
        raise Unreadable(
            f"{folder}: {', '.join(damaged)} can't be read, and no other step is there for all {size}; bring back a copy, or remove "
            f"the files to start anew; {INSTEAD}"
        )
    if max(len(row.right) for row in rows) >= _KEPT:  # a second save begins when all have done the first
        shown = "; ".join(f"rank {k} has {', '.join(map(str, row.right)) or 'none'}" for k, row in enumerate(rows))
        raise GossamerError(f"{folder}: the workers have no step in common ({shown}); are some files lost, or on another disk?")
    if other[0] >= 0:
        raise GossamerError(
            f"the checkpoints in {folder} are of {other[1]} workers (step {other[0]}), and there are {size}; start with "
            f"-n {other[1]}, or {_RESIZE}; {INSTEAD}"
        )


# --- Files --------------------------------------------------------------------------------------------------------------------

_NAME = re.compile(r"step-(\d+)\.rank-(\d+)-of-(\d+)\.ckpt")


@dataclass(frozen=True)
class _File:
    path: Path
    step: int
    rank: int
    size: int


def path_of(folder: Path, step: int, rank: int, size: int) -> Path:
    return folder / f"step-{step:09d}.rank-{rank}-of-{size}.ckpt"


def _files(folder: Path, unfinished: bool = False) -> list[_File]:
    """Of all steps, workers and numbers of workers. ``unfinished``: those that a kill has left half-written."""
    end = r"\.\d+\.tmp" if unfinished else ""
    names = ((path, re.fullmatch(_NAME.pattern + end, path.name)) for path in folder.glob("step-*.rank-*"))
    return [_File(path, int(match[1]), int(match[2]), int(match[3])) for path, match in names if match]


def _whole(files: list[_File], step: int, size: int) -> bool:
    """All workers' files of a step are in this folder."""
    return {file.rank for file in files if (file.step, file.size) == (step, size)} >= set(range(size))


def whole_steps(folder: Path) -> list[tuple[int, int]]:
    """The steps of which this folder has the files of all workers, newest first, each with the number of workers."""
    files = _files(folder)
    return sorted({(f.step, f.size) for f in files if _whole(files, f.step, f.size)}, reverse=True)


def _newest_other(files: list[_File], size: int) -> tuple[int, int]:
    """The newest step of another number of workers, and that number; (-1, 0) if there is none. In a folder that all workers share, one
    that was cut short does not count; a folder per host never has all files of a step."""
    shared = any(_whole(files, file.step, file.size) for file in files)
    others = {(file.step, file.size) for file in files if file.size != size}
    return max((other for other in others if not shared or _whole(files, *other)), default=(-1, 0))
