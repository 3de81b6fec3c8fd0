"""A Wire is how a row travels: as it is, or in fewer bytes.

``encode`` makes the bytes, ``decode`` the row that the receivers see, Q(row), and ``share`` says what is left of the bytes. A wire that
rounds is used such that means are kept: x + W Q(x) - Q(x) instead of W x. The three of today: float32 (each row in its own precision),
bfloat16, and 8 bits (``codec.py``), for differences: parameters themselves would be useless in 8 bits.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from gossamer.errors import GossamerError
from gossamer.rows import codec


class Wire:
    """This one: each row as it is. ``turn``: a number that stands for the step and the replica, for wires that round at random
    (see ``codec.turn``)."""

    name: ClassVar[str] = "float32"
    code: ClassVar[torch.dtype] = torch.float32  # what the encoded row consists of

    def share(self, dtype: torch.dtype) -> float:
        """What a row weighs on the wire against one in its own precision; 1: it travels as it is."""
        return 1.0

    def width(self, columns: int) -> int:
        """Elements of the encoded row."""
        return columns

    def encode(self, row: Tensor, code: Tensor, turn: int) -> None:
        code.copy_(row)

    def decode(self, code: Tensor, row: Tensor) -> None:
        row.copy_(code)


class BFloat16(Wire):
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


EXACT, BFLOAT16, EIGHT_BITS = Wire(), BFloat16(), EightBits()
ANY_METHOD = (EXACT, BFLOAT16)  # in which parameters may travel, whatever the method
WIRES: dict[str, Wire] = {wire.name: wire for wire in (EXACT, BFLOAT16, EIGHT_BITS)}


def wire(name: str | Wire, among: tuple[Wire, ...]) -> Wire:
    """``among``: the wires that can be used here."""
    if isinstance(name, Wire):
        return name
    known = {one.name: one for one in among}
    if name not in known:
        raise GossamerError(f"wire={name!r} is not known; rows travel as {' or '.join(map(repr, known))}")
    return known[name]
