"""A Wire is how a row travels: as it is, or in fewer bytes.

``encode`` makes the bytes, ``decode`` the row that the receivers see, Q(row), and ``share`` says what is left of the bytes. A wire that
rounds is used such that means are kept: x + W Q(x) - Q(x) instead of W x. Parameters travel as float32 (each row in its own precision) or
bfloat16. Differences may travel in 8 bits (``codec.py``), in 4, as signs, or as the largest few: parameters would be useless so.

| wire | ‖Q(x) - x‖² as a share of ‖x‖², for each 64 numbers | mean of Q(x) |
| --- | --- | --- |
| 8bits | at most 1/256, on the average; of differences 1/128, for each 128 numbers | x, up to 1/128 of the largest |
| 4bits | at most 64/49, on the average: one number is large, and 63 are half a unit | x |
| sign | 1 - ‖x‖₁² / (64 ‖x‖²), up to the rounding of the scale: at most 63/64 | biased |
| top-1%, top-10% | of the whole row, what is left out: at most 99 %, 90 % | biased |
"""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from torch import Tensor

from gossamer.errors import GossamerError
from gossamer.rows import codec, finite


class Wire:
    """This one: each row as it is. ``turn``: a number that stands for the step and the replica, for wires that round at random
    (see ``codec.turn``). ``first``: the span that a row begins with, if it is cut off a longer one."""

    name: ClassVar[str] = "float32"
    code: ClassVar[torch.dtype] = torch.float32  # what the encoded row consists of
    span: ClassVar[int] = 1  # numbers that are encoded together
    unit: ClassVar[int] = 1  # elements of the encoded row for them

    def share(self, dtype: torch.dtype) -> float:
        """What a row weighs on the wire against one in its own precision; 1: it travels as it is."""
        return 1.0

    def width(self, columns: int) -> int:
        """Elements of the encoded row."""
        return columns

    def encode(self, row: Tensor, code: Tensor, turn: int, first: int = 0) -> None:
        code.copy_(row)

    def decode(self, code: Tensor, row: Tensor) -> None:
        row.copy_(code)

    def finite(self, code: Tensor) -> bool:
        """Whether all numbers of an encoded row are."""
        return finite.finite(code)

    def bytes(self, columns: int, dtype: torch.dtype) -> int:
        """Of a row on the wire."""
        return self.width(columns) * (self.code if self.share(dtype) < 1 else dtype).itemsize


class BFloat16(Wire):
    """Rounded to the nearest; rows of half precision travel as they are."""

    name, code = "bfloat16", torch.bfloat16

    def share(self, dtype: torch.dtype) -> float:
        return self.code.itemsize / dtype.itemsize if dtype in (torch.float32, torch.float64) else 1.0


class Coarse(Wire):
    """Of each ``span`` numbers ``unit`` bytes."""

    code: ClassVar[torch.dtype] = torch.uint8
    span = codec.SPAN

    def share(self, dtype: torch.dtype) -> float:
        return self.unit / self.span / dtype.itemsize

    def width(self, columns: int) -> int:
        return -(-columns // self.span) * self.unit


class EightBits(Coarse):
    """``span`` numbers share a power of two, and are rounded such that the error is 0 on the average."""

    name = "8bits"

    def __init__(self, span: int = codec.SPAN) -> None:
        self.span, self.unit = span, span + 1  # type: ignore[misc]

    def encode(self, row: Tensor, code: Tensor, turn: int, first: int = 0) -> None:
        codec.encode(row, code, turn, first, self.span)

    def decode(self, code: Tensor, row: Tensor) -> None:
        codec.decode(code, row, self.span)

    def finite(self, code: Tensor) -> bool:
        return codec.finite(code, self.span)


class FourBits(Coarse):
    """As 8 bits, with integers from -7 to 7, two of them in a byte."""

    name, unit = "4bits", codec.SPAN // 2 + 1

    def encode(self, row: Tensor, code: Tensor, turn: int, first: int = 0) -> None:
        for piece, out in codec.pieces(row, code, self.span, self.unit):
            quotients, exponents = codec.quotients(piece, turn, first, bits=4)
            pairs = quotients.add_(8).to(torch.uint8).view(torch.int16)  # the second one in the upper byte
            out[:, :-1] = (pairs << 4).bitwise_or_(pairs >> 8).bitwise_and_(255)
            out[:, -1] = exponents
            first += len(out)

    def decode(self, code: Tensor, row: Tensor) -> None:
        for piece, part in codec.pieces(row, code, self.span, self.unit):
            pairs = part[:, :-1].to(torch.int16)
            numbers = (pairs >> 4).bitwise_or_((pairs & 15) << 8).view(torch.uint8).float()
            numbers.sub_(8).mul_(codec.power(part[:, -1].int()).unsqueeze(1))
            piece.copy_(numbers.flatten()[: len(piece)])

    def finite(self, code: Tensor) -> bool:
        return not bool((code.view(-1, self.unit)[:, -1] == codec.NOT_FINITE).any())


class Sign(Coarse):
    """64 numbers are their signs times the mean of their absolute values. It is biased: for methods with error feedback, such as CHOCO."""

    name, unit = "sign", codec.SPAN // 8 + 2

    def encode(self, row: Tensor, code: Tensor, turn: int, first: int = 0) -> None:
        spans, out = codec.padded(row), code.view(-1, self.unit)
        counts = torch.full((len(spans), 1), codec.SPAN, device=row.device)
        counts[-1] = len(row) - (len(spans) - 1) * codec.SPAN  # the last one may be shorter
        bits = (spans >= 0).unflatten(1, (-1, 8)).to(torch.uint8) << torch.arange(8, dtype=torch.uint8, device=row.device)
        out[:, :-2] = bits.sum(dim=2)
        out[:, -2:] = (spans.abs().sum(dim=1, keepdim=True) / counts).bfloat16().view(torch.uint8)

    def decode(self, code: Tensor, row: Tensor) -> None:
        spans = code.view(-1, self.unit)
        bits = spans[:, :-2].unsqueeze(2) >> torch.arange(8, dtype=torch.uint8, device=code.device) & 1
        row.copy_(bits.flatten(1).float().mul_(2).sub_(1).mul_(self._scales(code)).flatten()[: len(row)])

    def finite(self, code: Tensor) -> bool:
        return finite.finite(self._scales(code))

    def _scales(self, code: Tensor) -> Tensor:
        return code.view(-1, self.unit)[:, -2:].contiguous().view(torch.bfloat16).float()


class Largest(Wire):
    """The numbers of the largest absolute values, with their places; the others are 0. Biased, as ``sign`` is."""

    code: ClassVar[torch.dtype] = torch.uint8

    def __init__(self, percent: int) -> None:
        self.name, self.percent = f"top-{percent}%", percent  # type: ignore[misc]

    def count(self, columns: int) -> int:
        return max(1, -(-columns * self.percent // 100))

    def share(self, dtype: torch.dtype) -> float:
        return 8 * self.percent / 100 / dtype.itemsize

    def width(self, columns: int) -> int:
        return 8 * self.count(columns)

    def encode(self, row: Tensor, code: Tensor, turn: int, first: int = 0) -> None:
        places = row.abs().topk(len(code) // 8).indices
        halves = code.view(2, -1)
        halves[0].copy_(places.int().view(torch.uint8))
        halves[1].copy_(row[places].float().view(torch.uint8))

    def decode(self, code: Tensor, row: Tensor) -> None:
        places, numbers = code.view(2, -1)
        row.zero_()[places.clone().view(torch.int32).long()] = numbers.clone().view(torch.float32).to(row.dtype)

    def finite(self, code: Tensor) -> bool:
        return finite.finite(code.view(2, -1)[1].clone().view(torch.float32))


EXACT, BFLOAT16, EIGHT_BITS = Wire(), BFloat16(), EightBits()
FOUR_BITS = FourBits()
ANY_METHOD = (EXACT, BFLOAT16)  # in which parameters may travel, whatever the method
OF_MEANS = (EXACT, BFLOAT16, EIGHT_BITS, FOUR_BITS)  # in which a mean of all may be made and sent back
_ALL = (*OF_MEANS, Sign(), Largest(1), Largest(10))
WIRES: dict[str, Wire] = {wire.name: wire for wire in _ALL}
# What is compressed again and again, with what was lost before, bears one scale for 128 numbers: half a percent of the bytes fewer.
DIFFERENCES: dict[str, Wire] = WIRES | {"8bits": EightBits(128)}
WireName = Literal["float32", "bfloat16", "8bits", "4bits", "sign", "top-1%", "top-10%"]
MeanWireName = Literal["float32", "bfloat16", "8bits", "4bits"]


def spelled(name: str) -> str:
    """``8bit`` is ``8bits``."""
    return f"{name}s" if f"{name}s" in WIRES else name


def wire(name: str | Wire, among: tuple[Wire, ...]) -> Wire:
    """``among``: the wires that can be used here."""
    if isinstance(name, Wire):
        return name
    known = {one.name: one for one in among}
    name = spelled(name)
    if name not in known:
        why = (
            "is not for these rows, but for methods that have a wire as an option, such as choco"
            if name in WIRES
            else "is not known"
        )
        raise GossamerError(f"wire={name!r} {why}; rows travel as {' or '.join(map(repr, known))}")
    return known[name]
