"""All that a worker knows of its training, in checkpoints and for a worker that joins: model, optimizers, method, schedule, ``also``."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gossamer.checkpoints import shards, worker
from gossamer.checkpoints.checkpoint import Unreadable
from gossamer.checkpoints.snapshot import Layout, Snapshot
from gossamer.errors import GossamerError
from gossamer.members.changes import Survival
from gossamer.members.store import Seat
from gossamer.methods import ALL_REDUCE
from gossamer.rows.block import Block
from gossamer.transport.exchange import Exchange

if TYPE_CHECKING:
    from gossamer.parallel.module import DecentralizedDataParallel


def save(model: DecentralizedDataParallel, folder: Path, also: Mapping[str, Any]) -> None:
    exchange, parts = model._exchange, capture(model, also)
    with model.consensus():
        averaged = {name: t.clone() for name, t in model.state_dict().items() if isinstance(t, Tensor)}
    while True:
        members = model.members
        place = members.index(model.rank)
        shards.write(folder, model.steps, place, len(members), parts, _whole_setup(model), None if place else averaged)
        if exchange is not None:
            exchange.gather(torch.zeros(1), "save()")
        if model.members == members:
            break  # otherwise a worker died meanwhile, and there would be no whole set of files
    shards.prune(folder, model.steps)


def load(model: DecentralizedDataParallel, folder: Path, also: Mapping[str, Any]) -> bool:
    model._driver.adopt()  # what was trained there may be trained here since the last step

    def check(found: Snapshot, where: str) -> None:
        worker.check(
            _relaid(model, found.parts, where), where, model._bare(), model._driver.optimizers, also, model._driver.now
        )

    found = shards.load(folder, _whole_setup(model), model._exchange, layout(model), model._flat.device, check)
    if found is None:
        return False
    restore(model, found.parts, f"the checkpoint in {folder}", also)
    model._driver.steps = found.step
    model._driver.reset()
    return True


def capture(model: DecentralizedDataParallel, also: Mapping[str, Any]) -> dict[str, Any]:
    driver = model._driver
    parts = worker.capture(model._bare(), driver.optimizers, model.schedule, driver.signals, also, driver.now)
    now = driver.current_schedule.state_dict()
    parts["schedule"] |= {key: value for key, value in now.items() if key != "changes"}
    blocks = model._flat.blocks
    return parts | {
        "means": model._mixer.state_dict(blocks),
        "progress": {"graph": driver.last_graph, "blocks": _names(blocks)},
    }


def restore(model: DecentralizedDataParallel, parts: dict[str, Any], where: str, also: Mapping[str, Any]) -> None:
    driver, blocks = model._driver, model._flat.blocks
    driver.adopt()
    parts = _relaid(model, parts, where)
    driver.signals = worker.restore(parts, where, model._bare(), driver.optimizers, model.schedule, also, driver.now)
    here = _names(blocks)
    progress = parts.get("progress", {"graph": None, "blocks": here})
    model._mixer.load_state_dict(blocks, parts["means"] if progress["blocks"] == here else [])
    driver.resume(progress["graph"])
    driver.members_moved |= not set(chain(*here)) <= set(chain(*progress["blocks"]))


def _names(blocks: Sequence[Block]) -> list[list[str]]:
    return [[slot.name for slot in block.slots] for block in blocks]


def _relaid(model: DecentralizedDataParallel, parts: dict[str, Any], where: str) -> dict[str, Any]:
    """The method's own vectors as the blocks are here: parameters that were frozen at first have blocks of their own, and may have been
    trained from another step on. A parameter that was not trained there begins anew."""
    driver, blocks, progress = model._driver, model._flat.blocks, parts.get("progress")
    own, here = driver.now.part, _names(blocks)
    if own is None or progress is None:
        return parts
    worker.check_progress(progress, where)
    there = progress["blocks"]
    if there == here:
        return parts
    if frozen := [name for name in chain(*there) if name not in {*chain(*here)}]:
        raise GossamerError(
            f"{where} does not fit: parameter {frozen[0]!r} was trained there and is frozen here; call requires_grad_(True) first"
        )
    parameters = dict(model._bare().named_parameters())
    old = [Block([(name, parameters[name], False) for name in names], 1, model._flat.device) for names in there]
    saved, vectors = parts[own], driver.method.state(driver.now.x)
    of_blocks = {name: vector.tensors for name, vector in vectors.items() if _fit(blocks, vector.tensors)}
    if not isinstance(saved, dict) or not all(_fit(old, saved.get(name)) for name in of_blocks):
        raise Unreadable(f"{where} is damaged: its part {own!r} does not fit the parameters that it names")
    for name, rows in of_blocks.items():
        mine = _views(blocks, rows)
        for parameter, view in _views(old, saved[name]).items():
            mine[parameter].copy_(view)
    return parts | {own: saved | of_blocks}


def _views(blocks: Sequence[Block], rows: Sequence[Tensor]) -> dict[str, Tensor]:
    """Of each parameter."""
    return {name: view for block, row in zip(blocks, rows, strict=True) for name, view in block.tensors_of(row).items()}


def _fit(blocks: Sequence[Block], rows: Any) -> bool:
    """Whether these are rows of the blocks."""
    return isinstance(rows, list) and [(b.x.shape, b.dtype) for b in blocks] == [
        (row.shape, row.dtype) if isinstance(row, Tensor) else None for row in rows
    ]


def survival(model: DecentralizedDataParallel, seat: Seat, exchange: Exchange) -> Survival:
    """Under ``gossamer launch``. It does not keep the model, which a person may drop."""
    driver = model._driver
    here: Any = weakref.proxy(model)
    signature = {key: value for key, value in setup(model).items() if key != "workers"} | model._flat.signature()
    signature |= {"wire": model._mixer.wire.name, "the optimizers": ", ".join(type(o).__name__ for o in driver.optimizers)}
    made = Survival(
        seat,
        exchange,
        model._mixer,
        model.schedule,
        lambda: capture(here, here._also),
        lambda parts: restore(here, parts, "the state of the others", here._also),
        signature,
        driver.fault,
        layout(model),
        equal=model.averages_gradients,
    )
    if seat.joins:
        driver.steps = made.position()
    return made


def layout(model: DecentralizedDataParallel) -> Layout:
    return worker.layout(model._driver.now.part)


def setup(model: DecentralizedDataParallel) -> dict[str, str]:
    """What must be the same on all workers, and in a checkpoint."""
    graph, order = model.schedule.describe(), model.method.describe()
    if model.method.name == ALL_REDUCE:
        graph, order = ALL_REDUCE, "awc"  # as checkpoints have it
    return {"graph": graph, "order": order, "local_steps": str(model.local_steps), "workers": str(model.size)}


def _whole_setup(model: DecentralizedDataParallel) -> dict[str, str]:
    optimizers = model._driver.optimizers
    return setup(model) | {"wire": model._mixer.wire.name, **worker.signature(model._bare(), optimizers)}
