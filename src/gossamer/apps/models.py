"""Models, written plainly."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import torch.nn.functional as F
from torch import Tensor, nn

from gossamer.errors import GossamerError

Norm = Callable[[int], nn.Module]


def mlp(inputs: int, outputs: int, hidden: Sequence[int] = (128, 128)) -> nn.Sequential:
    """Fully connected, ReLU between."""
    sizes = [inputs, *hidden, outputs]
    layers: list[nn.Module] = [nn.Flatten()]
    for k, (a, b) in enumerate(itertools.pairwise(sizes)):
        layers += [nn.Linear(a, b)] + ([nn.ReLU()] if k < len(hidden) else [])
    return nn.Sequential(*layers)


class _Block(nn.Module):
    """Two 3×3 convolutions and a shortcut without parameters (He et al.'s option A: stride, and zeros for new channels)."""

    def __init__(self, inputs: int, outputs: int, stride: int, norm: Norm) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.norm1 = norm(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.norm2 = norm(outputs)
        self.stride, self.new = stride, outputs - inputs

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x)))))
        if self.new:
            before = self.new // 2
            x = F.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, before, self.new - before))
        return F.relu(x + y)


class CifarResNet(nn.Module):
    """The ResNets for 32×32 images: depth 6k+2 in three stages of k blocks (8, 20, 32 …)."""

    def __init__(self, depth: int = 20, width: int = 16, classes: int = 10, norm: str = "batch") -> None:
        super().__init__()
        if depth < 8 or (depth - 2) % 6:
            raise GossamerError(f"a CIFAR ResNet of depth {depth} does not exist; depth is 8, 14, 20, 26, 32 …")
        make = norm_layer(norm)
        self.stem = nn.Conv2d(3, width, 3, 1, 1, bias=False)
        self.norm = make(width)
        blocks: list[nn.Module] = []
        channels = width
        for stage in range(3):
            for k in range((depth - 2) // 6):
                outputs = width * 2**stage
                blocks.append(_Block(channels, outputs, 2 if stage and k == 0 else 1, make))
                channels = outputs
        self.blocks = nn.Sequential(*blocks)
        self.out = nn.Linear(channels, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm(self.stem(x)))
        return self.out(self.blocks(x).mean(dim=(2, 3)))


def norm_layer(name: str) -> Norm:
    """``batch``, or ``group`` with 8 groups (fewer where there are fewer than 16 channels)."""
    if name == "batch":
        return nn.BatchNorm2d
    if name == "group":
        return lambda channels: nn.GroupNorm(min(8, max(1, channels // 2)), channels)
    raise GossamerError(f"norm {name!r} is not known; use batch or group")
