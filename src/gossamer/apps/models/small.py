"""The two smallest: a perceptron, and a convolutional network for 28×28 images."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from torch import nn

from gossamer.apps.models.layers import he_, norm_layer


def mlp(inputs: int, outputs: int, hidden: Sequence[int] = (128, 128)) -> nn.Sequential:
    """Fully connected, ReLU between."""
    sizes = [inputs, *hidden, outputs]
    layers: list[nn.Module] = [nn.Flatten()]
    for k, (a, b) in enumerate(itertools.pairwise(sizes)):
        layers += [nn.Linear(a, b)] + ([nn.ReLU()] if k < len(hidden) else [])
    return nn.Sequential(*layers)


def cnn(classes: int = 10, width: int = 16, channels: int = 1, size: int = 28, norm: str = "batch") -> nn.Sequential:
    """Two convolutions, each with norm, ReLU and pooling, and a linear layer: 20,538 parameters for Fashion-MNIST.
    ``size``: images are size × size; ``[batch, size, size]`` is as good as ``[batch, 1, size, size]``."""
    make = norm_layer(norm)
    made = nn.Sequential(
        nn.Flatten(1),
        nn.Unflatten(1, (channels, size, size)),
        nn.Conv2d(channels, width, 3, padding=1, bias=False),
        make(width),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(width, 2 * width, 3, padding=1, bias=False),
        make(2 * width),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(1),
        nn.Linear(2 * width * (size // 4) ** 2, classes),
    )
    he_(made)
    return made
