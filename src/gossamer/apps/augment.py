"""Random changes to images, on a whole ``[replicas, batch, channels, height, width]`` tensor at once."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from gossamer.data import seeds
from gossamer.errors import GossamerError


@dataclass(frozen=True)
class Colours:
    """Mean and standard deviation of each channel over a training set, for values of 0…1."""

    mean: tuple[float, ...]
    std: tuple[float, ...]


CIFAR10 = Colours((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616))
IMAGENET = Colours((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


def normalised(images: Tensor, colours: Colours) -> Tensor:
    """uint8 ``[…, channels, height, width]`` to float32 with about mean 0 and deviation 1 per channel."""
    mean, std = (torch.tensor(v, device=images.device).view(-1, 1, 1) for v in (colours.mean, colours.std))
    return images.to(torch.float32).mul_(1 / (255 * std)).sub_(mean / std)


def crop_flip(images: Tensor, seed: int, step: int, first: int, padding: int = 4) -> Tensor:
    """Each image moved by up to ``padding`` pixels each way (black comes in) and mirrored half of the time.

    A pure function: row i is replica ``first + i``, whose draws depend on (seed, step, that number) alone, so however the replicas
    are spread over processes, each sees the same images.
    """
    if images.ndim != 5:
        raise GossamerError(f"images of shape {tuple(images.shape)} can't be cropped; [replicas, batch, C, H, W] was expected")
    r, b, _, height, width = images.shape
    down, right, mirrored = draws(seed, step, first, r, b, padding).to(images.device).unbind(-1)
    rows = down[..., None] + torch.arange(height, device=images.device)
    columns = torch.arange(width, device=images.device)
    columns = right[..., None] + torch.where(mirrored[..., None] == 1, columns.flip(0), columns)
    padded = F.pad(images, (padding,) * 4)
    where = rows[..., :, None] * padded.shape[-1] + columns[..., None, :]
    index = where.view(r, b, 1, height * width).expand(-1, -1, images.shape[2], -1)
    return padded.flatten(3).gather(3, index).view_as(images)


def draws(seed: int, step: int, first: int, replicas: int, batch: int, padding: int) -> Tensor:
    """``[replicas, batch, 3]``: how far down and to the right the part begins in the padded image, and whether it is mirrored."""
    side = 2 * padding + 1
    drawn = [
        torch.randint(side * side * 2, (batch,), generator=seeds.generator(seed, step, first + i, -6)) for i in range(replicas)
    ]
    each = torch.stack(drawn) if drawn else torch.empty(0, batch, dtype=torch.int64)
    return torch.stack((each // (2 * side), each // 2 % side, each % 2), dim=-1)
