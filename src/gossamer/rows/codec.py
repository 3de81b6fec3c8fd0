"""Rows in a quarter of their bytes: 64 numbers at a time share a power of two (one byte), and each has 8 bits of its own.

No error is larger than 1/64 of the largest of the 64. Everything is done in powers of two and integers, so that all devices get the same
bits, and so does a row that is cut into pieces (at multiples of 64). What is not finite stays so.

Numbers are rounded up or down such that the error is 0 on the average: a number that is 0.1 of a unit is rounded up in every tenth step, or
by every tenth replica. To the nearest, what always moves by less than half a unit would never move at all: weight decay of a weight
whose input is always 0, say. When to round up, a sequence decides that fills the interval from 0 to 1 evenly, step by step,
replica by replica and column by column (a ``turn`` in it stands for a step and a replica); it needs no state and no message.
"""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

SPAN = 64  # numbers that share a power of two
UNIT = SPAN + 1  # bytes for them
SHARE = UNIT / SPAN / torch.float32.itemsize  # of the bytes of float32
_PIECE = 1 << 16  # numbers that several passes of a CPU take at a time: they stay in the cache
_MANTISSA = 23  # bits of a float32; the exponent comes next
NOT_FINITE = 255  # as an exponent
# Steps on a circle of 2^32 that come nowhere near to where they have been before: powers of the inverse golden ratio's kin.
_BY_STEP, _BY_ROW, _BY_SPAN, _BY_COLUMN = 2654435769, 1779033703, 3242174889, 2447445413
_CIRCLE = 1 << 32
_FINE = 1 << 16  # places on it; no more, so that a whole number and a place add up exactly: whole numbers are not rounded


def width(columns: int, span: int = SPAN) -> int:
    """Bytes of a row of so many numbers. ``span``: so many share a power of two, here and below."""
    return -(-columns // span) * (span + 1)


def turn(step: int, row: int) -> int:
    """Where the sequence is that decides what is rounded up."""
    return (step * _BY_STEP + row * _BY_ROW) % _CIRCLE


def encode(row: Tensor, out: Tensor, turn: int = 0, first: int = 0, span: int = SPAN) -> None:
    """``out``: uint8, as many as :func:`width` says. ``first``: where the row begins, if it is cut off a longer one: which span."""
    for piece, coded in pieces(row, out, span, span + 1):
        integers, exponents = quotients(piece, turn, first, span=span)
        coded[:, :span].view(torch.int8).copy_(integers)
        coded[:, span].copy_(exponents)
        first += len(coded)


def decode(coded: Tensor, out: Tensor, span: int = SPAN) -> None:
    """The row that was encoded, up to the rounding."""
    for piece, part in pieces(out, coded, span, span + 1):
        numbers = part[:, :span].view(torch.int8).to(torch.float32).mul_(power(part[:, span].int()).unsqueeze(1))
        piece.copy_(numbers.flatten()[: len(piece)])


def finite(coded: Tensor, span: int = SPAN) -> bool:
    """Whether all numbers of an encoded row are."""
    return not bool((coded.view(-1, span + 1)[:, span] == NOT_FINITE).any())


def rounded(row: Tensor, out: Tensor, turn: int = 0) -> None:
    """What :func:`decode` makes of what :func:`encode` makes of it, without the bytes between."""
    size = _piece(row, SPAN)
    for k, (piece, part) in enumerate(zip(row.split(size), out.split(size), strict=True)):
        integers, exponents = quotients(piece, turn, k * size // SPAN)
        part.copy_(integers.mul_(power(exponents).unsqueeze(1)).flatten()[: len(piece)])


def reference(row: Tensor, turn: int = 0, first: int = 0) -> Tensor:
    """The same, number by number as one would explain it. Slow, and the truth."""
    made = []
    for span, some in enumerate(row.tolist()[at : at + SPAN] for at in range(0, len(row), SPAN)):
        largest = max(abs(number) for number in some)
        unit = 2.0 ** math.frexp(largest)[1] / 128  # 128 of them are more than any
        for column, number in enumerate(some):
            far = (first + span) * _BY_SPAN + turn, column * _BY_COLUMN
            up = sum((place % _CIRCLE * _FINE // _CIRCLE) / _FINE for place in far) % 1
            # In single precision, as everywhere: a sum that rounds to a whole number is one.
            quotient = math.floor(float(torch.tensor(number / unit, dtype=torch.float32) + up)) if unit >= 2.0**-126 else 0
            made.append(min(max(quotient, -127), 127) * unit)
    return torch.tensor(made, dtype=row.dtype)


def _ups(spans: int, span: int, turn: int, first: int, device: torch.device) -> Tensor:
    """``[spans, span]``, from 0 to 1: a number is rounded up if what it has beyond a whole one, and this, are 1 or more."""
    a = _places(torch.arange(first, first + spans, device=device).mul_(_BY_SPAN).add_(turn))
    return torch.add(a.unsqueeze(1), _columns(span, device)).frac_()


@functools.cache
def _columns(span: int, device: torch.device) -> Tensor:
    return _places(torch.arange(span, device=device).mul_(_BY_COLUMN))


def _places(on_circle: Tensor) -> Tensor:
    """As parts of the circle."""
    return on_circle.bitwise_and_(_CIRCLE - 1).bitwise_right_shift_((_CIRCLE // _FINE).bit_length() - 1).float().div_(_FINE)


def quotients(row: Tensor, turn: int, first: int = 0, bits: int = 8, span: int = SPAN) -> tuple[Tensor, Tensor]:
    """``[m, span]`` as integers of so many bits, still as floats, and the biased exponents of the powers of two that they are
    multiples of."""
    numbers, most = padded(row, span), (1 << bits - 1) - 1
    largest = numbers.abs().amax(dim=1)
    if (
        bits < 8
    ):  # no number is beyond the largest integer, so that the mean error is 0 also there; in 8 bits that is 1/128 at most
        largest.mul_((most + 1) / most)
    exponents = largest.view(torch.int32) >> _MANTISSA
    lost = exponents == NOT_FINITE
    exponents = (exponents - (bits - 2)).clamp_(min=0)
    inverse = power(254 - exponents).masked_fill_(exponents == 0, 0)
    exponents.masked_fill_(lost, NOT_FINITE)
    ups = _ups(len(numbers), span, turn, first, numbers.device)
    return torch.addcmul(ups, numbers, inverse.unsqueeze(1), out=ups).floor_().clamp_(-most, most), exponents


def power(exponents: Tensor) -> Tensor:
    """2 to what the biased exponents say; 0 for 0."""
    return (exponents << _MANTISSA).view(torch.float32)


def padded(piece: Tensor, span: int = SPAN) -> Tensor:
    """A copy as ``[m, span]``, with zeros at the end."""
    numbers = torch.empty(-(-len(piece) // span), span, dtype=torch.float32, device=piece.device)
    flat = numbers.view(-1)
    flat[: len(piece)] = piece
    flat[len(piece) :] = 0
    return numbers


def pieces(row: Tensor, coded: Tensor, span: int, unit: int) -> list[tuple[Tensor, Tensor]]:
    """Pieces of the row, and of its code as ``[m, unit]``: so many bytes for so many numbers."""
    size = _piece(row, span)
    return list(zip(row.split(size), coded.view(-1, unit).split(size // span), strict=True))


def _piece(row: Tensor, span: int) -> int:
    """A GPU takes all of it at once: there each pass costs a launch."""
    return _PIECE if row.device.type == "cpu" else -(-max(1, len(row)) // span) * span
