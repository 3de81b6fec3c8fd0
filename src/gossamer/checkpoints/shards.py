"""Checkpoints of a job of several workers: one file per worker and step, and a job that was killed goes on from the last step
that all of them have on disk, readable and right."""

from __future__ import annotations

import functools
import re
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gossamer.checkpoints import checkpoint, snapshot
from gossamer.checkpoints.background import Commit, Writer
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
    writer: Writer,
    commit: Commit | None,
    folder: Path,
    step: int,
    place: int,
    size: int,
    parts: dict[str, Any],
    setup: Mapping[str, Any],
) -> None:
    """As :func:`write` and :func:`prune`, by a thread: what is written is copied now, and what can't be is refused now."""
    tensors, listed = snapshot.pack(parts)
    path, metadata = (
        path_of(folder, step, place, size),
        checkpoint.metadata({"step": step, "setup": dict(setup), "parts": listed}),
    )
    copies = writer.copy(tensors)

    def work() -> None:
        written = False
        try:
            remove_later(folder, step)
            checkpoint.write(path, copies, metadata)
            written = True
        finally:
            if commit is not None:
                commit.say(written)
        if commit is None or commit.heard(writer.pause):
            prune(folder, step, size)

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


@dataclass(frozen=True)
class Regroup:
    """How to go on from another number of workers: which of their files this one reads, and what it makes of them."""

    ranks: Callable[[int], Sequence[int]]
    merge: Callable[[Iterable[Snapshot], Sequence[Path]], Snapshot]


def load(
    folder: Path,
    exchange: Exchange | None,
    layout: Layout,
    check: Callable[[Snapshot, str], object],
    device: torch.device | str = "cpu",
    regroup: Regroup | None = None,
) -> tuple[Snapshot, int] | None:
    """The last step that all workers can read: my state at it, and of how many workers it is. None: there is none. What is newer goes.

    A damaged step is left for the one before it. ``check`` refuses what does not fit, before anything is changed. If it does so on one
    worker, all refuse. ``regroup``: steps of other numbers of workers count too, if all workers see all of their files.
    """
    place, size = (exchange.rank, exchange.size) if exchange else (0, 1)
    files = _files(folder)
    own = sorted(file.step for file in files if (file.rank, file.size) == (place, size))[-_LISTED:]
    others = [some for some in whole_steps(folder) if some[1] != size][:_LISTED] if regroup else []
    rows = _everyone(own, others, _newest_other(files, size), size, exchange)
    spoilt: dict[tuple[int, int], list[int]] = {}
    damaged: dict[Path, Unreadable] = {}
    common = set.intersection(*(row.steps for row in rows))
    for step, there in sorted(common, key=lambda some: (some[0], some[1] == size), reverse=True):
        _refuse_older(folder, step, size, rows, spoilt)
        ranks = [place] if there == size or regroup is None else regroup.ranks(there)
        paths = [path_of(folder, step, rank, there) for rank in ranks]
        read = functools.partial(_read, step=step, layout=layout, device=device, damaged=damaged)
        problem: GossamerError | None = None
        try:
            found = read(paths[0]) if there == size or regroup is None else regroup.merge(map(read, paths), paths)
            check(found, str(paths[0]))
        except GossamerError as error:
            problem = error
        kinds = _kinds(problem, bool(damaged.keys() & {*paths}), exchange)
        if _DAMAGED in kinds:
            spoilt[step, there] = [rank for rank, kind in enumerate(kinds) if kind == _DAMAGED]
            continue
        _refuse_together(problem, kinds)
        for newer in own:
            if newer > step and (path := path_of(folder, newer, place, size)) not in damaged:
                path.unlink(missing_ok=True)
        for path, damage in damaged.items():
            kept = checkpoint.set_aside(path)
            warnings.warn(f"{damage}; it is kept as {kept.name}, and training goes on from step {step}", stacklevel=4)
        return found, there
    _refuse_incomplete(folder, size, rows, spoilt, damaged)
    for useless in own:  # the first save of all was cut short
        path_of(folder, useless, place, size).unlink(missing_ok=True)
    return None


def _read(path: Path, step: int, layout: Layout, device: torch.device | str, damaged: dict[Path, Unreadable]) -> Snapshot:
    try:
        found = snapshot.load(path, layout, device)
        if found.step != step:
            raise Unreadable(f"{path} is damaged: it is of step {found.step}, and its name is not")
    except Unreadable as error:
        damaged[path] = error
        raise
    return found


@dataclass(frozen=True)
class _Row:
    """What one worker has on disk. ``steps``: those that it can go on from, each with a number of workers. ``other``: the newest step of
    another number of workers, and that number."""

    steps: set[tuple[int, int]]
    other: tuple[int, int]


def _everyone(
    own: list[int], others: list[tuple[int, int]], other: tuple[int, int], size: int, exchange: Exchange | None
) -> list[_Row]:
    steps = [*((step, size) for step in own), *others]
    listed = torch.tensor([other, *steps, *[(-1, -1)] * (2 * _LISTED - len(steps))]).flatten()
    rows = exchange.gather(listed, "load()") if exchange else listed.unsqueeze(0)
    pairs = [[(step, number) for step, number in row] for row in rows.reshape(len(rows), -1, 2).tolist()]
    return [_Row({pair for pair in row if pair[0] >= 0}, first) for first, *row in pairs]


_DAMAGED = 3


def _kinds(problem: GossamerError | None, damaged: bool, exchange: Exchange | None) -> list[int]:
    """What each worker has: 0, no problem; 1, a file that does not fit; 2, one that makes no sense; 3, a damaged one."""
    kind = _DAMAGED if damaged else 0 if problem is None else 2 if isinstance(problem, Unreadable) else 1
    return exchange.gather(torch.tensor([kind]), "load()").flatten().tolist() if exchange else [kind]


def _refuse_together(problem: GossamerError | None, kinds: list[int]) -> None:
    """If one worker can't load its checkpoint, none does: the others would wait for it."""
    if problem is not None:
        raise problem
    if any(kinds):
        ranks = ", ".join(str(rank) for rank, kind in enumerate(kinds) if kind)
        refusal = Unreadable if max(kinds) == 2 else GossamerError
        raise refusal(f"the checkpoint of worker {ranks} can't be loaded (that worker says why), so no worker loads its own")


def _refuse_older(folder: Path, step: int, size: int, rows: list[_Row], spoilt: Collection[tuple[int, int]]) -> None:
    other = max(row.other for row in rows)
    if other[0] > step and other not in spoilt:
        raise GossamerError(
            f"{folder} holds step {other[0]} of {other[1]} workers, and {step} is the last step of {size} workers; start with "
            f"-n {other[1]} to go on from {other[0]}, or {_RESIZE}, or remove the files *-of-{other[1]}.ckpt to go on from {step}; "
            f"{INSTEAD}"
        )


def _refuse_incomplete(
    folder: Path, size: int, rows: list[_Row], spoilt: Mapping[tuple[int, int], list[int]], damaged: Collection[Path]
) -> None:
    """No step is there for all. That is a first run, or one that was cut short in its first save; anything else is an error."""
    if spoilt:
        places = sorted((place, step) for (step, there), places in spoilt.items() if there == size for place in places)
        shown = [f"step {step} of worker {place}" for place, step in places]
        shown += [path.name for path in damaged if not path.name.endswith(f"-of-{size}.ckpt")]
        raise Unreadable(
            f"{folder}: {', '.join(shown) or 'what others read'} can't be read, and no other step is there for all {size}; bring back a "
            f"copy, or remove the files to start anew; {INSTEAD}"
        )
    steps = [sorted(step for step, there in row.steps if there == size) for row in rows]
    if max(map(len, steps)) >= _KEPT:  # a second save begins when all have done the first
        listed = "; ".join(f"rank {k} has {', '.join(map(str, some)) or 'none'}" for k, some in enumerate(steps))
        raise GossamerError(
            f"{folder}: the workers have no step in common ({listed}); are some files lost, or on another disk?"
        )
    other = max(row.other for row in rows)
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
