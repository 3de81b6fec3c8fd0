"""CIFAR-10 in its two official layouts: the binary one and the Python one (pickles, of which no name is looked up)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from gossamer.apps.data import catalog
from gossamer.apps.data.files import Pair, check_labels, read, read_text
from gossamer.apps.data.pickles import read_array, read_pickle
from gossamer.errors import GossamerError

CIFAR10_CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
_PIXELS = 3 * 32 * 32
_RECORD = 1 + _PIXELS  # a label, then all red, all green, all blue pixels


def cifar10(folder: Path | None = None, per_file: int = 10_000) -> tuple[Pair, Pair]:
    """50,000 + 10,000 images: uint8 ``[N, 3, 32, 32]`` and int64 labels. ``per_file``: how many each of the six files must hold."""
    found = catalog.CIFAR10.need(folder)
    binary = found.suffix == ".bin"
    _check_classes(found.parent, binary)
    load = _binary if binary else _python
    train = [load(found.parent / f"data_batch_{k}{found.suffix}", per_file) for k in range(1, 6)]
    return _pair(train), _pair([load(found.parent / f"test_batch{found.suffix}", per_file)])


def _pair(parts: Sequence[tuple[np.ndarray, np.ndarray]]) -> Pair:
    images = np.concatenate([images for images, _ in parts])
    labels = np.concatenate([labels for _, labels in parts])
    return torch.from_numpy(images.reshape(-1, 3, 32, 32)), torch.from_numpy(labels.astype(np.int64))


def _binary(path: Path, count: int) -> tuple[np.ndarray, np.ndarray]:
    raw = read(path)
    if len(raw) != count * _RECORD:
        whole, rest = divmod(len(raw), _RECORD)
        raise GossamerError(
            f"{path} ends at offset {len(raw)}, {f'{rest} bytes into' if rest else 'before'} image {whole}; "
            f"{count * _RECORD} bytes were expected: {count} images of {_RECORD}"
        )
    records = np.frombuffer(raw, dtype=np.uint8).reshape(count, _RECORD)
    check_labels(path, records[:, 0], 10, offset=0, stride=_RECORD)
    return records[:, 1:], records[:, 0]


def _python(path: Path, count: int) -> tuple[np.ndarray, np.ndarray]:
    batch = read_pickle(path)
    images = read_array(path, batch, b"data", (count, _PIXELS))
    labels = batch.get(b"labels")
    if not isinstance(labels, list) or len(labels) != count:
        what = f"{len(labels)} entries" if isinstance(labels, list) else "no list"
        raise GossamerError(f"{path}: 'labels' has {what}; {count} labels were expected")
    wrong = next((k for k, label in enumerate(labels) if type(label) is not int or not 0 <= label < 10), None)
    if wrong is not None:
        raise GossamerError(f"{path}: label {labels[wrong]!r:.20} of sample {wrong} is not one; labels are 0 to 9")
    return images, np.array(labels, dtype=np.uint8)


def _check_classes(folder: Path, binary: bool) -> None:
    """The file with the classes' names is not needed, but if it is there and names others, the images are others too."""
    path = folder / ("batches.meta.txt" if binary else "batches.meta")
    if not path.exists():
        return
    if binary:
        names: object = read_text(path).split()
    else:
        raw = read_pickle(path).get(b"label_names")
        names = [item.decode("latin-1") if isinstance(item, bytes) else None for item in raw] if isinstance(raw, list) else raw
    if names != list(CIFAR10_CLASSES):
        raise GossamerError(f"{path} does not name CIFAR-10's classes; {', '.join(CIFAR10_CLASSES)} were expected")
