"""Data sets as tensors: (train, test), each a pair (inputs, labels), inputs scaled to 0…1."""

from __future__ import annotations

import gzip
import struct
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from gossamer.errors import GossamerError

Pair = tuple[Tensor, Tensor]

_FASHION_PLACES = (Path("/usr/share/datasets/fashion-mnist"),)  # where Debian puts it


def digits() -> tuple[Pair, Pair]:
    """scikit-learn's 1,797 handwritten digits of 8×8 pixels; the last fifth of a fixed shuffle is the test set."""
    from sklearn.datasets import load_digits  # here, because it is slow to import

    raw = load_digits()
    order = torch.randperm(len(raw.target), generator=torch.Generator().manual_seed(0))
    x = torch.from_numpy(raw.images).float()[order] / 16
    y = torch.from_numpy(raw.target).long()[order]
    cut = len(y) * 4 // 5
    return (x[:cut], y[:cut]), (x[cut:], y[cut:])


def fashion_mnist(folder: Path | None = None) -> tuple[Pair, Pair]:
    """60,000 + 10,000 images of 28×28 pixels from the official gzipped IDX files."""
    places = (folder,) if folder else _FASHION_PLACES
    found = next((place for place in places if (place / "train-images-idx3-ubyte.gz").exists()), None)
    if found is None:
        raise GossamerError(
            f"Fashion-MNIST is not in {' or '.join(map(str, places))}; "
            "install Debian's package dataset-fashion-mnist, or name the folder that holds train-images-idx3-ubyte.gz"
        )
    pairs = []
    for split in ("train", "t10k"):
        images = read_idx(found / f"{split}-images-idx3-ubyte.gz")
        labels = read_idx(found / f"{split}-labels-idx1-ubyte.gz")
        pairs.append((torch.from_numpy(images).float() / 255, torch.from_numpy(labels).long()))
    return pairs[0], pairs[1]


def read_idx(path: Path) -> np.ndarray:
    """One gzipped IDX file of bytes."""
    try:
        raw = gzip.decompress(path.read_bytes())
    except (OSError, EOFError) as error:
        raise GossamerError(f"{path} can't be read: {error}") from None
    if len(raw) < 4 or raw[:3] != b"\x00\x00\x08":
        raise GossamerError(f"{path} is not an IDX file of bytes: it begins with {raw[:4].hex() or 'nothing'}, not 000008")
    dimensions = raw[3]
    start = 4 + 4 * dimensions
    shape = struct.unpack(f">{dimensions}I", raw[4:start])
    expected = int(np.prod(shape))
    if len(raw) - start != expected:
        raise GossamerError(f"{path} has {len(raw) - start} bytes after offset {start}; its header says {expected}")
    return np.frombuffer(raw, dtype=np.uint8, offset=start).reshape(shape).copy()
