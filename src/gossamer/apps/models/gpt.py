"""A decoder-only transformer as GPT-2 has it: learned positions, norms before, GELU, the output matrix is the embedding."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gossamer.apps.models.layers import under_vmap
from gossamer.errors import GossamerError


@dataclass(frozen=True)
class GPTShape:
    vocabulary: int
    context: int  # the longest text that it reads
    layers: int
    heads: int
    width: int
    bias: bool = True  # in matrices and norms
    tied: bool = True  # the output matrix is the embedding
    dropout: float = 0.0


GPT2_SMALL = GPTShape(50257, 1024, 12, 12, 768)  # 124,439,808 parameters
GPT2_SMALL_NO_BIAS = GPTShape(50304, 1024, 12, 12, 768, bias=False)  # 124,373,760; a vocabulary that 64 divides
GPT_NANO = GPTShape(256, 64, 4, 4, 64)  # 220,544: bytes, for laptops


class _Attention(nn.Module):
    def __init__(self, shape: GPTShape) -> None:
        super().__init__()
        self.heads, self.dropout = shape.heads, shape.dropout
        self.qkv = nn.Linear(shape.width, 3 * shape.width, bias=shape.bias)
        self.out = nn.Linear(shape.width, shape.width, bias=shape.bias)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1))
        y = self.attend(q, k, v, written_out=under_vmap(q))
        return F.dropout(self.out(y.transpose(1, 2).flatten(2)), self.dropout, self.training)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, written_out: bool) -> Tensor:
        """Over ``[batch, heads, length, …]``, by torch's kernel or written out. For many replicas at once the kernel is the
        slower way: 16 to 64 of the nano shape took 1.1 to 1.5 times as long."""
        dropout = self.dropout if self.training else 0.0
        if not written_out:
            return F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
        length = q.shape[-2]
        future = torch.full((length, length), -math.inf, dtype=q.dtype, device=q.device).triu(1)
        scores = (q / math.sqrt(q.shape[-1])) @ k.transpose(-2, -1) + future
        return F.dropout(scores.softmax(dim=-1), dropout, self.training) @ v


class _Layer(nn.Module):
    def __init__(self, shape: GPTShape) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(shape.width, bias=shape.bias)
        self.attention = _Attention(shape)
        self.norm2 = nn.LayerNorm(shape.width, bias=shape.bias)
        self.up = nn.Linear(shape.width, 4 * shape.width, bias=shape.bias)
        self.down = nn.Linear(4 * shape.width, shape.width, bias=shape.bias)
        self.dropout = shape.dropout

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        y = self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))
        return x + F.dropout(y, self.dropout, self.training)


class GPT(nn.Module):
    """``forward(tokens [batch, length]) -> logits [batch, length, vocabulary]``, each from the tokens up to that one."""

    def __init__(self, shape: GPTShape = GPT_NANO) -> None:
        super().__init__()
        if shape.width % shape.heads:
            raise GossamerError(f"width={shape.width} does not split over {shape.heads} heads")
        self.shape = shape
        self.embed = nn.Embedding(shape.vocabulary, shape.width)
        self.position = nn.Embedding(shape.context, shape.width)
        self.layers = nn.Sequential(*(_Layer(shape) for _ in range(shape.layers)))
        self.norm = nn.LayerNorm(shape.width, bias=shape.bias)
        self.out = nn.Linear(shape.width, shape.vocabulary, bias=False)
        if shape.tied:
            self.out.weight = self.embed.weight
        self._initialise()

    def _initialise(self) -> None:
        """As GPT-2: normal with 0.02, and smaller where a layer adds to the residual stream."""
        for name, part in self.named_modules():
            if isinstance(part, nn.Linear | nn.Embedding):
                adds = name.endswith((".attention.out", ".down"))
                nn.init.normal_(part.weight, std=0.02 / math.sqrt(2 * self.shape.layers) if adds else 0.02)
            if isinstance(part, nn.Linear) and part.bias is not None:
                nn.init.zeros_(part.bias)

    def forward(self, tokens: Tensor) -> Tensor:
        length = tokens.shape[-1]
        if length > self.shape.context:
            raise GossamerError(f"{length} tokens, but this GPT reads at most context={self.shape.context}")
        x = self.embed(tokens) + self.position(torch.arange(length, device=tokens.device))
        x = F.dropout(x, self.shape.dropout, self.training)
        return self.out(self.norm(self.layers(x)))
