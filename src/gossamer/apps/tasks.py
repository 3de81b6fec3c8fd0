"""The tasks that a spec can name: a data set and a model for it."""

from __future__ import annotations

import difflib
import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from gossamer.apps import data, models
from gossamer.errors import GossamerError
from gossamer.tasks import Task


def _digits_mlp(folder: Path | None) -> Task:
    train, test = data.digits()
    return Task("digits/mlp", functools.partial(models.mlp, 64, 10, (64,)), train, test)


def _fashion_mlp(folder: Path | None) -> Task:
    train, test = data.fashion_mnist(folder)
    return Task("fashion-mnist/mlp", functools.partial(models.mlp, 784, 10, (128, 128)), train, test)


_TASKS: dict[str, Callable[[Path | None], Task]] = {"digits/mlp": _digits_mlp, "fashion-mnist/mlp": _fashion_mlp}


def names() -> list[str]:
    return sorted(_TASKS)


def check(name: str, options: Mapping[str, Any] | None = None) -> None:
    if name not in _TASKS:
        near = difflib.get_close_matches(name, names(), n=1, cutoff=0.4)
        hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(names())}"
        raise GossamerError(f"task.name: there is no task {name!r}; {hint}")


def make(name: str, folder: Path | None = None, options: Mapping[str, Any] | None = None) -> Task:
    check(name)
    return _TASKS[name](folder)
