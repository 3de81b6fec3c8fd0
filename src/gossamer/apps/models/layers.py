"""What the models share: norm layers by name, He's initialisation, and whether vmap is at work."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from gossamer.errors import GossamerError

Norm = Callable[[int], nn.Module]


def norm_layer(name: str) -> Norm:
    """``batch``, or ``group`` with 8 groups (fewer where there are fewer than 16 channels, or where 8 does not divide them)."""
    if name == "batch":
        return nn.BatchNorm2d
    if name == "group":
        return _group
    raise GossamerError(f"norm {name!r} is not known; use batch or group")


def _group(channels: int) -> nn.GroupNorm:
    most = min(8, max(1, channels // 2))
    return nn.GroupNorm(max(groups for groups in range(1, most + 1) if channels % groups == 0), channels)


def he_(module: nn.Module) -> None:
    """He et al.'s initialisation for convolutions that a ReLU follows; other layers keep PyTorch's."""
    for part in module.modules():
        if isinstance(part, nn.Conv2d):
            nn.init.kaiming_normal_(part.weight, mode="fan_out", nonlinearity="relu")


def under_vmap(x: Tensor) -> bool:
    """Whether many replicas run at once. Some of torch's kernels (LSTM, attention) vmap can't run, or only one replica at a
    time; a model then writes out what they do. (Torch has no public way to ask.)"""
    return torch._C._functorch.is_functorch_wrapped_tensor(x)
