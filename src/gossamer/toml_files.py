"""TOML files by name (those that come with Gossamer) or by path (a person's own), and what is wrong in them."""

from __future__ import annotations

import copy
import difflib
import json
import math
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError, ValidationInfo

from gossamer.errors import GossamerError


class Part(BaseModel):
    """A table of a file. It takes no key that it does not know, and no value of another type."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


def stored(info: ValidationInfo) -> bool:
    """Whether this was valid when a run was made of it: what is refused since then, or not known here, does not matter any more."""
    return bool(info.context)


@dataclass(frozen=True)
class Shelf:
    """The files of one ``kind`` (spec, cluster) that lie in ``package``."""

    kind: str
    package: str

    def names(self) -> list[str]:
        files = resources.files(self.package).iterdir()
        return sorted(file.name.removesuffix(".toml") for file in files if file.name.endswith(".toml"))

    def text(self, what: str | Path) -> str:
        """A file is taken before one of ours of the same name."""
        path = Path(what)
        if str(what) in self.names() and not path.is_file():
            return (resources.files(self.package) / f"{what}.toml").read_text(encoding="utf-8")
        if not path.is_file():
            near = difflib.get_close_matches(str(what), self.names(), n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"shipped {self.kind}s are {', '.join(self.names())}"
            raise GossamerError(f"there is no {self.kind} {str(what)!r}, neither as a file nor by name; {hint}")
        try:
            return path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise GossamerError(f"{self.kind} {path} can't be read: {error}") from None


def parsed(text: str, where: str) -> dict[str, Any]:
    """Raises nothing but GossamerError, whatever the text."""
    try:
        return tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError, ValueError) as error:
        raise GossamerError(f"{where} is not valid TOML: {error}") from None


def changed(raw: dict[str, Any], changes: Sequence[str]) -> dict[str, Any]:
    """A file's content with some keys set, each as ``seeds=[0]`` or ``task.epochs=2``. What is no TOML value is taken as text."""
    made = copy.deepcopy(raw)
    for change in changes:
        key, sign, text = (part.strip() for part in change.partition("="))
        if not sign or not all(part.strip() for part in key.split(".")):
            raise GossamerError(f"{change!r} is not KEY=VALUE, such as seeds=[0] or task.epochs=2")
        *path, last = key.split(".")
        table = made
        for depth, part in enumerate(path, start=1):
            table = table.setdefault(part, {})
            if not isinstance(table, dict):
                above = ".".join(path[:depth])
                raise GossamerError(
                    f"{change!r}: {above} is not a table, so nothing in it has a name; give all of it: {above}=…"
                )
        table[last] = _value(change, text)
    return made


def _value(change: str, text: str) -> Any:
    try:
        found = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError as error:
        if not text or text[0] in "[{'\"":
            raise GossamerError(
                f"{change!r}: {text or 'nothing'} is not a TOML value; quote it for the shell: '{change}'"
            ) from error
        return text
    return found["value"] if len(found) == 1 else text


def explained(error: ValidationError, whole: type[BaseModel], parts: Mapping[str, type[BaseModel]]) -> str:
    """The first five of pydantic's faults. What it says of a table or list because of a fault inside of it is left out."""
    faults = error.errors()
    within = {fault["loc"][:k] for fault in faults for k in range(len(fault["loc"]))}
    shown = [fault for fault in faults if fault["loc"] not in within][:5]
    return "; ".join(_explain(fault, whole, parts) for fault in shown)


def _explain(fault: Any, whole: type[BaseModel], parts: Mapping[str, type[BaseModel]]) -> str:
    """One of pydantic's faults as: which key, what is wrong, what would be right.

    ``parts``: the tables of ``whole`` by their key, to know which keys they take."""
    key = ".".join(str(part) for part in fault["loc"])
    if fault["type"] == "extra_forbidden":
        tables = (parts[str(part)] for part in reversed(fault["loc"][:-1]) if str(part) in parts)
        owner = next(tables, whole)
        near = difflib.get_close_matches(str(fault["loc"][-1]), list(owner.model_fields), n=1, cutoff=0.5)
        hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(owner.model_fields)}"
        return f"{key} is not a known key; {hint}"
    if fault["type"] == "missing":
        return f"{key} is missing"
    message = str(fault["msg"]).removeprefix("Value error, ").replace("\n", " ")
    given = "" if fault["type"] == "value_error" else f" (it is {fault['input']!r:.60})".replace("\n", " ")
    return f"{key}: {message}{given}" if key else message


def written(data: Mapping[str, Any]) -> str:
    """As TOML: plain keys first, then a table for each mapping; of a mapping of mappings, a table for each of these."""
    tables = {key: value for key, value in data.items() if isinstance(value, Mapping)}
    lines = [f"{_key(key)} = {_toml(value)}" for key, value in data.items() if key not in tables]
    for key, table in tables.items():
        whole: dict[tuple[str, ...], Mapping[str, Any]] = {
            (_key(key), _key(name)): inner for name, inner in table.items() if isinstance(inner, Mapping)
        }
        if not table or len(whole) < len(table):
            whole = {(_key(key),): table}
        for names, inner in whole.items():
            lines += ["", f"[{'.'.join(names)}]", *(f"{_key(k)} = {_toml(v)}" for k, v in inner.items())]
    return "\n".join(lines).lstrip("\n")


def _key(key: str) -> str:
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else _toml(key)


def _toml(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{_key(k)} = {_toml(v)}" for k, v in value.items()) + " }" if value else "{}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(_toml, value)) + "]"
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)  # nan, inf and -inf, where JSON has nothing
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
