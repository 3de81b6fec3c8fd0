"""Rows in a quarter of their bytes: 64 numbers at a time share a power of two (one byte), and each has 8 bits of its own.

No error is larger than 1/64 of the largest of the 64, nor, but for that one, than 1/128. Everything is done in powers of two and integers,
so that all devices get the same bits, and so does a row that is cut into pieces (at multiples of 64). What is not finite stays so.
"""

from __future__ import annotations

import torch
from torch import Tensor

SPAN = 64  # numbers that share a power of two
UNIT = SPAN + 1  # bytes for them
SHARE = UNIT / SPAN / torch.float32.itemsize  # of the bytes of float32
_PIECE = 1 << 16  # numbers that several passes of a CPU take at a time: they stay in the cache
_MANTISSA = 23  # bits of a float32; the exponent comes next
_NOT_FINITE = 255  # as an exponent
_SMALLEST = 6  # exponents up to here are taken for 0


def width(columns: int) -> int:
    """Bytes of a row of so many numbers."""
    return -(-columns // SPAN) * UNIT


def encode(row: Tensor, out: Tensor) -> None:
    """``out``: uint8, as many as :func:`width` says."""
    for piece, coded in _pieces(row, out):
        quotients, exponents = _quotients(_padded(piece))
        coded[:, :SPAN].view(torch.int8).copy_(quotients)
        coded[:, SPAN].copy_(exponents)


def decode(coded: Tensor, out: Tensor) -> None:
    """The row that was encoded, up to the rounding."""
    for piece, part in _pieces(out, coded):
        numbers = part[:, :SPAN].view(torch.int8).to(torch.float32).mul_(_power(part[:, SPAN].int()).unsqueeze(1))
        piece.copy_(numbers.flatten()[: len(piece)])


def rounded(row: Tensor, out: Tensor) -> None:
    """What :func:`decode` makes of what :func:`encode` makes of it, without the bytes between."""
    size = _piece(row)
    for piece, part in zip(row.split(size), out.split(size), strict=True):
        quotients, exponents = _quotients(_padded(piece))
        part.copy_(quotients.mul_(_power(exponents).unsqueeze(1)).flatten()[: len(piece)])


def reference(row: Tensor) -> Tensor:
    """The same, number by number as one would explain it. Slow, and the truth."""
    made = []
    for some in row.double().split(SPAN):
        largest = float(some.abs().max())
        power = 2.0 ** torch.frexp(torch.tensor(largest, dtype=torch.float64)).exponent.item()  # above all of them
        unit = power / 128
        fine = unit >= 2.0**-126
        made.append((some / unit).round().clamp(-127, 127) * unit if fine else torch.zeros_like(some))
    return torch.cat(made).to(row.dtype)


def _quotients(numbers: Tensor) -> tuple[Tensor, Tensor]:
    """``[m, 64]`` as integers from -127 to 127, still as floats and in the place of the numbers, and the biased exponents of the
    powers of two that they are multiples of."""
    largest = numbers.abs().amax(dim=1)
    exponents = largest.view(torch.int32) >> _MANTISSA
    lost = exponents == _NOT_FINITE
    exponents = (exponents - _SMALLEST).clamp_(min=0)
    inverse = _power(254 - exponents).masked_fill_(exponents == 0, 0)
    exponents.masked_fill_(lost, _NOT_FINITE)
    return numbers.mul_(inverse.unsqueeze(1)).round_().clamp_(-127, 127), exponents


def _power(exponents: Tensor) -> Tensor:
    """2 to what the biased exponents say; 0 for 0."""
    return (exponents << _MANTISSA).view(torch.float32)


def _padded(piece: Tensor) -> Tensor:
    """A copy as ``[m, 64]``, with zeros at the end."""
    numbers = torch.empty(-(-len(piece) // SPAN), SPAN, dtype=torch.float32, device=piece.device)
    flat = numbers.view(-1)
    flat[: len(piece)] = piece
    flat[len(piece) :] = 0
    return numbers


def _pieces(row: Tensor, coded: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Pieces of the row, and of its code as ``[m, 65]``."""
    size = _piece(row)
    return list(zip(row.split(size), coded.view(-1, UNIT).split(size // SPAN), strict=True))


def _piece(row: Tensor) -> int:
    """A GPU takes all of it at once: there each pass costs a launch."""
    return _PIECE if row.device.type == "cpu" else -(-max(1, len(row)) // SPAN) * SPAN
