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
    tensors: dict[str, Tensor] = {}
    header = {"step": step, "setup": setup, "state": checkpoint.flatten("state", state, tensors)}
    checkpoint.save(_path(folder, step, rank, size), tensors, header)
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
    if exchange is not None:
        listed = torch.full((_LISTED,), -1, dtype=torch.int64)
        listed[: len(mine[-_LISTED:])] = torch.tensor(mine[-_LISTED:], dtype=torch.int64)
        everyone = exchange.gather(listed, "load()").tolist()
        common = set(everyone[0]).intersection(*everyone[1:]) - {-1}
    else:
        common = set(mine)
    if not common:
        if not mine and list(folder.glob("step-*.rank-*")):
            others = {match[3] for path in folder.glob("step-*.rank-*") if (match := _NAME.match(path.name))}
            if others and str(size) not in others:
                raise GossamerError(
                    f"the checkpoints in {folder} are of {'/'.join(sorted(others))} workers, and there are {size}"
                )
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
        raise GossamerError(f"{path} was made with another set-up: {'; '.join(differ)}")
    return step, checkpoint.unflatten(header["state"], tensors)


_NAME = re.compile(r"step-(\d+)\.rank-(\d+)-of-(\d+)\.ckpt$")


def _path(folder: Path, step: int, rank: int, size: int) -> Path:
    return folder / f"step-{step:09d}.rank-{rank}-of-{size}.ckpt"


def _steps(folder: Path, rank: int, size: int) -> set[int]:
    matches = (_NAME.match(path.name) for path in folder.glob("step-*.rank-*.ckpt"))
    return {int(match[1]) for match in matches if match and (int(match[2]), int(match[3])) == (rank, size)}
