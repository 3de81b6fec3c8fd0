"""One of pydantic's faults as: which key, what is wrong, what would be right. For every file that a person writes."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel


def explain(fault: Any, whole: type[BaseModel], parts: Mapping[str, type[BaseModel]]) -> str:
    """``parts``: the tables of ``whole`` by their key, to know which keys they take."""
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
