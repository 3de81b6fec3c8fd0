"""What one worker computes and sends in a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import nn

from gossamer.errors import GossamerError

_MIB = 1 << 20


def gradient_sizes(model: nn.Module) -> list[int]:
    """Bytes of the gradients, about in the order in which backward makes them: the last layer first."""
    return [p.numel() * p.element_size() for p in model.parameters() if p.requires_grad][::-1]


@dataclass(frozen=True)
class Workload:
    """Seconds of one worker. ``tensors``: bytes of each gradient, in the order in which backward makes them. ``shares``: which
    part of backward each takes (``of_tensors``: as its bytes)."""

    forward: float
    backward: float
    update: float
    tensors: tuple[int, ...]
    shares: tuple[float, ...]
    name: str = "workload"

    def __post_init__(self) -> None:
        if min(self.forward, self.backward, self.update) < 0:
            raise GossamerError(f"workload {self.name!r}: a time is negative")
        if not self.tensors or min(self.tensors) < 0 or len(self.tensors) != len(self.shares):
            raise GossamerError(f"workload {self.name!r}: needs one size and one share of backward per tensor")

    @classmethod
    def of_tensors(
        cls, tensors: Sequence[int], forward: float, backward: float, update: float = 0.0, name: str = "workload"
    ) -> Workload:
        total = sum(tensors)
        if total <= 0:
            raise GossamerError(f"workload {name!r}: it has no parameters")
        return cls(forward, backward, update, tuple(tensors), tuple(size / total for size in tensors), name)

    @classmethod
    def of_parameters(cls, parameters: int, compute: float, update: float = 0.0, layers: int = 24, name: str = "") -> Workload:
        """Of a model of which only the size and the time for forward and backward are known: ``layers`` equal tensors, and backward
        takes twice as long as forward."""
        if parameters < 1:
            raise GossamerError(f"{parameters} parameters; a model has at least one")
        count = max(1, min(layers, parameters))
        sizes = [4 * (parameters * (k + 1) // count - parameters * k // count) for k in range(count)]
        return cls.of_tensors(sizes, compute / 3, compute * 2 / 3, update, name or f"{parameters:,} parameters")

    @property
    def row_bytes(self) -> int:
        """All parameters of one replica."""
        return sum(self.tensors)

    @property
    def compute(self) -> float:
        return self.forward + self.backward + self.update

    def buckets(self, cap: float | None) -> tuple[tuple[int, float], ...]:
        """The gradients as torch DDP groups them, in the order of backward: (bytes, share of backward). A bucket is closed by the
        tensor with which it reaches ``cap`` MiB. As in torch, None is 25 with a first one of 1, and a given cap holds for all."""
        most = (25 if cap is None else cap) * _MIB
        made: list[tuple[int, float]] = []
        size, share, limit = 0, 0.0, _MIB if cap is None else most
        for tensor, part in zip(self.tensors, self.shares, strict=True):
            size, share = size + tensor, share + part
            if size >= limit:
                made.append((size, share))
                size, share, limit = 0, 0.0, most
        if size or share:
            made.append((size, share))
        return tuple(made)

    def slower(self, factor: float) -> Workload:
        """All times multiplied."""
        return replace(self, forward=self.forward * factor, backward=self.backward * factor, update=self.update * factor)
