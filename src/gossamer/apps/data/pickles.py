"""Python 2's pickles of plain data, read without unpickling: no name in the file is ever looked up, imported or called.

A pickle is a program for a stack machine. This is such a machine that knows only what builds dicts, lists, tuples, bytes, integers
and numpy arrays of bytes; whatever else the program wants, it is refused at the offset where it wants it.
"""

from __future__ import annotations

import math
import pickletools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from gossamer.apps.data.files import read
from gossamer.errors import GossamerError


class _Mark:
    """Where a list of arguments begins on the stack."""


@dataclass(frozen=True)
class _Name:
    """A name that the file mentions; it stands for itself and nothing else."""

    name: str


class _Kind:
    """A numpy dtype in the making. Only unsigned bytes are known."""


@dataclass
class _Array:
    """A numpy array in the making: empty until its content has come."""

    content: np.ndarray | None = None


_ARRAY, _ARRAY_TYPE, _KIND = _Name("an array"), _Name("the array type"), _Name("a dtype")
_NAMES = {
    "numpy.core.multiarray _reconstruct": _ARRAY,
    "numpy._core.multiarray _reconstruct": _ARRAY,
    "numpy ndarray": _ARRAY_TYPE,
    "numpy dtype": _KIND,
}
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_INTEGERS = ("BININT", "BININT1", "BININT2", "LONG1")
_STRINGS = ("BINSTRING", "SHORT_BINSTRING")  # what was str in Python 2: bytes
_SHORT_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}


class _Refused(Exception):
    pass


def read_pickle(path: Path) -> dict[bytes, Any]:
    """The dict in the file: keys are bytes; values are made of bytes, integers, lists, dicts, tuples, None and uint8 arrays."""
    raw = read(path)
    position = 0
    machine = _Machine()
    try:
        for opcode, argument, offset in pickletools.genops(raw):
            position = int(offset or 0)
            machine.run(opcode.name, argument)
        made = machine.result()
    except _Refused as reason:
        raise GossamerError(f"{path} is refused at offset {position} of {len(raw)}: {reason}") from None
    except Exception as error:  # genops raises several kinds when the file is truncated or not a pickle
        detail = str(error).splitlines()[0][:120] if str(error) else type(error).__name__
        raise GossamerError(f"{path} is not a whole pickle: after offset {position} of {len(raw)}: {detail}") from None
    if not isinstance(made, dict):
        raise GossamerError(f"{path} holds a {type(made).__name__}; a dict was expected")
    return made


class _Machine:
    def __init__(self) -> None:
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}

    def run(self, name: str, argument: Any) -> None:
        if name in _INTEGERS:
            self.stack.append(argument)
        elif name in _STRINGS:
            self.stack.append(argument.encode("latin-1"))  # pickletools has decoded it so
        elif name in _CONSTANTS:
            self.stack.append(_CONSTANTS[name])
        elif name in ("BINPUT", "LONG_BINPUT"):
            self.memo[argument] = self.top()
        elif name in ("BINGET", "LONG_BINGET"):
            if argument not in self.memo:
                raise _Refused(f"entry {argument} of the memo was never stored")
            self.stack.append(self.memo[argument])
        elif name in _SHORT_TUPLES:
            self.stack.append(tuple(self.pop() for _ in range(_SHORT_TUPLES[name]))[::-1])
        elif name == "GLOBAL":
            if argument not in _NAMES:
                raise _Refused(f"it asks for {argument.replace(' ', '.')!r}, which plain data does not need")
            self.stack.append(_NAMES[argument])
        elif name in _ACTIONS:
            _ACTIONS[name](self)
        else:
            raise _Refused(f"the instruction {name} is not one that plain data needs")

    def top(self) -> Any:
        if not self.stack or isinstance(self.stack[-1], _Mark):
            raise _Refused("it takes something from an empty stack")
        return self.stack[-1]

    def pop(self) -> Any:
        self.top()
        return self.stack.pop()

    def pop_to_mark(self) -> list[Any]:
        for k in range(len(self.stack) - 1, -1, -1):
            if isinstance(self.stack[k], _Mark):
                taken = self.stack[k + 1 :]
                del self.stack[k:]
                return taken
        raise _Refused("there is no mark on the stack")

    def append(self, items: list[Any]) -> None:
        target = self.top()
        if not isinstance(target, list):
            raise _Refused(f"it appends to a {type(target).__name__}")
        target.extend(items)

    def set_items(self, items: list[Any]) -> None:
        target = self.top()
        if not isinstance(target, dict) or len(items) % 2:
            raise _Refused(f"it sets items of a {type(target).__name__}")
        for key, value in zip(items[::2], items[1::2], strict=True):
            if not isinstance(key, bytes):
                raise _Refused(f"a key of a dict is a {type(key).__name__}; text was expected")
            target[key] = value

    def call(self) -> None:
        arguments, what = self.pop(), self.pop()
        if what is _ARRAY and arguments == (_ARRAY_TYPE, (0,), b"b"):
            self.stack.append(_Array())
        elif what is _KIND and isinstance(arguments, tuple) and arguments[:1] == (b"u1",):
            self.stack.append(_Kind())
        else:
            raise _Refused("it calls something other than the makers of arrays of unsigned bytes")

    def build(self) -> None:
        state, what = self.pop(), self.top()
        if isinstance(what, _Kind):
            return  # byte order and the like, which single bytes do not have
        if not isinstance(what, _Array) or not isinstance(state, tuple) or len(state) != 5:
            raise _Refused(f"it sets the state of a {type(what).__name__}")
        _, shape, kind, by_columns, content = state
        if not isinstance(kind, _Kind) or not isinstance(content, bytes) or not _is_shape(shape):
            raise _Refused("an array is not one of unsigned bytes")
        if math.prod(shape) != len(content):
            raise _Refused(f"an array of shape {shape} has {len(content)} bytes; {math.prod(shape)} were expected")
        what.content = np.frombuffer(content, dtype=np.uint8).reshape(shape, order="F" if by_columns is True else "C")

    def result(self) -> Any:
        if len(self.stack) != 1:
            raise _Refused(f"{len(self.stack)} values are left at its end; one was expected")
        return self.stack[0]


def _is_shape(shape: Any) -> bool:
    return isinstance(shape, tuple) and len(shape) <= 8 and all(isinstance(size, int) and 0 <= size < 2**40 for size in shape)


_ACTIONS: dict[str, Callable[[_Machine], None]] = {
    "PROTO": lambda m: None,
    "STOP": lambda m: None,  # genops ends there, and refuses a file without it
    "MARK": lambda m: m.stack.append(_Mark()),
    "EMPTY_LIST": lambda m: m.stack.append([]),
    "EMPTY_DICT": lambda m: m.stack.append({}),
    "EMPTY_TUPLE": lambda m: m.stack.append(()),
    "TUPLE": lambda m: m.stack.append(tuple(m.pop_to_mark())),
    "APPEND": lambda m: m.append([m.pop()]),
    "APPENDS": lambda m: m.append(m.pop_to_mark()),
    "SETITEM": lambda m: m.set_items([m.pop(), m.pop()][::-1]),
    "SETITEMS": lambda m: m.set_items(m.pop_to_mark()),
    "REDUCE": _Machine.call,
    "BUILD": _Machine.build,
}


def read_array(path: Path, values: dict[bytes, Any], key: bytes, shape: tuple[int, ...]) -> np.ndarray:
    """The array of unsigned bytes under ``key``."""
    found = values.get(key)
    content = found.content if isinstance(found, _Array) else None
    if content is None or content.shape != shape:
        what = "no array of bytes" if content is None else f"of shape {content.shape}"
        raise GossamerError(f"{path}: {key.decode()!r} is {what}; shape {shape} was expected")
    return content


def item_offset(path: Path, key: bytes, k: int) -> int:
    """Where in the file the k-th number of the list under ``key`` stands; the file has been read before."""
    numbers = -1  # seen since the key
    for opcode, argument, offset in pickletools.genops(read(path)):
        if opcode.name in _STRINGS and str(argument).encode("latin-1") == key:
            numbers = 0
        elif numbers >= 0 and opcode.name in (*_INTEGERS, *_STRINGS, *_CONSTANTS):
            if numbers == k:
                return int(offset or 0)
            numbers += 1
    return 0
