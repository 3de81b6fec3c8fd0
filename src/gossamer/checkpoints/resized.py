"""A checkpoint of so many workers for another number of them: each takes over the mean of all rows, or one of the rows."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from gossamer.checkpoints import checkpoint, shards
from gossamer.checkpoints.checkpoint import Unreadable
from gossamer.checkpoints.snapshot import Layout, Snapshot, flatten, unflatten
from gossamer.errors import GossamerError
from gossamer.transport.exchange import Exchange

Resize = Literal["refuse", "average", "copy"]
_LISTED = 16


Merge = Callable[[Iterable[Snapshot], Sequence[Path]], Snapshot]


def load(
    folder: Path,
    exchange: Exchange | None,
    layout: Layout,
    sources: Callable[[int], Sequence[int]],
    merge: Merge,
    check: Callable[[Snapshot, str], object],
    device: torch.device | str = "cpu",
) -> tuple[Snapshot, int] | None:
    """The newest step that all workers can read, and how many workers it is of. None: no step is there with the files of all its workers.

    Of another number of workers, this worker reads the files of ``sources(number)``, and ``merge`` makes its state of them. What ``check``
    refuses on one worker all refuse, before anything is changed. A damaged step is left for the one before it.
    """
    place, size = (exchange.rank, exchange.size) if exchange else (0, 1)
    damaged: dict[Path, Unreadable] = {}
    spoilt: list[str] = []
    for step, there in _agreed(shards.whole_steps(folder)[:_LISTED], exchange):
        ranks = [place] if there == size else sources(there)
        paths = [shards.path_of(folder, step, rank, there) for rank in ranks]
        problem: GossamerError | None = None
        try:
            read = partial(_read, step=step, layout=layout, device=device, damaged=damaged)
            found = read(paths[0]) if there == size else merge(map(read, paths), paths)
            check(found, str(paths[0]))
        except GossamerError as error:
            problem = error
        kinds = shards.kinds_of_all(problem, exchange)
        if 2 in kinds and set(kinds) <= {0, 2}:
            spoilt.append(f"step {step} of {there} workers")
            continue
        shards.refuse_together(problem, kinds)
        for path, damage in damaged.items():
            kept = checkpoint.set_aside(path)
            warnings.warn(f"{damage}; it is kept as {kept.name}, and training goes on from step {step}", stacklevel=4)
        return found, there
    if spoilt:
        why = "".join(f"{damage}; " for damage in damaged.values())
        raise Unreadable(
            f"{folder}: {', '.join(spoilt)} can't be read; {why}no other step is there for all; bring back a copy, or remove the "
            "files to start anew"
        )
    return None


def averaged(folder: Path | str) -> dict[str, Tensor]:
    """The averaged model of the newest step in a folder of checkpoints: floating-point tensors are the mean over its workers, others
    the first worker's. A folder per host has not all of them."""
    folder = Path(folder)
    steps = shards.whole_steps(folder)
    if not steps:
        raise Unreadable(f"{folder} holds no step with the files of all its workers")
    step, size = steps[0]
    paths = [shards.path_of(folder, step, rank, size) for rank in range(size)]
    return dict(mean(map(_model, paths), paths).parts["model"])


def _model(path: Path) -> Snapshot:
    """Only the model of one worker's file."""
    tensors, header = checkpoint.load(path)
    try:
        part = header["parts"]["model"]["value"] if "parts" in header else header["state"]
        nest = unflatten(part, tensors)
        model = nest if "parts" in header else nest["model"]
        if all(isinstance(t, Tensor) for t in model.values()):
            return Snapshot(header["step"], {}, {"model": model})
    except (KeyError, TypeError, AttributeError):
        pass
    raise Unreadable(f"{path} is no checkpoint of a worker's model")


def _agreed(here: Sequence[tuple[int, int]], exchange: Exchange | None) -> list[tuple[int, int]]:
    """The steps that all workers see in full, newest first."""
    if exchange is None:
        return list(here)
    listed = torch.tensor([*here, *[(-1, -1)] * (_LISTED - len(here))]).flatten()
    rows = exchange.gather(listed, "load()").reshape(exchange.size, -1, 2).tolist()
    common = set.intersection(*({(step, size) for step, size in row if step >= 0} for row in rows))
    return sorted(common, reverse=True)


def _read(path: Path, step: int, layout: Layout, device: torch.device | str, damaged: dict[Path, Unreadable]) -> Snapshot:
    try:
        found = shards.read(path, step, layout, device)
    except Unreadable as error:
        damaged[path] = error
        raise
    if isinstance(found, GossamerError):
        raise found
    return found


def mean(found: Iterable[Snapshot], paths: Sequence[Path], own: int = 0, local: Collection[str] = ()) -> Snapshot:
    """The mean of the model, of the optimizers' state and of a method's own: of floating-point tensors with at least one dimension, the
    same on all workers. All else is of number ``own``. ``local``: names of buffers that belong to one worker's data, and are not averaged.
    """
    sums: dict[str, Tensor] = {}
    shapes: dict[str, str] = {}
    kept: tuple[Snapshot, dict[str, Any], dict[str, Tensor]] | None = None
    for k, (path, snapshot) in enumerate(zip(paths, found, strict=True)):
        _refuse_histories(snapshot, path)
        tensors: dict[str, Tensor] = {}
        names = [name for name in snapshot.parts if name in ("model", "optimizers") or name.startswith("methods/")]
        nests = {name: flatten(name, snapshot.parts[name], tensors) for name in names}
        here = {key: f"{str(t.dtype)[6:]} {list(t.shape)}" for key, t in tensors.items()}
        if differ := [key for key in {**shapes, **here} if k and shapes.get(key) != here.get(key)]:
            there, first = (some.get(differ[0], "missing") for some in (here, shapes))
            raise GossamerError(
                f"{path}: {differ[0]!r} is {there} there and {first} in {paths[0].name}, so there is no mean; use load(…, resize='copy')"
            )
        shapes = here
        for key, t in tensors.items():
            if t.is_floating_point() and t.ndim and key.removeprefix("model.") not in local:
                wide = t.to(torch.promote_types(t.dtype, torch.float32))
                sums[key] = sums[key].lerp_(wide, 1 / (k + 1)) if k else wide.clone()
        if k == own:
            kept = snapshot, nests, tensors
    assert kept is not None
    snapshot, nests, tensors = kept
    tensors |= {key: total.to(tensors[key].dtype) for key, total in sums.items()}
    return replace(snapshot, parts={**snapshot.parts, **{name: unflatten(nest, tensors) for name, nest in nests.items()}})


def _refuse_histories(found: Snapshot, path: Path) -> None:
    """What an optimizer remembers of its own steps (LBFGS) means nothing for another one's."""
    for saved in found.parts.get("optimizers", ()):
        if any(isinstance(value, list) for held in saved["state"]["state"].values() for value in held.values()):
            raise GossamerError(
                f"{path}: the optimizer ({saved['class']}) keeps a history of its steps, of which there is no mean; use "
                "load(…, resize='copy')"
            )
