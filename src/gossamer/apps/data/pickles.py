"""Python 2's pickles of plain data. The standard library unpickles them; the only names that it gets are those of three stand-ins of ours.

A pickle may name anything that can be imported, and have it called. Here each name but those that an array of unsigned bytes needs is
refused, and for these three stands something that makes such an array and nothing else.
"""

from __future__ import annotations

import io
import math
import pickle
from pathlib import Path
from typing import Any

import numpy as np

from gossamer.apps.data.files import read
from gossamer.errors import GossamerError


class _Refused(Exception):
    pass


class _Array:
    """An array in the making: empty until its content has come."""

    content: np.ndarray | None = None

    def __setstate__(self, state: Any) -> None:
        if not isinstance(state, tuple) or len(state) != 5:
            raise _Refused(f"the state of an array is a {type(state).__name__}")
        _, shape, kind, by_columns, content = state
        if not isinstance(kind, _Kind) or not isinstance(content, bytes) or not _is_shape(shape):
            raise _Refused("an array is not one of unsigned bytes")
        if math.prod(shape) != len(content):
            raise _Refused(f"an array of shape {shape} has {len(content)} bytes; {math.prod(shape)} were expected")
        self.content = np.frombuffer(content, dtype=np.uint8).reshape(shape, order="F" if by_columns is True else "C")


class _Kind:
    """The dtype of unsigned bytes."""

    def __setstate__(self, state: Any) -> None:
        """Byte order and the like, which single bytes do not have."""


class _Name:
    """Stands for a name; it has no attributes that a file could set."""

    __slots__ = ()

    def __call__(self, *arguments: Any) -> Any:
        raise _Refused("it calls something other than the makers of arrays of unsigned bytes")


class _MakesArray(_Name):
    __slots__ = ()

    def __call__(self, *arguments: Any) -> Any:
        return _Array() if arguments == (_ARRAY_TYPE, (0,), b"b") else super().__call__()


class _MakesKind(_Name):
    __slots__ = ()

    def __call__(self, *arguments: Any) -> Any:
        return _Kind() if arguments[:1] == (b"u1",) else super().__call__()


_ARRAY_TYPE = _Name()
_NAMES = {
    "numpy.core.multiarray._reconstruct": _MakesArray(),
    "numpy._core.multiarray._reconstruct": _MakesArray(),
    "numpy.ndarray": _ARRAY_TYPE,
    "numpy.dtype": _MakesKind(),
}


class _Reader(pickle._Unpickler):  # the one in Python: that in C takes memory for as many entries as a hostile file says it has
    def find_class(self, module: str, name: str) -> Any:
        found = _NAMES.get(f"{module}.{name}")
        if found is None:
            raise _Refused(f"it asks for {f'{module}.{name}'!r}, which plain data does not need")
        return found

    def get_extension(self, code: int) -> Any:
        raise _Refused(f"it asks for extension {code}, which plain data does not need")


def read_pickle(path: Path) -> dict[bytes, Any]:
    """The dict in the file. What was text in Python 2 is bytes, also its keys."""
    raw = read(path)
    file = io.BytesIO(raw)
    try:
        made = _Reader(file, encoding="bytes").load()
    except _Refused as reason:
        raise GossamerError(f"{path} is refused at offset {file.tell()} of {len(raw)}: {reason}") from None
    except Exception as error:  # several kinds, when the file is truncated or not a pickle
        detail = str(error).splitlines()[0][:120] if str(error) else type(error).__name__
        raise GossamerError(f"{path} is not a whole pickle: after offset {file.tell()} of {len(raw)}: {detail}") from None
    if not isinstance(made, dict):
        raise GossamerError(f"{path} holds a {type(made).__name__}; a dict was expected")
    return made


def _is_shape(shape: Any) -> bool:
    return isinstance(shape, tuple) and len(shape) <= 8 and all(isinstance(size, int) and 0 <= size < 2**40 for size in shape)


def read_array(path: Path, values: dict[bytes, Any], key: bytes, shape: tuple[int, ...]) -> np.ndarray:
    """The array of unsigned bytes under ``key``."""
    found = values.get(key)
    content = found.content if isinstance(found, _Array) else None
    if content is None or content.shape != shape:
        what = "no array of bytes" if content is None else f"of shape {content.shape}"
        raise GossamerError(f"{path}: {key.decode()!r} is {what}; shape {shape} was expected")
    return content
