"""DenseNet-BC for 32×32 images: each layer sees the outputs of all layers before it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gossamer.apps.models.layers import Norm, he_, norm_layer
from gossamer.errors import GossamerError


class _Layer(nn.Module):
    """Norm, ReLU and 1×1 to four times the growth; norm, ReLU and 3×3 to the growth; the result beside the input."""

    def __init__(self, inputs: int, growth: int, norm: Norm) -> None:
        super().__init__()
        self.norm1 = norm(inputs)
        self.conv1 = nn.Conv2d(inputs, 4 * growth, 1, bias=False)
        self.norm2 = norm(4 * growth)
        self.conv2 = nn.Conv2d(4 * growth, growth, 3, 1, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv2(F.relu(self.norm2(self.conv1(F.relu(self.norm1(x))))))
        return torch.cat([x, y], dim=1)


class _Transition(nn.Module):
    """Half the channels, half the size."""

    def __init__(self, inputs: int, outputs: int, norm: Norm) -> None:
        super().__init__()
        self.norm = norm(inputs)
        self.conv = nn.Conv2d(inputs, outputs, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.avg_pool2d(self.conv(F.relu(self.norm(x))), 2)


class DenseNet(nn.Module):
    """The BC variant (bottlenecks, compression 0.5) in three stages: depth 100 with growth 12 has 769,162 parameters."""

    def __init__(self, depth: int = 100, growth: int = 12, classes: int = 10, norm: str = "batch") -> None:
        super().__init__()
        if depth < 10 or (depth - 4) % 6:
            raise GossamerError(f"a DenseNet-BC of depth {depth} does not exist; depth is 10, 16, 22 … 100 …")
        make = norm_layer(norm)
        channels = 2 * growth
        self.stem = nn.Conv2d(3, channels, 3, 1, 1, bias=False)
        parts: list[nn.Module] = []
        for stage in range(3):
            for _ in range((depth - 4) // 6):
                parts.append(_Layer(channels, growth, make))
                channels += growth
            if stage < 2:
                parts.append(_Transition(channels, channels // 2, make))
                channels //= 2
        self.parts = nn.Sequential(*parts)
        self.norm = make(channels)
        self.out = nn.Linear(channels, classes)
        he_(self)
        nn.init.zeros_(self.out.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(F.relu(self.norm(self.parts(self.stem(x)))).mean(dim=(2, 3)))
