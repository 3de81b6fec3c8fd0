"""A snapshot: what one worker, or one Trainer, knows at one step, in named parts. Checkpoints and the state for a newcomer hold it.

A file lists its parts and whether a reader must know them. So a part that is new later (the own state of a method: ``methods/NAME``)
needs no new version: a Gossamer that does not know it refuses it by name, or leaves it out if it is optional.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gossamer.checkpoints import checkpoint
from gossamer.checkpoints.checkpoint import Unreadable
from gossamer.errors import GossamerError

AVERAGED = "averaged.safetensors"
INSTEAD = f"to go on in another way, load {AVERAGED} into the bare module before it is wrapped"
_SHOWN = 4  # differences that an error names


@dataclass(frozen=True)
class Snapshot:
    step: int
    setup: Mapping[str, Any]  # what must be the same for a run to go on
    parts: dict[str, Any]
    version: int = 2


@dataclass(frozen=True)
class Layout:
    """``parts``: the names that a reader knows, all of which must be there. ``optional``: those that older files lack. ``upgrade``: tensors
    and header of version 1 as a snapshot."""

    parts: tuple[str, ...]
    upgrade: Callable[[dict[str, Tensor], dict[str, Any]], Snapshot]
    setup: str = "another set-up"  # how an error calls a difference
    shown: Callable[[Any], str] = str
    instead: str = ""  # what else one can do
    optional: tuple[str, ...] = ()


def save(path: Path, made: Snapshot, optional: Collection[str] = ()) -> None:
    tensors, parts = pack(made.parts, optional)
    checkpoint.save(path, tensors, {"step": made.step, "setup": dict(made.setup), "parts": parts})


def load(path: Path, layout: Layout, device: torch.device | str = "cpu") -> Snapshot:
    """Any damage is one line."""
    tensors, header = checkpoint.load(path)
    tensors = {key: tensor.to(device) for key, tensor in tensors.items()}
    if "parts" not in header:
        try:
            return layout.upgrade(tensors, header)
        except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
            what = error if isinstance(error, GossamerError) else f"{type(error).__name__}: {error}"
            raise Unreadable(f"{path} is damaged or not such a checkpoint: {what}") from None
    step, setup = header.get("step"), header.get("setup")
    if not isinstance(step, int) or not isinstance(setup, dict):
        raise Unreadable(f"{path} is damaged or not a checkpoint: it names no step or no set-up")
    return Snapshot(step, setup, unpack(header["parts"], tensors, layout, str(path)))


def refuse_other(there: Snapshot, here: Mapping[str, Any], layout: Layout, where: str) -> None:
    """The set-up must be the same. Version 1 did not write down all of it."""
    keys = [*there.setup] if there.version == 1 else [*{**here, **there.setup}]
    show = layout.shown
    differ = [
        f"{key} ({_value(there.setup, key, show)} there, {_value(here, key, show)} here)"
        for key in sorted(keys, key=lambda key: list(here).index(key) if key in here else len(here))
        if there.setup.get(key) != here.get(key)
    ]
    more = [f"and {len(differ) - _SHOWN} more"] if len(differ) > _SHOWN else []
    if differ:
        instead = f"; {layout.instead}" if layout.instead else ""
        raise GossamerError(f"{where} was made with {layout.setup}: {'; '.join(differ[:_SHOWN] + more)}{instead}")


def _value(setup: Mapping[str, Any], key: str, show: Callable[[Any], str]) -> str:
    return show(setup[key]) if key in setup else "none"


def pack(parts: Mapping[str, Any], optional: Collection[str] = ()) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The parts as tensors and JSON."""
    tensors: dict[str, Tensor] = {}
    listed = {name: {"required": name not in optional, "value": flatten(name, value, tensors)} for name, value in parts.items()}
    return tensors, listed


def unpack(listed: Any, tensors: dict[str, Tensor], layout: Layout, where: str) -> dict[str, Any]:
    """The parts that are known, all of them but the optional ones."""
    if not isinstance(listed, dict) or not all(
        isinstance(part, dict) and isinstance(part.get("required"), bool) and "value" in part for part in listed.values()
    ):
        raise Unreadable(f"{where} is damaged or not a checkpoint: it has no list of parts")
    known = [*layout.parts, *(name for name in layout.optional if name in listed)]
    strange = [name for name, part in listed.items() if part["required"] and name not in known]
    if strange:
        raise GossamerError(
            f"{where} holds the part {strange[0]!r}, which this Gossamer does not know and can't leave out; use the one that wrote it"
        )
    lacking = [name for name in known if name not in listed]
    if lacking:
        raise Unreadable(f"{where} is damaged or not such a checkpoint: it has no part {lacking[0]!r}")
    try:
        return {name: unflatten(listed[name]["value"], tensors) for name in known}
    except Unreadable as error:
        raise Unreadable(f"{where} is damaged: {error}") from None


def flatten(prefix: str, value: Any, tensors: dict[str, Tensor]) -> Any:
    """A nest of dicts, lists and tensors as JSON; the tensors go to ``tensors`` and leave their keys behind."""
    if isinstance(value, Tensor):
        while prefix in tensors:  # {"a.b": …, "a": {"b": …}}
            prefix += "'"
        tensors[prefix] = value
        return {"__tensor__": prefix}
    if isinstance(value, Counter):  # MultiStepLR keeps its milestones in one
        return {"__counter__": [[_key(key), item] for key, item in value.items()]}
    if isinstance(value, dict):
        return {"__dict__": [[_key(key), flatten(f"{prefix}.{key}", item, tensors)] for key, item in value.items()]}
    if isinstance(value, tuple):
        return {"__tuple__": [flatten(f"{prefix}.{k}", item, tensors) for k, item in enumerate(value)]}
    if isinstance(value, list):
        return [flatten(f"{prefix}.{k}", item, tensors) for k, item in enumerate(value)]
    return value


def unflatten(value: Any, tensors: dict[str, Tensor]) -> Any:
    """The inverse of :func:`flatten`; what that can't have written is refused."""
    try:
        return _nest(value, tensors)
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise Unreadable(f"a part of its header makes no sense ({type(error).__name__}: {error})") from None


def _nest(value: Any, tensors: dict[str, Tensor]) -> Any:
    if isinstance(value, list):
        return [_nest(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == "__tensor__":
        return tensors[content]
    if not isinstance(content, list):
        raise TypeError(f"{kind} is no list")
    if kind == "__tuple__":
        return tuple(_nest(item, tensors) for item in content)
    if kind == "__counter__":
        return Counter({_key(key): item for key, item in content})
    if kind == "__dict__":
        nest = {_key(key): _nest(item, tensors) for key, item in content}
        if len(nest) == len(content):
            return nest
    raise ValueError(f"{kind} is not known, or has a key twice")


def _key(key: Any) -> Any:
    if key is None or isinstance(key, (str, int, float)):
        return key
    raise GossamerError(
        f"a state_dict holds what a checkpoint can't: the key {key!r} of a {type(key).__name__}; keys are text or numbers"
    )
