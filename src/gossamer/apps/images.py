"""Images in memory, one byte per colour and pixel: augmented and scaled as they are drawn."""

from __future__ import annotations

import torch
from torch import Tensor

from gossamer.apps.augment import Colours, crop_flip, normalised
from gossamer.data.sources import Draw, Source
from gossamer.errors import GossamerError
from gossamer.rows.backends import Batch


class Images(Source):
    """``pixels`` are ``[samples, channels, height, width]`` bytes. ``crop`` is how far a training image may be shifted (0: not at
    all, and then it is not mirrored either)."""

    def __init__(self, pixels: Tensor, labels: Tensor, colours: Colours, crop: int = 0) -> None:
        if len(pixels) != len(labels):
            raise GossamerError(f"{len(pixels)} images have {len(labels)} labels; they must agree")
        self.pixels, self._labels, self.colours, self.crop = pixels, labels, colours, crop

    def __len__(self) -> int:
        return len(self.pixels)

    def take(self, index: Tensor) -> Batch:
        index = index.to(self.pixels.device)
        return normalised(self.pixels[index], self.colours), self._labels[index]

    def draw(self, index: Tensor, draw: Draw) -> Batch:
        index = index.to(self.pixels.device)
        pixels = self.pixels[index]
        if self.crop:
            pixels = crop_flip(pixels, draw.seed, draw.step, draw.first, self.crop)
        return normalised(pixels, self.colours), self._labels[index]

    def to(self, device: torch.device) -> Images:
        return Images(self.pixels.to(device), self._labels.to(device), self.colours, self.crop)

    def describe(self) -> list[list[int]]:
        return [list(self.pixels.shape), list(self._labels.shape)]

    @property
    def labels(self) -> Tensor:
        return self._labels
