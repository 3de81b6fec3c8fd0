"""All that a worker knows, in named parts: for its checkpoint, and for a newcomer. What does not fit is refused before anything changes."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from gossamer.checkpoints.checkpoint import Unreadable
from gossamer.checkpoints.snapshot import INSTEAD, Layout, Snapshot, unflatten
from gossamer.errors import GossamerError
from gossamer.schedules import Schedule

# States of torch's optimizers that have the shape of their parameter.
_LIKE_PARAMETER = {
    *("momentum_buffer", "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "exp_inf", "sum", "square_avg", "grad_avg", "acc_delta"),
    *("prev", "step_size", "ax"),
}


class Holder(Protocol):
    """Of a method's own state."""

    @property
    def part(self) -> str | None:
        """The name of its part; None if there is no state."""

    def state_dict(self) -> dict[str, list[Tensor]]: ...

    def load_state_dict(self, state: Mapping[str, Sequence[Tensor]]) -> None: ...


def capture(
    module: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    schedule: Schedule,
    signals: dict[str, float],
    also: Mapping[str, Any],
    method: Holder,
) -> dict[str, Any]:
    own = {method.part: method.state_dict()} if method.part else {}
    return own | {
        "model": dict(module.state_dict()),
        "optimizers": [
            {"class": type(optimizer).__name__, "parameters": _names(module, optimizer), "state": optimizer.state_dict()}
            for optimizer in optimizers
        ],
        "schedule": schedule.state_dict(),
        "signals": dict(signals),
        "also": {name: {"class": type(thing).__name__, "state": thing.state_dict()} for name, thing in also.items()},
    }


def signature(module: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> dict[str, str]:
    """What must be the same for a state to fit."""
    names = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    tensors = {name: t for name, t in module.state_dict().items() if isinstance(t, Tensor)}
    described = {f"{'parameter' if name in names else 'buffer'} {name!r}": _shown(t) for name, t in tensors.items()}
    return {"the optimizers": ", ".join(type(optimizer).__name__ for optimizer in optimizers) or "none", **described}


def check(
    state: dict[str, Any],
    where: str,
    module: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    also: Mapping[str, Any],
    method: Holder,
) -> None:
    """Refuses, in one line, a state that is damaged, or of another model, of other optimizers or other things in ``also``."""
    _check_structure(state, where)
    missing = set(also) ^ set(state["also"])
    if missing:
        raise GossamerError(f"{where} and `also` differ: {', '.join(sorted(map(str, missing)))}")
    for name, thing in also.items():
        _check_class(where, f"also[{name!r}]", state["also"][name]["class"], thing)
    if len(state["optimizers"]) != len(optimizers):
        raise GossamerError(
            f"{where} holds {len(state['optimizers'])} optimizers and gossip() was given "
            f"{len(optimizers)}; call model.gossip(optimizer) before model.load()"
        )
    _check_tensors(state["model"], where, module.state_dict())
    if method.part:
        check_vectors(state.get(method.part), where, method)
    for k, (optimizer, saved) in enumerate(zip(optimizers, state["optimizers"], strict=True)):
        what = "the optimizer" if len(optimizers) == 1 else f"optimizer {k}"
        _check_class(where, what, saved["class"], optimizer)
        _check_parameters(saved["parameters"], f"{where}: {what}", _names(module, optimizer), dict(module.named_parameters()))
        check_optimizer(saved["state"], f"{where}: {what}", optimizer)


def restore(
    state: dict[str, Any],
    where: str,
    module: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    schedule: Schedule,
    also: Mapping[str, Any],
    method: Holder,
) -> dict[str, float]:
    """Takes over all of it or nothing. Returns the signals."""
    check(state, where, module, optimizers, also, method)
    things: list[tuple[str, Any, Any]] = [("the model", module, state["model"])]
    things += [("an optimizer", thing, saved["state"]) for thing, saved in zip(optimizers, state["optimizers"], strict=True)]
    things += [(f"also[{name!r}]", thing, state["also"][name]["state"]) for name, thing in also.items()]
    things += [("the schedule", schedule, state["schedule"])]
    things += [("the method", method, state[method.part])] if method.part else []
    undo: list[Callable[[], object]] = []
    for what, thing, saved in things:
        before = _copied(thing.state_dict())
        undo.append(functools.partial(thing.load_state_dict, before))
        try:
            thing.load_state_dict(saved)
        except Exception as error:  # a person's own load_state_dict may raise anything
            for back in reversed(undo):
                with contextlib.suppress(Exception):  # what refuses its own state of before does not hold up the others
                    back()
            reason = " ".join(str(error).split()) or type(error).__name__
            raise GossamerError(f"{where} does not fit: {what} refuses its state: {reason}") from error
    return dict(state["signals"])


def _copied(value: Any) -> Any:
    """On the CPU, where there is more room."""
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    if type(value) in (dict, OrderedDict):
        return {key: _copied(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(_copied, value))
    return copy.deepcopy(value)


# --- Version 1 ----------------------------------------------------------------------------------------------------------------


def _upgrade(tensors: dict[str, Tensor], header: dict[str, Any]) -> Snapshot:
    """Version 1 had no classes of optimizers and no parameters' names."""
    state = unflatten(header["state"], tensors)
    optimizers = [{"class": None, "parameters": None, "state": saved} for saved in state["optimizers"]]
    also = {name: {"class": None, "state": saved} for name, saved in state["also"].items()}
    parts = {"means": [], **state, "optimizers": optimizers, "also": also}
    step, setup = header["step"], header["setup"]
    if not isinstance(step, int) or not isinstance(setup, dict) or not set(setup) >= {"graph", "order", "workers"}:
        raise Unreadable("it names no step or no set-up")
    _check_structure(parts, "version 1")
    return Snapshot(step, setup, parts, version=1)


_PARTS = ("model", "optimizers", "schedule", "signals", "also", "means")
LAYOUT = Layout(_PARTS, _upgrade, instead=INSTEAD, optional=("progress",))


def layout(part: str | None, base: Layout = LAYOUT, others: Sequence[str] = ()) -> Layout:
    """With the own state of a method, if it has any; or of one of several, by name."""
    if others:
        return replace(base, optional=(*base.optional, *(f"methods/{name}" for name in {*others})))
    return replace(base, parts=(*base.parts, part)) if part else base


# --- What does not fit --------------------------------------------------------------------------------------------------------


def _check_structure(state: dict[str, Any], where: str) -> None:
    kinds = {"model": dict, "optimizers": list, "schedule": dict, "signals": dict, "also": dict, "means": list}
    for name, kind in kinds.items():
        if not isinstance(state.get(name), kind):
            raise Unreadable(f"{where} is damaged: its part {name!r} is missing or no {kind.__name__}")
    holders = [*state["optimizers"], *state["also"].values()]
    if not all(isinstance(held, dict) and {"class", "state"} <= set(held) for held in holders):
        raise Unreadable(f"{where} is damaged: the state of an optimizer, or in `also`, is missing")
    if not all(isinstance(value, (int, float)) for value in state["signals"].values()):
        raise Unreadable(f"{where} is damaged: a signal is no number")
    if not all(isinstance(saved.get("parameters", ""), (list, type(None))) for saved in state["optimizers"]):
        raise Unreadable(f"{where} is damaged: an optimizer's parameters are no list")
    check_means(state["means"], where)
    check_progress(state.get("progress", {"graph": None, "blocks": []}), where)


def check_progress(progress: Any, where: str) -> None:
    """The graph of the last step, and the names of each block's parameters."""
    right = (
        isinstance(progress, dict)
        and isinstance(progress.get("graph", ()), str | None)
        and isinstance(progress.get("blocks"), list)
        and all(isinstance(names, list) and names and all(isinstance(n, str) for n in names) for names in progress["blocks"])
    )
    if not right:
        raise Unreadable(f"{where} is damaged: its part 'progress' makes no sense")


def check_vectors(saved: Any, where: str, method: Holder, rows: int = 1) -> None:
    """A method's own state: of each vector a tensor per dtype, with so many rows."""
    if not isinstance(saved, dict) or not all(isinstance(tensors, list) for tensors in saved.values()):
        raise Unreadable(f"{where} is damaged: its part {method.part!r} makes no sense")
    there, here = (
        {
            name: [_shown(tensor[:0]) if isinstance(tensor, Tensor) else "?" for tensor in tensors]
            for name, tensors in state.items()
        }
        for state in (saved, method.state_dict())
    )
    if there != here or any(len(tensor) != rows for tensors in saved.values() for tensor in tensors):
        raise Unreadable(f"{where} is damaged or of another model: {method.part!r} is {there} there and {here} here")


def check_means(means: Any, where: str) -> None:
    """What the mixer keeps of each block: the last mean, its step, and how far a number went."""
    for held in means if isinstance(means, list) else [()]:
        right = held is None or (
            isinstance(held, dict)
            and isinstance(held.get("mean"), Tensor)
            and held["mean"].ndim == 1
            and isinstance(held.get("step"), int)
            and isinstance(held.get("furthest", 0.0), (int, float))
        )
        if not right:
            raise Unreadable(f"{where} is damaged: a mean in its part 'means' makes no sense")


def _check_class(where: str, what: str, name: str | None, thing: object) -> None:
    if name not in (None, type(thing).__name__):
        raise GossamerError(f"{where} does not fit: {what} is {_a(name)} there and {_a(type(thing).__name__)} here")


def _a(name: object) -> str:
    return f"{'an' if str(name)[:1] in 'AEIOU' else 'a'} {name}"


def _check_tensors(saved: dict[str, Any], where: str, here: Mapping[str, Any]) -> None:
    """The first tensor of a model that is missing, unknown, or of another shape or dtype."""
    for name in {**here, **saved}:
        there, mine = (_shown(values[name]) if name in values else "missing" for values in (saved, here))
        if there != mine:
            raise GossamerError(f"{where} is of another model: {name!r} is {there} there and {mine} here")


def _shown(value: Any) -> str:
    return f"{str(value.dtype)[6:]} {list(value.shape)}" if isinstance(value, Tensor) else "no tensor"


def _names(module: nn.Module, optimizer: torch.optim.Optimizer) -> list[list[str]]:
    """The names of an optimizer's parameters, group by group."""
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    return [[names.get(id(parameter), "?") for parameter in group["params"]] for group in optimizer.param_groups]


def _check_parameters(there: Any, where: str, here: list[list[str]], parameters: Mapping[str, Tensor]) -> None:
    """The first parameter of an optimizer that is another one. Version 1 has no names."""
    if there is None or there == here:
        return
    if len(there) != len(here):
        raise GossamerError(f"{where} has {_count(len(there), 'parameter group')} there and {len(here)} here")
    for k, (theirs, mine) in enumerate(zip(there, here, strict=True)):
        if theirs != mine:
            i = next((i for i, (a, b) in enumerate(zip(theirs, mine, strict=False)) if a != b), min(len(theirs), len(mine)))
            shown = [
                f"{names[i]!r} {_shown(parameters[names[i]]) if names[i] in parameters else ''}".strip()
                if i < len(names)
                else "none"
                for names in (theirs, mine)
            ]
            raise GossamerError(
                f"{where} has other parameters: number {i} of group {k} is {shown[0]} there and {shown[1]} here"
            )


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def check_optimizer(saved: Any, where: str, optimizer: torch.optim.Optimizer) -> None:
    """A state_dict that this optimizer would take, and work with: torch itself looks at the number of parameters only."""
    groups = saved.get("param_groups") if isinstance(saved, dict) else None
    states = saved.get("state") if isinstance(saved, dict) else None
    if not isinstance(states, dict) or not isinstance(groups, list):
        raise Unreadable(f"{where} is damaged: its state has no parameter groups")
    if not all(isinstance(group, dict) and isinstance(group.get("params"), list) for group in groups):
        raise Unreadable(f"{where} is damaged: a parameter group makes no sense")
    here = optimizer.param_groups
    if len(groups) != len(here):
        raise GossamerError(f"{where} has {_count(len(groups), 'parameter group')} there and {len(here)} here")
    for k, (theirs, mine) in enumerate(zip(groups, here, strict=True)):
        if len(theirs["params"]) != len(mine["params"]):
            counts = f"{_count(len(theirs['params']), 'parameter')} there and {len(mine['params'])} here"
            raise GossamerError(f"{where} has in group {k} {counts}")
        # torch itself fills in what a newer version has added; what one has and what the other has are of two optimizers.
        lacks, strange = ({*optimizer.defaults} - {*theirs}), ({*theirs} - {*mine} - {*optimizer.defaults, "initial_lr"})
        if lacks and strange:
            words = ", ".join(sorted(map(str, strange))), ", ".join(sorted(lacks)), type(optimizer).__name__
            raise GossamerError(f"{where} was another one: it has {words[0]} and no {words[1]}, which {_a(words[2])} needs")
    numbers = [number for group in groups for number in group["params"]]
    parameters = dict(zip(numbers, (p for group in here for p in group["params"]), strict=True))
    for number, held in states.items():
        if number not in parameters or not isinstance(held, dict):
            raise Unreadable(f"{where} is damaged: there is a state for parameter {number!r} of {len(parameters)}")
        _check_state(held, f"{where}, parameter {number}", parameters[number], optimizer.state.get(parameters[number], {}))


def _check_state(held: dict[str, Any], where: str, parameter: Tensor, own: Mapping[str, Any]) -> None:
    if own and set(own) != set(held):
        raise GossamerError(
            f"{where} was of another one: it holds {', '.join(map(str, held))} there and {', '.join(map(str, own))} here"
        )
    for name, value in held.items():
        if name in _LIKE_PARAMETER and isinstance(value, Tensor) and value.ndim and value.shape != parameter.shape:
            raise GossamerError(f"{where} does not fit: {name} is {list(value.shape)} there and {list(parameter.shape)} here")
