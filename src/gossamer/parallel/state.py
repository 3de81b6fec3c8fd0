"""All that a worker knows of its training, in checkpoints and for a worker that joins: model, optimizers, method, schedule, ``also``."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gossamer.checkpoints import shards, worker
from gossamer.checkpoints.snapshot import Layout, Snapshot
from gossamer.members.changes import Survival
from gossamer.members.store import Seat
from gossamer.methods import ALL_REDUCE
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
    def check(found: Snapshot, where: str) -> None:
        worker.check(found.parts, where, model._bare(), model._driver.optimizers, also, model._driver.now)

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
    return parts | {"means": model._mixer.state_dict(model._flat.blocks)}


def restore(model: DecentralizedDataParallel, parts: dict[str, Any], where: str, also: Mapping[str, Any]) -> None:
    driver = model._driver
    driver.signals = worker.restore(parts, where, model._bare(), driver.optimizers, model.schedule, also, driver.now)
    model._mixer.load_state_dict(model._flat.blocks, parts["means"])


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
