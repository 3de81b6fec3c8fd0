"""All that a worker knows of its training, in checkpoints and for a worker that joins: model, optimizers, method, schedule, ``also``."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from gossamer.checkpoints import checkpoint, shards, snapshot, worker
from gossamer.checkpoints.background import Commit, not_written
from gossamer.checkpoints.checkpoint import Unreadable
from gossamer.checkpoints.mean import mean
from gossamer.checkpoints.snapshot import Layout, Snapshot
from gossamer.errors import GossamerError
from gossamer.members.changes import Survival
from gossamer.members.store import Seat
from gossamer.methods import ALL_REDUCE, Policy
from gossamer.parallel import policies
from gossamer.rows.block import Block, local_buffers
from gossamer.schedules import rebuilt, schedule
from gossamer.transport.exchange import Exchange

Resize = Literal["refuse", "average", "copy"]

if TYPE_CHECKING:
    from gossamer.parallel.module import DecentralizedDataParallel


def save(model: DecentralizedDataParallel, folder: Path, also: Mapping[str, Any]) -> None:
    problem, parts = _finish(model), capture(model, also)
    with model.consensus():
        averaged = {name: t.clone() for name, t in model.state_dict().items() if isinstance(t, Tensor)}
    while True:
        members = model.members
        place = members.index(model.rank)
        if problem is None:
            try:
                shards.write(folder, model.steps, place, len(members), parts, _whole_setup(model), None if place else averaged)
            except GossamerError as error:
                problem = error
        _together(model, problem)
        if model.members == members:
            break  # otherwise a worker died meanwhile, and there would be no whole set of files
    shards.prune(folder, model.steps, len(members))


def save_in_background(model: DecentralizedDataParallel, folder: Path, also: Mapping[str, Any]) -> None:
    """What goes wrong on one worker is an error there at once, and with the next save on all others: no worker waits for another one."""
    writer, driver, exchange, step = model._writer, model._driver, model._exchange, model.steps
    if (problem := _finish(model)) is not None:
        raise problem
    commit = Commit(exchange, writer.key(exchange.link, step)) if exchange is not None else None
    members = model.members
    try:
        if (fault := driver.fault()) is not None:
            if driver.survival is not None:
                driver.survival.leave(fault)  # the others save theirs
                return
            raise GossamerError(f"save(): {fault.describe(model.rank)}; a checkpoint from before may help")
        parts, place = capture(model, also), members.index(model.rank)
        shards.write_later(writer, commit, folder, step, place, len(members), parts, _whole_setup(model))
    except Exception:  # a person's own state_dict may raise anything
        if commit is not None:
            commit.say(False)
        raise


def _finish(model: DecentralizedDataParallel) -> GossamerError | None:
    """What was saved in the background before. All workers hear of it if one could not write."""
    return model._writer.finish(_patience(model))


def _patience(model: DecentralizedDataParallel) -> float | None:
    """Seconds for what the others say about a checkpoint."""
    return model._exchange.link.timeout if model._exchange is not None else None


def export(model: DecentralizedDataParallel, folder: Path) -> None:
    problem, copies = None, {}
    with model.consensus():
        if model.leads:
            tensors = {name: t for name, t in model.state_dict().items() if isinstance(t, Tensor)}
            # Each with memory of its own, but tied ones tied: savers look at that.
            copies = {(t.data_ptr(), t.shape): t.detach().clone() for t in tensors.values()}
            own = {name: copies[t.data_ptr(), t.shape] for name, t in tensors.items()}
            try:
                _write_model(model._bare(), folder, own)
            except Exception as error:  # a person's own save_pretrained may raise anything
                problem = GossamerError(f"export(): the model can't be written to {folder}: {' '.join(str(error).split())}")
        _together(model, problem)


def _write_model(bare: nn.Module, folder: Path, tensors: dict[str, Tensor]) -> None:
    save: Any = getattr(bare, "save_pretrained", None)
    if save is None:
        checkpoint.write(folder / "model.safetensors", tensors, {"format": "pt"})
    elif "state_dict" in inspect.signature(save).parameters:
        save(folder, state_dict=tensors)
    else:
        save(folder)


def _together(model: DecentralizedDataParallel, problem: GossamerError | None) -> None:
    """If one worker could not save, all say so: there is no whole set of files. (Under ``gossamer launch`` the others go on without it.)"""
    exchange = model._exchange
    if problem is not None and (exchange is None or model._driver.survival is not None):
        raise problem
    if exchange is None:
        return
    failed = exchange.gather(torch.tensor([float(problem is not None)]), "save()").flatten().tolist()
    if problem is not None:
        raise problem
    if any(failed):
        raise not_written(rank for rank, bad in zip(model.members, failed, strict=True) if bad)


def load(model: DecentralizedDataParallel, folder: Path, also: Mapping[str, Any], resize: Resize = "refuse") -> bool:
    driver = model._driver
    model._writer.wait(_patience(model))
    driver.adopt()  # what was trained there may be trained here since the last step

    def check(found: Snapshot, where: str) -> None:
        here = _setup_of(model, found.setup) if f"-of-{found.setup.get('workers')}." in where else _whole_setup(model)
        before, fitting = found.setup.get("graph"), layout(model)
        if here["graph"] == "auto" != before:
            said = f"before 0.2 a gossip graph was the default; give graph={before!r} to go on as it was"
            fitting = replace(fitting, instead=said)
        snapshot.refuse_other(found, here, fitting, where)
        with policies.method_of(driver, found.parts, where):
            worker.check(_relaid(model, found.parts, where), where, model._bare(), driver.optimizers, also, driver.now)

    exchange, local = model._exchange, local_buffers(model._bare())
    place = exchange.rank if exchange else 0
    regroup = {
        "refuse": None,
        "copy": shards.Regroup(lambda size: [place % size], lambda snapshots, paths: next(iter(snapshots))),
        "average": shards.Regroup(range, lambda snapshots, paths: mean(snapshots, paths, place % len(paths), local)),
    }
    last = shards.load(folder, exchange, layout(model), check, model._flat.device, regroup[resize])
    if last is None:
        return False
    found, size = last
    said = "" if size == model.size else _resize(model, found, size, resize)
    restore(model, found.parts, f"the checkpoint in {folder}", also)
    driver.steps = found.step
    driver.reset()
    if said:
        driver.members_moved = True
        if model.leads:
            print(f"gossamer: {said}", flush=True)
    return True


def _setup_of(model: DecentralizedDataParallel, there: Mapping[str, Any]) -> dict[str, str]:
    """What a checkpoint of any number of workers must have: the same graph, or one that does not exist for the number of now."""
    here, graph = _whole_setup(model), str(there.get("graph"))
    if there.get("workers") == here["workers"]:
        return here
    here["workers"] = there["workers"]
    if ALL_REDUCE not in (graph, here["graph"]):
        try:
            same = schedule(graph, int(here["workers"])).sized(model.schedule.n).describe() == here["graph"]
        except GossamerError:
            same = not model.schedule.watches  # what was learnt about another graph is of no use
        here["graph"] = graph if same else here["graph"]
    return here


def _resize(model: DecentralizedDataParallel, found: Snapshot, size: int, how: Resize) -> str:
    """What depends on the number of workers begins anew: means that all knew, and the graph. Returns what to say about it."""
    planned, part = model.schedule, model._driver.now.part
    before, _ = rebuilt(planned, size)
    before.load_state_dict(found.parts["schedule"])
    after, _ = rebuilt(planned, planned.n, before)
    if how == "average":
        rows = "the mean of all parameters and of the optimizer's state"
    elif size > model.size:
        rows = f"the row of the same number ({size - model.size} {'is' if size == model.size + 1 else 'are'} dropped)"
    else:
        rows = f"the row of its number modulo {size}"
    own = (
        f"; the state of method {model.method.name!r} comes with it, and what depends on its neighbours begins anew"
        if part
        else ""
    )
    now, then = planned.describe(), str(found.setup["graph"])
    graph = f"; the graph was {then} and is {now}" if ALL_REDUCE != then != now else ""
    said = f"step {found.step} of {size} workers goes on with {model.size}: each takes over {rows}{own}{graph}"
    after.changes = before.changes
    after.note(found.step, f"{now} over {model.size}", said)
    found.parts.update(schedule=after.state_dict(), means=[])
    return said


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
    with policies.method_of(driver, parts, where):
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
        equal=model.averages_gradients or any(method.alike for method in driver.methods),
    )
    if seat.joins:
        driver.steps = made.position()
    return made


def layout(model: DecentralizedDataParallel) -> Layout:
    driver = model._driver
    return worker.layout(driver.now.part, others=[method.name for method in driver.methods] if len(driver.methods) > 1 else ())


def setup(model: DecentralizedDataParallel) -> dict[str, str]:
    """What must be the same on all workers, and in a checkpoint."""
    graph, first = model.schedule.describe(), model._driver.methods[0]
    order = first.describe()
    if first.name == ALL_REDUCE and not isinstance(model.schedule, Policy):
        graph, order = ALL_REDUCE, "awc"  # as checkpoints have it
    return {"graph": graph, "order": order, "local_steps": str(model.local_steps), "workers": str(model.size)}


def _whole_setup(model: DecentralizedDataParallel) -> dict[str, str]:
    optimizers = model._driver.optimizers
    return setup(model) | {"wire": model._mixer.wire.name, **worker.signature(model._bare(), optimizers)}
