"""Images in class folders, as ImageNet-1K comes: too many to hold, so they are decoded when they are taken."""

from __future__ import annotations

import os
import re
from pathlib import Path

import torch
from torch import Tensor

from gossamer.apps.augment import IMAGENET, normalised
from gossamer.apps.data import catalog
from gossamer.apps.data.decoders import Decoders, Job
from gossamer.apps.data.files import Pair
from gossamer.data import seeds
from gossamer.data.machine import cores
from gossamer.errors import GossamerError

_ENDINGS = (".jpeg", ".jpg", ".png")
_CLASSES, _TRAIN, _VALID = 1000, 1_281_167, 50_000


class ImageFolder:
    """``FOLDER/CLASS/*.JPEG``: ``labels`` has one int64 per sample, which is the place of its class in ``classes`` (sorted by name).

    ``train``: a random part of each image, flipped half of the time; else its centre. The processes that decode (``workers``, one
    per core if None) start with the first ``take`` and end with this object.
    """

    def __init__(self, folder: Path, *, train: bool, size: int = 224, seed: int = 0, workers: int | None = None) -> None:
        if size < 1:
            raise GossamerError(f"size={size} is out of range; an image has at least one pixel")
        self.folder, self.train, self.size, self.seed = folder, train, size, seed
        self.classes, self._names, self.labels = _listed(folder)
        self._decoders = Decoders(cores() if workers is None else workers)

    def __len__(self) -> int:
        return len(self._names)

    def path(self, sample: int) -> Path:
        return self.folder / self.classes[int(self.labels[sample])] / self._names[sample]

    def take(self, index: Tensor, step: int = 0) -> Pair:
        """Images ``[*index.shape, 3, size, size]``, normalised, and their labels. Random parts depend on (seed, step, sample) alone."""
        samples = index.flatten().tolist()
        jobs = [Job(str(self.path(k)), seeds.derive(self.seed, step, k, -7) if self.train else None) for k in samples]
        pixels = torch.from_numpy(self._decoders.decode(jobs, self.size))
        return normalised(pixels, IMAGENET).reshape(*index.shape, 3, self.size, self.size), self.labels[index]

    def __enter__(self) -> ImageFolder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the processes that decode. Taking more starts new ones."""
        self._decoders.close()


def imagenet(
    folder: Path | None = None, *, size: int = 224, seed: int = 0, workers: int | None = None, complete: bool = True
) -> tuple[ImageFolder, ImageFolder]:
    """ImageNet-1K (ILSVRC 2012), train and val. ``complete=False`` takes any part of it, such as a hundred classes."""
    found = catalog.IMAGENET.need(folder)
    train = ImageFolder(found, train=True, size=size, seed=seed, workers=workers)
    valid = ImageFolder(found.with_name("val"), train=False, size=size, seed=seed, workers=workers)
    foreign = next((name for name in train.classes if not re.fullmatch(r"n\d{8}", name)), None)
    if foreign is not None:
        raise GossamerError(f"{found / foreign} is not a class of ImageNet; names such as n01440764 were expected")
    if train.classes != valid.classes:
        odd = sorted(set(train.classes) ^ set(valid.classes))[0]
        raise GossamerError(f"{found} and {valid.folder} have not the same classes: {odd} is in one of them only")
    if complete:
        for images, count in ((train, _TRAIN), (valid, _VALID)):
            if (len(images.classes), len(images)) != (_CLASSES, count):
                raise GossamerError(
                    f"{images.folder} has {len(images)} images in {len(images.classes)} classes; "
                    f"{count} in {_CLASSES} were expected"
                )
    return train, valid


def _listed(folder: Path) -> tuple[tuple[str, ...], list[str], Tensor]:
    """Classes, file names and labels. Files of other kinds are refused rather than passed over."""
    try:
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
        loose = next((entry.name for entry in entries if not entry.is_dir()), None)
        if loose is not None:
            raise GossamerError(f"{folder / loose} is not in a class folder; {folder}/CLASS/*.JPEG was expected")
        classes = tuple(entry.name for entry in entries)
        names: list[str] = []
        counts = []
        for kind in classes:
            inside = sorted(os.listdir(folder / kind))
            foreign = next((name for name in inside if not name.lower().endswith(_ENDINGS)), None)
            if foreign is not None or not inside:
                what = f"{foreign} is not an image" if foreign else "there are no images"
                raise GossamerError(f"{folder / kind}: {what}; files that end with .JPEG were expected")
            names += inside
            counts.append(len(inside))
    except OSError as error:
        raise GossamerError(f"{folder} can't be read: {error.strerror}; class folders of images were expected") from None
    if not names:
        raise GossamerError(f"{folder} is empty; class folders of images were expected")
    return classes, names, torch.repeat_interleave(torch.tensor(counts))
