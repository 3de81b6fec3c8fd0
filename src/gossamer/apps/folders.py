"""Images in class folders as a Source: each is decoded when it is drawn."""

from __future__ import annotations

import copy

import torch
from torch import Tensor

from gossamer.apps.data import ImageFolder
from gossamer.data import seeds
from gossamer.data.sources import Draw, Source
from gossamer.rows.backends import Batch


class Folder(Source):
    """``most``: so many images, evenly over all classes (default: all of them). In a fixed random order, so that any first part
    of them has all classes too."""

    def __init__(self, images: ImageFolder, most: int | None = None) -> None:
        self.images, self.device = images, torch.device("cpu")
        count, some = len(images), min(len(images), most or len(images))
        self._index = (torch.arange(some) * count // some)[torch.randperm(some, generator=seeds.generator(0, -9))]

    def __len__(self) -> int:
        return len(self._index)

    def take(self, index: Tensor) -> Batch:
        return self._moved(self.images.take(self._index[index.cpu()]))

    def draw(self, index: Tensor, draw: Draw) -> Batch:
        return self._moved(self.images.take(self._index[index.cpu()], seeds.derive(draw.seed, draw.step)))

    def _moved(self, batch: Batch) -> Batch:
        return tuple(tensor.to(self.device) for tensor in batch)

    def to(self, device: torch.device) -> Folder:
        moved = copy.copy(self)
        moved.device = device
        return moved

    def describe(self) -> list[list[int]]:
        return [[len(self), 3, self.images.size, self.images.size], [len(self), len(self.images.classes)]]

    @property
    def labels(self) -> Tensor:
        return self.images.labels[self._index]
