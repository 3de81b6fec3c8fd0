"""Residual networks: the small ones for 32×32 images, and ResNet-50."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from gossamer.apps.models.layers import Norm, he_, norm_layer
from gossamer.errors import GossamerError


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
    """The ResNets for 32×32 images: depth 6k+2 in three stages of k blocks. Depth 20 has 269,722 parameters, depth 8 75,290."""

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
        he_(self)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm(self.stem(x)))
        return self.out(self.blocks(x).mean(dim=(2, 3)))


class _Bottleneck(nn.Module):
    """1×1 down, 3×3 (which has the stride), 1×1 up to four times the width. The shortcut is a 1×1 where the shape changes."""

    def __init__(self, inputs: int, width: int, stride: int, norm: Norm) -> None:
        super().__init__()
        outputs = 4 * width
        self.conv1 = nn.Conv2d(inputs, width, 1, bias=False)
        self.bn1 = norm(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, 1, bias=False)
        self.bn2 = norm(width)
        self.conv3 = nn.Conv2d(width, outputs, 1, bias=False)
        self.bn3 = norm(outputs)
        self.downsample: nn.Module | None = None
        if stride > 1 or inputs != outputs:
            self.downsample = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), norm(outputs))

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn1(self.conv1(x)))
        y = self.bn3(self.conv3(F.relu(self.bn2(self.conv2(y)))))
        return F.relu(y + (x if self.downsample is None else self.downsample(x)))


class ResNet50(nn.Module):
    """For ImageNet, 25,557,032 parameters. Parameters have the names that checkpoints of it usually have (``layer1.0.conv1``,
    ``bn1`` also where the norm is another). ``width`` and ``blocks`` make smaller relatives of it."""

    def __init__(
        self, classes: int = 1000, width: int = 64, norm: str = "batch", blocks: tuple[int, int, int, int] = (3, 4, 6, 3)
    ) -> None:
        super().__init__()
        make = norm_layer(norm)
        self.conv1 = nn.Conv2d(3, width, 7, 2, 3, bias=False)
        self.bn1 = make(width)
        stages, channels = [], width
        for stage, count in enumerate(blocks):
            inner, layers = width * 2**stage, []
            for k in range(count):
                layers.append(_Bottleneck(channels, inner, 2 if stage and k == 0 else 1, make))
                channels = 4 * inner
            stages.append(nn.Sequential(*layers))
        self.layer1, self.layer2, self.layer3, self.layer4 = stages
        self.fc = nn.Linear(channels, classes)
        he_(self)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.bn1(self.conv1(x))), 3, 2, 1)
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return self.fc(x.mean(dim=(2, 3)))
