"""A checkpoint is one safetensors file with a JSON header: no pickle, and it is there whole or not at all."""

from __future__ import annotations

import contextlib
import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from gossamer.errors import GossamerError


class Unreadable(GossamerError):
    """Not there, damaged, or of another version."""


_FORMAT = "gossamer-checkpoint-1"


def save(path: Path, tensors: dict[str, Tensor], header: dict[str, Any]) -> None:
    write(path, tensors, {"format": _FORMAT, "header": json.dumps(header)})


def write(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    """Written beside ``path`` and moved there in one step, so a crash leaves the old file or the new one."""
    name = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        safetensors.torch.save_file(_apart(tensors), name, metadata=metadata)
        with open(name, "rb") as file:
            os.fsync(file.fileno())
        os.replace(name, path)
    except (OSError, safetensors.SafetensorError) as error:
        raise GossamerError(f"the checkpoint {path} can't be written: {error}; the one before it is kept") from None
    finally:
        name.unlink(missing_ok=True)


def _apart(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """safetensors takes contiguous tensors that share no memory; tied ones are written twice, views of one buffer copied."""
    seen: set[int] = set()
    made: dict[str, Tensor] = {}
    for key, tensor in tensors.items():
        storage = tensor.untyped_storage().data_ptr()
        made[key] = tensor.clone(memory_format=torch.contiguous_format) if storage in seen else tensor.contiguous()
        seen.add(storage)
    return made


def load(path: Path, device: torch.device | str = "cpu") -> tuple[dict[str, Tensor], dict[str, Any]]:
    if not path.is_file():
        raise Unreadable(f"there is no checkpoint at {path}")
    try:
        with safetensors.safe_open(path, framework="pt", device=str(device)) as file:
            metadata = file.metadata() or {}
            if metadata.get("format") != _FORMAT:
                raise Unreadable(f"{path} is not a checkpoint that this Gossamer reads ({_FORMAT})")
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118  (not a dict)
            return tensors, json.loads(metadata["header"])
    except (safetensors.SafetensorError, json.JSONDecodeError, KeyError) as error:
        raise Unreadable(f"{path} is damaged or not a checkpoint: {error}") from None


def dumps(tensors: dict[str, Tensor], header: dict[str, Any]) -> bytes:
    """The same as bytes, to be sent."""
    return safetensors.torch.save(_apart(tensors), {"format": _FORMAT, "header": json.dumps(header)})


def loads(data: bytes) -> tuple[dict[str, Tensor], dict[str, Any]]:
    try:
        length = int.from_bytes(data[:8], "little")
        metadata = json.loads(data[8 : 8 + length]).get("__metadata__", {})
        if metadata.get("format") != _FORMAT:
            raise Unreadable(f"what was sent is not a state that this Gossamer reads ({_FORMAT})")
        return safetensors.torch.load(data), json.loads(metadata["header"])
    except (safetensors.SafetensorError, json.JSONDecodeError, KeyError) as error:
        raise Unreadable(f"the state that was sent is damaged: {error}") from None


def remove(path: Path) -> None:
    """A checkpoint, or a folder of them."""
    if path.is_dir():
        with contextlib.suppress(OSError):  # another process may be at it, or done with it
            for file in path.iterdir():
                file.unlink(missing_ok=True)
            path.rmdir()
    else:
        path.unlink(missing_ok=True)


def flatten(prefix: str, value: Any, tensors: dict[str, Tensor]) -> Any:
    """A nest of dicts, lists and tensors as JSON; the tensors go to ``tensors`` and leave their keys behind."""
    if isinstance(value, Tensor):
        while prefix in tensors:  # {"a.b": …, "a": {"b": …}}
            prefix += "'"
        tensors[prefix] = value
        return {"__tensor__": prefix}
    if isinstance(value, Counter):  # MultiStepLR keeps its milestones in one
        return {"__counter__": [[key, item] for key, item in value.items()]}
    if isinstance(value, dict):
        return {"__dict__": [[key, flatten(f"{prefix}.{key}", item, tensors)] for key, item in value.items()]}
    if isinstance(value, tuple):
        return {"__tuple__": [flatten(f"{prefix}.{k}", item, tensors) for k, item in enumerate(value)]}
    if isinstance(value, list):
        return [flatten(f"{prefix}.{k}", item, tensors) for k, item in enumerate(value)]
    return value


def unflatten(value: Any, tensors: dict[str, Tensor]) -> Any:
    """The inverse of :func:`flatten`."""
    if isinstance(value, list):
        return [unflatten(item, tensors) for item in value]
    if isinstance(value, dict):
        if "__tensor__" in value:
            return tensors[value["__tensor__"]]
        if "__counter__" in value:
            return Counter(dict(value["__counter__"]))
        if "__tuple__" in value:
            return tuple(unflatten(item, tensors) for item in value["__tuple__"])
        return {key: unflatten(item, tensors) for key, item in value["__dict__"]}
    return value
