"""The mean of several workers' checkpoints: the averaged model, or a state with which another number of workers goes on."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gossamer.checkpoints import checkpoint, shards
from gossamer.checkpoints.checkpoint import Unreadable
from gossamer.checkpoints.snapshot import Snapshot, flatten, unflatten
from gossamer.errors import GossamerError


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
