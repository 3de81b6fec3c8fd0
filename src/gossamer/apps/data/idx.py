"""IDX files, as MNIST and its relatives come in: a magic number, the sizes, then bytes. Gzipped or plain."""

from __future__ import annotations

import gzip
import math
import struct
import zlib
from pathlib import Path

import numpy as np
import torch

from gossamer.apps.data import catalog
from gossamer.apps.data.files import Pair, check_labels, read
from gossamer.errors import GossamerError


def fashion_mnist(folder: Path | None = None, counts: tuple[int, int] = (60_000, 10_000)) -> tuple[Pair, Pair]:
    """60,000 + 10,000 images of 28×28 pixels, scaled to 0…1. ``counts``: how many there must be, train and test."""
    found = catalog.FASHION_MNIST.need(folder)
    pairs = []
    for split, count in zip(("train", "t10k"), counts, strict=True):
        pixels, kinds = (found.parent / f"{split}-{part}-ubyte{found.suffix}" for part in ("images-idx3", "labels-idx1"))
        images, labels = read_idx(pixels), read_idx(kinds)
        for path, array, shape in ((pixels, images, (count, 28, 28)), (kinds, labels, (count,))):
            if array.shape != shape:
                raise GossamerError(f"{path} says at offset 4 that its shape is {array.shape}; {shape} was expected")
        check_labels(kinds, labels, 10, offset=8)
        pairs.append((torch.from_numpy(images).float() / 255, torch.from_numpy(labels).long()))
    return pairs[0], pairs[1]


def read_idx(path: Path) -> np.ndarray:
    """One IDX file of bytes. Offsets in messages are those of the unzipped content."""
    raw = read(path)
    if path.suffix == ".gz":
        try:
            raw = gzip.decompress(raw)
        except (OSError, EOFError, zlib.error) as error:
            raise GossamerError(
                f"{path} can't be unzipped at offset {_intact(raw)} of {len(raw)}: {error}; a whole gzip file was expected"
            ) from None
    if len(raw) < 4 or raw[:3] != b"\x00\x00\x08":
        raise GossamerError(f"{path} is not an IDX file of bytes: it begins with {raw[:4].hex() or 'nothing'}, not 000008")
    dimensions = raw[3]
    start = 4 + 4 * dimensions
    if len(raw) < start:
        raise GossamerError(f"{path} ends at offset {len(raw)}; its header of {dimensions} dimensions ends at {start}")
    shape = struct.unpack(f">{dimensions}I", raw[4:start])
    expected = math.prod(shape)
    if len(raw) - start != expected:
        raise GossamerError(f"{path} has {len(raw) - start} bytes after offset {start}; its header says {expected}")
    if dimensions > 8:  # numpy has a limit, and no such file has more
        raise GossamerError(f"{path} says at offset 3 that it has {dimensions} dimensions; up to 8 were expected")
    return np.frombuffer(raw, dtype=np.uint8, offset=start).reshape(shape).copy()


def _intact(raw: bytes) -> int:
    """Up to which offset a broken gzip file can be unzipped."""
    unzip = zlib.decompressobj(wbits=31)
    for k in range(0, len(raw), 512):
        try:
            unzip.decompress(raw[k : k + 512])
        except zlib.error:
            return k
    return len(raw)
