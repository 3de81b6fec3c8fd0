"""BatchNorm's running statistics in an averaged model.

The mean of the replicas' statistics belongs to no model: the averaged parameters see activations of their own. So by default they
are estimated anew on training data, with the averaged parameters; averaging them is offered, because it costs nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Literal

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

BatchNorm = Literal["reestimate", "average"]


def layers(model: nn.Module) -> list[_BatchNorm]:
    """Those that keep statistics."""
    return [m for m in model.modules() if isinstance(m, _BatchNorm) and m.running_mean is not None]


@torch.no_grad()
def reestimate(model: nn.Module, passes: Iterator[Callable[[], object]]) -> None:
    """Each pass runs ``model`` on some training data; all weigh the same. The model is left in the mode it was in."""
    found = layers(model)
    training, momenta = model.training, [layer.momentum for layer in found]
    for layer in found:
        layer.reset_running_stats()
        layer.momentum = None  # the mean over all passes
    model.train()
    with contextlib.ExitStack() as stack:
        stack.callback(model.train, training)
        for layer, momentum in zip(found, momenta, strict=True):
            stack.callback(setattr, layer, "momentum", momentum)
        for run in passes:
            run()
