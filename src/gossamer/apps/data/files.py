"""Reading whole files, with one kind of error."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from torch import Tensor

from gossamer.errors import GossamerError

Pair = tuple[Tensor, Tensor]  # inputs and labels, samples along dimension 0


def read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise GossamerError(f"{path} can't be read: {error.strerror or error}") from None


def read_text(path: Path) -> str:
    """UTF-8 text with a sign in it and no zero byte: neither another encoding nor something else altogether."""
    raw = read(path)
    zero = raw.find(b"\x00")
    if zero >= 0:
        raise GossamerError(f"{path} is not a text file: it has a zero byte at offset {zero}; UTF-8 text was expected")
    try:
        text = raw.decode()
    except UnicodeDecodeError as error:
        raise GossamerError(
            f"{path} is not UTF-8 text: byte 0x{raw[error.start]:02x} at offset {error.start} of {len(raw)} ({error.reason})"
        ) from None
    if not text.strip():
        raise GossamerError(f"{path} holds no text ({len(raw)} bytes)")
    return text


def check_labels(path: Path, labels: np.ndarray, classes: int, offset: int, stride: int = 1) -> None:
    """``labels``: uint8. Sample k's label is the byte at ``offset + k·stride`` of the file."""
    wrong = np.flatnonzero(labels >= classes)
    if len(wrong):
        k = int(wrong[0])
        raise GossamerError(
            f"{path}: label {labels[k]} of sample {k} at offset {offset + k * stride} is out of range; labels are 0 to {classes - 1}"
        )
