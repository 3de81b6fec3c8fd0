"""``"name:key=value,key=value"``, as people write graphs, schedules, methods and partitions: read, checked and written in one place."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, is_dataclass
from types import NoneType, UnionType
from typing import Any, Generic, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from gossamer.errors import GossamerError

T = TypeVar("T")
_TYPES = {int: "an integer", float: "a number", str: "a word", bool: "true or false", NoneType: "none"}
_EXAMPLES = {(int,): "10", (float,): "0.3", (bool,): "true"}
_WORDS: dict[Any, tuple[object, ...]] = {bool: (True, False), NoneType: (None,)}


def plain_name(text: str) -> str:
    """What stands before the options, as it is looked up: ``One_Peer_Ring`` is ``one-peer-ring``."""
    return text.partition(":")[0].strip().lower().replace("_", "-")


def nearest(wrong: str, names: Iterable[str], otherwise: str | None = None) -> str:
    """How an error about a name ends: with the one that was probably meant; else with ``otherwise``, or with all of them."""
    near = difflib.get_close_matches(wrong, names := list(names), n=1, cutoff=0.5)
    return f"did you mean {near[0]!r}?" if near else f"known are {', '.join(names)}" if otherwise is None else otherwise


def spelled(name: str, options: Mapping[str, object]) -> str:
    return ":".join(filter(None, (name, ",".join(f"{key}={_shown(value)}" for key, value in options.items()))))


def _shown(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) or value is None else str(value)


@dataclass(frozen=True)
class Registry(Generic[T]):
    """Functions or frozen dataclasses by name. Their parameters are the options, and the annotations say what can be written for them:
    int, float, bool, str, None, a Literal, or several. Other parameters are no options, nor are those in ``own``."""

    kind: str  # "graph": for errors
    makers: dict[str, Callable[..., T]] = field(default_factory=dict)
    own: tuple[str, ...] = ()  # what the caller gives by itself: "n"

    def make(self, text: str, *own: object, also: Iterable[str] = ()) -> T:
        name, options = self.read(text, also)
        return self.makers[name](*own, **options)

    def read(self, text: str, also: Iterable[str] = ()) -> tuple[str, dict[str, Any]]:
        """The name, and the options that are given. ``also``: names that only the caller knows; an error names them too."""
        name, options = plain_name(text), dict[str, Any]()
        if name not in self.makers:
            raise GossamerError(f"there is no {self.kind} {name!r}; {nearest(name, sorted([*self.makers, *also]))}")
        takes = self._takes(name)
        for part in filter(None, map(str.strip, text.partition(":")[2].split(","))):
            key, equals, value = map(str.strip, part.partition("="))
            if not equals:
                raise GossamerError(f"{self.kind} {text!r}: {part!r} is not of the form key=value")
            try:
                options[key] = _value(value, takes[key].annotation) if key in takes else value
            except ValueError as right:
                raise GossamerError(f"{self.kind} {text!r}: {key}={value!r} is not {right}") from None
        return name, self.checked(name, given=options)

    def checked(self, name: str, values: Sequence[Any] = (), given: dict[str, Any] | None = None) -> dict[str, Any]:
        """What a caller gives for the options of a maker, in their order or by name: an error for what it does not take, or lacks."""
        what, takes = f"{self.kind} {name!r}", self._takes(name)
        shown = ", ".join(k if p.default in (p.empty, None) else f"{k} (default {_shown(p.default)})" for k, p in takes.items())
        if len(values) > len(takes):
            raise GossamerError(f"{what} got {len(values)} values beside {', '.join(self.own)}; it takes {shown or 'none'}")
        options = dict(zip(takes, values, strict=False)) | (given or {})
        for key, value in options.items():
            if key not in takes:
                wrong = f"{what} has no parameter {key!r}; it takes {shown or 'none'}"
                raise GossamerError("; ".join(filter(None, (wrong, nearest(key, takes, "")))))
            types = takes[key].annotation
            if types == (int,) and (isinstance(value, bool) or int(value) != value):
                raise GossamerError(f"{what}: {key}={value!r} is not {_TYPES[int]}")
        for key, p in takes.items():
            if p.default is p.empty and key not in options:
                raise GossamerError(f"{what} needs {key!r}, as in '{name}:{key}={_EXAMPLES.get(p.annotation, '…')}'")
        return options

    def describe(self, name: str, options: Mapping[str, object]) -> str:
        """The canonical spelling of these options: those that have their default are left out."""
        takes = inspect.signature(self.makers[name]).parameters
        return spelled(name, {key: value for key, value in options.items() if value != takes[key].default})

    def _takes(self, name: str) -> dict[str, inspect.Parameter]:
        maker: Any = self.makers[name]
        hints = get_type_hints(maker if is_dataclass(maker) or inspect.isfunction(maker) else maker.__init__)
        typed = (p.replace(annotation=_types(hints.get(p.name))) for p in inspect.signature(maker).parameters.values())
        return {p.name: p for p in typed if p.annotation and p.name not in self.own}


def _types(annotation: Any) -> tuple[Any, ...]:
    """What can be written for an annotation, or nothing."""
    types = get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)
    return types if all(t in _TYPES or get_origin(t) is Literal for t in types) else ()


def _value(text: str, types: tuple[Any, ...]) -> object:
    words = {str(word).lower(): word for t in types for word in _WORDS.get(t, get_args(t))}
    if text.lower() in words:
        return words[text.lower()]
    for make in (t for t in (int, float, str) if t in types):
        with suppress(ValueError):
            return make(text)
    raise ValueError(" or ".join(_TYPES.get(t) or ", ".join(map(str, get_args(t))) for t in types))
