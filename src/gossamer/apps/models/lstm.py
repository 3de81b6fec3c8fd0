"""A word-level language model: an LSTM that reads a long text in windows and carries its state from one to the next."""

from __future__ import annotations

from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gossamer.apps.models.layers import under_vmap
from gossamer.errors import GossamerError

State = tuple[Tensor, Tensor]  # h and c, each [layers, batch, hidden]


class WordLSTM(nn.Module):
    """``forward(tokens [batch, window]) -> logits [batch, window, vocabulary]``.

    Truncated back-propagation through time: in training mode forward starts from the state that the window before left in the
    buffers ``h`` and ``c``, cut off from its gradient, and leaves its own there. ``fresh`` (a bool, or one for each of the
    ``batch`` texts) starts from zeros instead, as at the beginning of a text. The state belongs to one replica's text, so a
    mean over replicas has no meaning: ``local_buffers`` says so.

    In evaluation mode each call starts from zeros and leaves nothing. To evaluate a long text window by window use
    :meth:`read`, which takes the state and gives the new one.

    One replica at a time runs through torch's own LSTM. For many at once (the backends vmap and tape of ``Replicas``), where
    that can't run or is slow, the cell is written out in matrix products.
    """

    local_buffers: ClassVar[frozenset[str]] = frozenset({"h", "c"})

    def __init__(
        self,
        vocabulary: int,
        embedding: int = 200,
        hidden: int = 200,
        layers: int = 2,
        dropout: float = 0.0,
        tied: bool = False,
        batch: int = 20,
    ) -> None:
        super().__init__()
        if tied and embedding != hidden:
            raise GossamerError(
                f"tied weights: the output matrix is the embedding, so embedding={embedding} and hidden={hidden} must be equal"
            )
        self.dropout, self.batch = dropout, batch
        self.embed = nn.Embedding(vocabulary, embedding)
        self.lstm = nn.LSTM(embedding, hidden, layers, dropout=dropout if layers > 1 else 0.0, batch_first=True)
        self.out = nn.Linear(hidden, vocabulary)
        nn.init.uniform_(self.embed.weight, -0.1, 0.1)
        nn.init.uniform_(self.out.weight, -0.1, 0.1)
        nn.init.zeros_(self.out.bias)
        if tied:
            self.out.weight = self.embed.weight
        self.h: Tensor
        self.c: Tensor
        self.register_buffer("h", torch.zeros(layers, batch, hidden))
        self.register_buffer("c", torch.zeros(layers, batch, hidden))

    def forward(self, tokens: Tensor, fresh: Tensor | None = None) -> Tensor:
        if not self.training:
            return self.read(tokens)[0]
        if tokens.shape[0] != self.batch:
            raise GossamerError(
                f"{tokens.shape[0]} texts at a time, but this WordLSTM carries the state of batch={self.batch}; "
                "training batches must have that many"
            )
        # Copies, because backward needs the values from before this window.
        start = self.h.clone(), self.c.clone()
        if fresh is not None:
            keep = (~fresh.bool()).to(self.h.dtype).unsqueeze(-1)  # [1] or [batch, 1]
            start = start[0] * keep, start[1] * keep
        logits, (h, c) = self.read(tokens, start)
        self.h.copy_(h.detach())  # in place: under vmap a buffer that is replaced would be lost
        self.c.copy_(c.detach())
        return logits

    def read(self, tokens: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        """Logits, and the state after the last token; ``state`` is that after the window before, or None at the beginning."""
        x = F.dropout(self.embed(tokens), self.dropout, self.training)
        if state is None:
            zeros = x.new_zeros(self.lstm.num_layers, tokens.shape[0], self.lstm.hidden_size)
            state = zeros, zeros
        x, state = self.written_out(x, state) if under_vmap(x) else self.lstm(x, state)
        return self.out(F.dropout(x, self.dropout, self.training)), state

    def written_out(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        """What ``self.lstm(x, state)`` does."""
        last: list[State] = []
        for layer in range(self.lstm.num_layers):
            x, end = self._layer(layer, x, state[0][layer], state[1][layer])
            last.append(end)
            if layer < self.lstm.num_layers - 1:
                x = F.dropout(x, self.dropout, self.training)
        h, c = (torch.stack(parts) for parts in zip(*last, strict=True))
        return x, (h, c)

    def _layer(self, layer: int, x: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, State]:
        """One layer over the whole window, ``[batch, window, …]``."""
        kinds = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
        from_input, from_state, bias1, bias2 = (getattr(self.lstm, f"{kind}_l{layer}") for kind in kinds)
        recurrent = from_state.t()
        outputs = []
        for step in F.linear(x, from_input, bias1 + bias2).unbind(1):  # what needs no state, for all steps at once
            i, f, g, o = (step + h @ recurrent).chunk(4, dim=-1)
            c = f.sigmoid() * c + i.sigmoid() * g.tanh()
            h = o.sigmoid() * c.tanh()
            outputs.append(h)
        return torch.stack(outputs, dim=1), (h, c)
