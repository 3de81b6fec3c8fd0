"""All that a Trainer knows, in named parts: for its checkpoint. What does not fit is refused before anything changes."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gossamer.checkpoints import shards, snapshot, worker
from gossamer.checkpoints.checkpoint import Unreadable
from gossamer.checkpoints.snapshot import Layout, Snapshot, unflatten
from gossamer.checkpoints.worker import check_means, check_optimizer, check_vectors
from gossamer.errors import GossamerError
from gossamer.rows.backends import Backend


@dataclass(frozen=True)
class EpochRecord:
    """What one epoch brought. ``value`` is the metric of the averaged model on the test data."""

    epoch: int
    step: int
    lr: float
    train_loss: float
    value: float
    graph: str
    degree: float  # connections of a replica, averaged over the steps of this epoch
    bytes: int
    consensus_distance: float
    seconds: float


def fingerprint(trainer: Any) -> dict[str, Any]:
    """What must agree for a resumed run to be the same run."""
    s = trainer.settings
    return {
        "task": trainer.task.name,
        "replicas": s.replicas,
        "epochs": s.epochs,
        "batch": s.batch,
        "algorithm": s.algorithm,
        "schedule": trainer.schedule.describe(),
        "optimizer": repr(s.optimizer),
        "learning_rate": repr(trainer.learning_rate),
        "seed": s.seed,
        "partition": s.partition,
        "init": s.init,
        "wire": s.wire,
        "batch_norm": s.batch_norm,
        **({"local_steps": trainer._every} if trainer._every > 1 else {}),
        "outages": [[o.worker, o.at, o.back] for o in s.outages] or None,
        **{f"tensor {slot.name!r}": list(slot.shape) for block in trainer.replicas.blocks for slot in block.slots},
    }


def capture(trainer: Any) -> dict[str, Any]:
    replicas = trainer.replicas
    return {
        "model": {"x": [block.x for block in replicas.blocks], "buffers": dict(replicas.buffers)},
        "optimizers": trainer.optimizer.state_dict(),
        "schedule": trainer.schedule.state_dict(),
        "signals": dict(trainer.signals),
        "means": trainer.mixer.state_dict(replicas.blocks),
        "progress": {
            "bytes": trainer.bytes,
            "seconds": trainer.seconds,
            "epoch_loss": trainer._epoch_loss,
            "epoch_degree": trainer._epoch_degree,
            "history": [asdict(record) for record in trainer.history],
            "backend": str(replicas.backend) if replicas.backend else None,
            "threads": torch.get_num_threads(),
            "graph": trainer._graph,
        },
        **({part: trainer.now.state_dict()} if (part := trainer.now.part) else {}),
    }


def check(trainer: Any, found: Snapshot, where: str) -> None:
    try:
        _check(trainer, found, where)
    except GossamerError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise Unreadable(f"{where} is damaged or not such a checkpoint: {type(error).__name__}: {error}") from None


def _check(trainer: Any, found: Snapshot, where: str) -> None:
    parts, progress = found.parts, found.parts["progress"]
    if not 0 <= found.step <= trainer.steps:
        raise Unreadable(f"{where} is damaged: it is of step {found.step}, and the run has {trainer.steps}")
    members = trainer.attendance.members(found.step - 1)
    rows = trainer.replicas.r if members == trainer.members else len(members)
    here = {f"x.{k}": block.x for k, block in enumerate(trainer.replicas.blocks)}
    there = {f"x.{k}": x for k, x in enumerate(parts["model"]["x"])}
    _check_rows(there | parts["model"]["buffers"], here | trainer.replicas.buffers, rows, where)
    optimizers = trainer.optimizer.optimizers
    if members == trainer.members:  # else there are others after _resize, which are made the same way
        if len(parts["optimizers"]) != len(optimizers):
            raise GossamerError(f"{where} holds {len(parts['optimizers'])} optimizers, and there are {len(optimizers)} here")
        for saved, optimizer in zip(parts["optimizers"], optimizers, strict=True):
            check_optimizer(saved, f"{where}: the optimizer", optimizer)
    check_means(parts["means"], where)
    if trainer.now.part:
        check_vectors(parts[trainer.now.part], where, trainer.now, rows)
    copy.deepcopy(trainer.schedule).load_state_dict(parts["schedule"])
    numbers = [*(progress[key] for key in ("bytes", "seconds", "epoch_degree", "threads")), *parts["signals"].values()]
    for record in _history(found):
        numbers += [value for name, value in vars(record).items() if name != "graph"]
    if not all(isinstance(number, (int, float)) for number in numbers) or progress["epoch_loss"].ndim:
        raise TypeError("text, or a tensor, instead of a number")
    if progress["backend"] is not None:
        Backend.parse(progress["backend"])


def _check_rows(there: dict[str, Tensor], here: dict[str, Tensor], rows: int, where: str) -> None:
    for name in {**here, **there}:
        shown = [
            "missing" if name not in tensors else f"{str(tensors[name].dtype)[6:]} {list(tensors[name].shape[1:])}"
            for tensors in (there, here)
        ]
        if shown[0] != shown[1] or len(there[name]) != rows:
            counts = f"{len(there[name])} × " if name in there else "", f"{rows} × "
            raise GossamerError(f"{where} does not fit: {name} is {counts[0]}{shown[0]} there and {counts[1]}{shown[1]} here")


def _history(found: Snapshot) -> list[EpochRecord]:
    return [EpochRecord(**record) for record in found.parts["progress"]["history"]]


def restore(trainer: Any, found: Snapshot, where: str) -> None:
    check(trainer, found, where)
    parts, progress, replicas = found.parts, found.parts["progress"], trainer.replicas
    trainer._take_part(trainer.attendance.members(found.step - 1))
    for block, x in zip(replicas.blocks, parts["model"]["x"], strict=True):
        block.x.copy_(x)
    for name, stacked in replicas.buffers.items():
        stacked.copy_(parts["model"]["buffers"][name])
    try:
        trainer.optimizer.load_state_dict(parts["optimizers"])
    except (KeyError, TypeError, ValueError) as error:
        raise Unreadable(f"{where} does not fit: the optimizer refuses its state: {error}") from None
    trainer.mixer.load_state_dict(replicas.blocks, parts["means"])
    trainer.now.load_state_dict(parts.get(trainer.now.part, {}))
    trainer._graph = progress.get("graph")
    trainer.schedule.load_state_dict(parts["schedule"])
    trainer.step, trainer.now.bytes, trainer.seconds = found.step, progress["bytes"], progress["seconds"]
    trainer.signals, trainer.history = dict(parts["signals"]), _history(found)
    trainer._epoch_loss, trainer._epoch_degree = progress["epoch_loss"].cpu(), progress["epoch_degree"]
    if progress["backend"] is not None and trainer.settings.backend == "auto":
        replicas.backend = Backend.parse(progress["backend"])
    if progress["threads"] != torch.get_num_threads():
        warnings.warn(
            f"{where} was made with {progress['threads']} threads and this process has {torch.get_num_threads()}: "
            "results may differ in the last digits",
            stacklevel=4,
        )


def load(trainer: Any, path: Path) -> Snapshot | None:
    """The newest state at ``path``, of any number of processes, all of which see all of its files; or of as many, each its own."""
    exchange, device, setup = trainer.exchange, trainer.device, fingerprint(trainer)
    layout = worker.layout(trainer.now.part, LAYOUT)

    def fits(found: Snapshot, where: str) -> None:
        snapshot.refuse_other(found, setup, layout, where)
        check(trainer, found, where)

    if path.is_dir() or (exchange is not None and not path.exists()):
        last = shards.load(path, exchange, layout, fits, device, shards.Regroup(range, partial(regrouped, trainer)))
        return last[0] if last else None
    found = snapshot.load(path, layout, device)
    if exchange is not None:
        found = regrouped(trainer, [found], [path])
    fits(found, str(path))
    return found


def regrouped(trainer: Any, found: Iterable[Snapshot], paths: Sequence[Path]) -> Snapshot:
    """The rows of this process, of files that together hold those of all replicas, in order."""
    first, *others = found
    snapshot.refuse_other(first, fingerprint(trainer), LAYOUT, str(paths[0]))  # or the rows may not fit each other
    parts = [first.parts, *(other.parts for other in others)]
    mine = slice(trainer.mixer.rows.start, trainer.mixer.rows.stop)

    def rows(tensors: Iterable[Tensor]) -> Tensor:
        return torch.cat(list(tensors))[mine]

    models = [part["model"] for part in parts]
    x = [rows(blocks) for blocks in zip(*(model["x"] for model in models), strict=True)]
    buffers = {name: rows(model["buffers"][name] for model in models) for name in models[0]["buffers"]}
    counts = [len(model["x"][0]) for model in models]
    own = {
        part: {name: [rows(some) for some in zip(*(p[part][name] for p in parts), strict=True)] for name in parts[0][part]}
        for part in filter(None, [trainer.now.part])
    }
    optimizers = trainer.optimizer.regrouped([part["optimizers"] for part in parts], counts, mine)
    progress = first.parts["progress"] | {"backend": None}  # it was chosen for another number of rows
    made = {**first.parts, **own, "model": {"x": x, "buffers": buffers}, "optimizers": optimizers, "progress": progress}
    return replace(first, parts=made)


# --- Version 1 ----------------------------------------------------------------------------------------------------------------


def _upgrade(tensors: dict[str, Tensor], header: dict[str, Any]) -> Snapshot:
    if "state" in header:  # of several processes
        state = unflatten(header["state"], tensors)
        tensors, header = state["tensors"], state["header"]
    settings = dict(header["settings"])
    settings |= {f"tensor {name!r}": shape for name, shape in settings.pop("tensors")}
    step = header["step"]
    if not isinstance(step, int):
        raise Unreadable("it names no step")
    progress = {key: header[key] for key in ("bytes", "seconds", "epoch_degree", "history", "backend", "threads")}
    buffers = {key.removeprefix("buffer."): tensor for key, tensor in tensors.items() if key.startswith("buffer.")}
    parts = {
        "model": {"x": [tensors[f"x.{k}"] for k in range(sum(key.startswith("x.") for key in tensors))], "buffers": buffers},
        "optimizers": unflatten(header["optimizer"], tensors),
        "schedule": header["schedule"],
        "signals": header["signals"],
        "means": unflatten(header.get("means", []), tensors),
        "progress": progress | {"epoch_loss": tensors["epoch_loss"]},
    }
    return Snapshot(step, settings, parts, version=1)


LAYOUT = Layout(("model", "optimizers", "schedule", "signals", "means", "progress"), _upgrade, "other settings", repr)
