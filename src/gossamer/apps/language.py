"""Language models: how they are trained and judged. The perplexity is exp of the mean loss per token; lower is better."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from gossamer.data.sources import Source, Text
from gossamer.data.tasks import Metric
from gossamer.rows.backends import Batch


def loss(model: nn.Module, x: Tensor, y: Tensor, *fresh: Tensor) -> Tensor:
    """The mean over all tokens. ``fresh``: whether a model that carries a state begins anew (see ``sampling.Streams``)."""
    return cross_entropy(model(x, *fresh).flatten(0, -2), y.flatten())


def losses(logits: Tensor, y: Tensor) -> Tensor:
    return cross_entropy(logits.flatten(0, -2), y.flatten(), reduction="none")


class _Streams(Metric):
    """The state goes from each window to the next, so that every token is predicted with all that came before it."""

    def scores(self, model: nn.Module, data: Source, most: int | None) -> Iterator[Tensor]:
        state = None
        for x, y in data.parts(self.batch, most):
            logits, state = model.read(x, state)  # type: ignore[operator]
            yield losses(logits, y)


PERPLEXITY = Metric("perplexity", lambda model, x, y: losses(model(x), y), False, "exp", batch=64)
STREAMS = _Streams("perplexity", losses, False, "exp", batch=16)


def windows(tokens: Tensor, length: int) -> Batch:
    """A text as samples that can be read in any order: ``[count, length]``, and the same one token later."""
    return Text(tokens, length).take(torch.arange(0, len(tokens) - length, length))
