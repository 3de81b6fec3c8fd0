"""Checkpoints of a job of several workers: one file per worker and step, and a job that was killed goes on from the last step
that all of them have on disk."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gossamer import checkpoint
from gossamer.errors import GossamerError
from gossamer.exchange import Exchange

AVERAGED = "averaged.safetensors"
_KEPT = 2  # steps on disk: the new one, and the one before in case somebody did not get that far
_LISTED = 16


def save(
    folder: Path,
    step: int,
    state: dict[str, Any],
    setup: dict[str, str],
    averaged: dict[str, Tensor] | None,
    exchange: Exchange | None,
) -> None:
    """Returns when all workers have written theirs. Older steps are removed then."""
    rank, size = (exchange.rank, exchange.size) if exchange else (0, 1)
    # Later steps are of another run that this one did not go on from. Removed first: load() would take them for the newest.
    for later in (s for s in _steps(folder, rank, size) if s > step):
        _path(folder, later, rank, size).unlink(missing_ok=True)
    tensors: dict[str, Tensor] = {}
    header = {"step": step, "setup": setup, "state": checkpoint.flatten("state", state, tensors)}
    try:
        checkpoint.save(_path(folder, step, rank, size), tensors, header)
    except TypeError as error:  # from JSON
        raise GossamerError(
            f"a state_dict holds what a checkpoint can't: {error}; it takes tensors, numbers and text"
        ) from None
    if averaged is not None:
        checkpoint.write(folder / AVERAGED, averaged, {"step": str(step)})
    if exchange is not None:
        exchange.gather(torch.zeros(1), "save()")
    for old in sorted(_steps(folder, rank, size))[:-_KEPT]:
        _path(folder, old, rank, size).unlink(missing_ok=True)


def load(
    folder: Path, setup: dict[str, str], exchange: Exchange | None, device: torch.device
) -> tuple[int, dict[str, Any]] | None:
    """The last step that all workers have, and my state at it; None if there is none. What is newer is removed."""
    rank, size = (exchange.rank, exchange.size) if exchange else (0, 1)
    mine = sorted(_steps(folder, rank, size))
    everyone = _everyone(mine, exchange)
    common = set(everyone[0]).intersection(*everyone[1:])
    if not common:
        _refuse_incomplete(folder, size, everyone)
        for useless in mine:  # the first save of all was cut short
            _path(folder, useless, rank, size).unlink(missing_ok=True)
        return None
    step = max(common)
    for newer in (s for s in mine if s > step):
        _path(folder, newer, rank, size).unlink(missing_ok=True)
    path = _path(folder, step, rank, size)
    tensors, header = checkpoint.load(path, device)
    differ = [
        f"{key} ({header['setup'].get(key)} there, {value} here)"
        for key, value in setup.items()
        if header["setup"].get(key) != value
    ]
    if differ:
        raise GossamerError(f"{path} was made with another set-up: {'; '.join(differ)}; {_INSTEAD}")
    return step, checkpoint.unflatten(header["state"], tensors)


def _everyone(mine: list[int], exchange: Exchange | None) -> list[list[int]]:
    """The steps that each worker has on disk."""
    if exchange is None:
        return [mine]
    listed = torch.full((_LISTED,), -1, dtype=torch.int64)
    listed[: len(mine[-_LISTED:])] = torch.tensor(mine[-_LISTED:], dtype=torch.int64)
    return [[step for step in row if step >= 0] for row in exchange.gather(listed, "load()").tolist()]


def _refuse_incomplete(folder: Path, size: int, everyone: list[list[int]]) -> None:
    """No step is there for all. That is a first run, or one that was cut short in its first save; anything else is an error."""
    if max(map(len, everyone)) >= _KEPT:  # a second save begins when all have done the first
        shown = "; ".join(f"rank {rank} has {', '.join(map(str, steps)) or 'none'}" for rank, steps in enumerate(everyone))
        raise GossamerError(f"{folder}: the workers have no step in common ({shown}); are some files lost, or on another disk?")
    others = {match[3] for path in folder.glob("step-*.rank-*") if (match := _NAME.match(path.name))} - {str(size)}
    if others and not any(everyone):
        count = "/".join(sorted(others))
        raise GossamerError(f"the checkpoints in {folder} are of {count} workers, and there are {size}; {_INSTEAD}")


_INSTEAD = f"to go on in another way, load {AVERAGED} into the bare module before it is wrapped"
_NAME = re.compile(r"step-(\d+)\.rank-(\d+)-of-(\d+)\.ckpt$")


def _path(folder: Path, step: int, rank: int, size: int) -> Path:
    return folder / f"step-{step:09d}.rank-{rank}-of-{size}.ckpt"


def _steps(folder: Path, rank: int, size: int) -> set[int]:
    matches = (_NAME.match(path.name) for path in folder.glob("step-*.rank-*.ckpt"))
    return {int(match[1]) for match in matches if match and (int(match[2]), int(match[3])) == (rank, size)}
