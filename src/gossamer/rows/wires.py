"""A Wire is how a row travels: as it is, or in fewer bytes.

``encode`` makes the bytes, ``decode`` the row that the receivers see, Q(row), and ``share`` says what is left of the bytes. A wire that
rounds is used such that means are kept: x + W Q(x) - Q(x) instead of W x. The three of today: float32 (each row in its own precision),
bfloat16, and 8 bits (``codec.py``), for differences: parameters themselves would be useless in 8 bits.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

import torch
from torch import Tensor

from gossamer.errors import GossamerError
from gossamer.rows import codec


class Wire(ABC):
    """``turn``: a number that stands for the step and the replica, for wires that round at random (see ``codec.turn``)."""

    name: ClassVar[str]
    code: ClassVar[torch.dtype]  # what the encoded row consists of

    @abstractmethod
    def share(self, dtype: torch.dtype) -> float:
        """What a row weighs on the wire against one in its own precision; 1: it travels as it is."""

    def width(self, columns: int) -> int:
        """Elements of the encoded row."""
        return columns

    @abstractmethod
    def encode(self, row: Tensor, code: Tensor, turn: int) -> None: ...

    @abstractmethod
    def decode(self, code: Tensor, row: Tensor) -> None: ...


class Exact(Wire):
    name, code = "float32", torch.float32

    def share(self, dtype: torch.dtype) -> float:
        return 1.0

    def encode(self, row: Tensor, code: Tensor, turn: int) -> None:
        code.copy_(row)

    def decode(self, code: Tensor, row: Tensor) -> None:
        row.copy_(code)


class BFloat16(Exact):
    """Rounded to the nearest; rows of half precision travel as they are."""

    name, code = "bfloat16", torch.bfloat16

    def share(self, dtype: torch.dtype) -> float:
        return self.code.itemsize / dtype.itemsize if dtype in (torch.float32, torch.float64) else 1.0


class EightBits(Wire):
    """64 numbers share a power of two, and are rounded such that the error is 0 on the average."""

    name, code = "8bits", torch.uint8

    def share(self, dtype: torch.dtype) -> float:
        return codec.UNIT / codec.SPAN / dtype.itemsize

    def width(self, columns: int) -> int:
        return codec.width(columns)

    def encode(self, row: Tensor, code: Tensor, turn: int) -> None:
        codec.encode(row, code, turn)

    def decode(self, code: Tensor, row: Tensor) -> None:
        codec.decode(code, row)


EXACT, BFLOAT16, EIGHT_BITS = Exact(), BFloat16(), EightBits()
ANY_METHOD = (EXACT, BFLOAT16)  # in which parameters may travel, whatever the method
WIRES: dict[str, Wire] = {wire.name: wire for wire in (EXACT, BFLOAT16, EIGHT_BITS)}


def wire(name: str | Wire, among: tuple[Wire, ...]) -> Wire:
    """``among``: the wires that can be used here."""
    if isinstance(name, Wire):
        return name
    known = {one.name: one for one in among}
    if name not in known:
        shown = " or ".join(map(repr, known))
        raise GossamerError(f"wire={name!r} is not known; rows travel as {shown}")
    return known[name]
