"""Models, written plainly."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn


def mlp(inputs: int, outputs: int, hidden: Sequence[int] = (128, 128)) -> nn.Sequential:
    """Fully connected, ReLU between."""
    sizes = [inputs, *hidden, outputs]
    layers: list[nn.Module] = [nn.Flatten()]
    for k, (a, b) in enumerate(zip(sizes, sizes[1:], strict=False)):
        layers += [nn.Linear(a, b)] + ([nn.ReLU()] if k < len(hidden) else [])
    return nn.Sequential(*layers)
