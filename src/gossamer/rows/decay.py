"""Which parameters weight decay may spare: biases and what belongs to norm layers. The one definition of it.

It goes by what a parameter is and never by its name. Spared are

- all parameters of norm layers (batch, instance, group, layer and RMS norms), whatever their shape,
- all others with at most one dimension: biases, and gains such as those of ``PReLU``.

Everything else is a weight and decays: matrices and kernels, and embeddings too (positions included), as GPT-2 is trained.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from gossamer.errors import GossamerError

_NORMS = (nn.modules.batchnorm._NormBase, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm)


def spared(module: nn.Module) -> set[str]:
    """The names, as in ``named_parameters()``, of the parameters that weight decay may spare."""
    norms = {id(p) for part in module.modules() if isinstance(part, _NORMS) for p in part.parameters(recurse=False)}
    return {name for name, p in module.named_parameters() if p.ndim <= 1 or id(p) in norms}


def decay_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Parameter groups for any optimizer: weights with this ``weight_decay``, biases and norm layers with none.

    optimizer = torch.optim.AdamW(gossamer.decay_groups(model, 0.1), lr=3e-4)
    """
    if weight_decay < 0:
        raise GossamerError(f"weight_decay={weight_decay} is below 0")
    without = spared(model)
    named = list(model.named_parameters())
    groups = [
        {"params": [p for name, p in named if name not in without], "weight_decay": weight_decay},
        {"params": [p for name, p in named if name in without], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]
