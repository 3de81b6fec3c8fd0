"""A Vector is what a method computes with: of each of my r replicas one row, in a tensor ``[r, D]`` for each dtype.

Parameters, gradients and a method's own state are Vectors of the same shape, so a method is written as its equations are. Arithmetic is
in place, and one call for all tensors. A Vector of one column (:meth:`Vector.ones`) is a number per replica.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from gossamer.rows import finite
from gossamer.rows.block import Block


class Vector:
    """``numels``: numbers of a row that have to be sent (without padding), tensor by tensor."""

    def __init__(self, tensors: Sequence[Tensor], numels: Sequence[int] | None = None) -> None:
        self._tensors = list(tensors)
        self.numels = list(numels) if numels is not None else [tensor.shape[1] for tensor in self._tensors]

    @property
    def tensors(self) -> list[Tensor]:
        return self._tensors

    @property
    def flagged(self) -> list[Tensor]:
        """The tensors, with flags behind the columns if there are any (see ``parallel/gradients.py``)."""
        return self.tensors

    @property
    def widths(self) -> list[int]:
        """Columns of each tensor, flags not counted."""
        return [tensor.shape[1] for tensor in self.tensors]

    def finite(self) -> bool:
        """Whether all numbers are."""
        return all(finite.finite(tensor) for tensor in self.tensors)

    def zeros(self) -> Vector:
        return Vector([torch.zeros_like(tensor) for tensor in self.tensors], self.numels)

    def ones(self, columns: int) -> Vector:
        """So many numbers per replica, all 1."""
        first = self.tensors[0]
        dtype = torch.promote_types(first.dtype, torch.float32)
        return Vector([torch.ones(first.shape[0], columns, dtype=dtype, device=first.device)])

    def part(self, k: int, of: int) -> Vector:
        """The k-th of so many parts of the columns, as views."""
        if of == 1:
            return self
        sent = [numel * (k + 1) // of - numel * k // of for numel in self.numels]
        return Vector([x[:, len(x[0]) * k // of : len(x[0]) * (k + 1) // of] for x in self.tensors], sent)

    def clone(self) -> Vector:
        return Vector([tensor.clone() for tensor in self.tensors], self.numels)

    # --- Arithmetic, in place ---------------------------------------------------------------------------------------------

    def copy_(self, other: Vector) -> Vector:
        torch._foreach_copy_(self.tensors, other.tensors)
        return self

    def zero_(self) -> Vector:
        torch._foreach_zero_(self.tensors)
        return self

    def add_(self, other: Vector | float, alpha: float = 1.0) -> Vector:
        """Another vector, or one number to each."""
        if isinstance(other, Vector):
            torch._foreach_add_(self.tensors, other.tensors, alpha=alpha)
        else:
            torch._foreach_add_(self.tensors, alpha * other)
        return self

    def addcmul_(self, a: Vector, b: Vector, value: float = 1.0) -> Vector:
        """Plus value·a·b, number by number."""
        torch._foreach_addcmul_(self.tensors, a.tensors, b.tensors, value)
        return self

    def sqrt_(self) -> Vector:
        torch._foreach_sqrt_(self.tensors)
        return self

    def sub_(self, other: Vector, alpha: float = 1.0) -> Vector:
        torch._foreach_sub_(self.tensors, other.tensors, alpha=alpha)
        return self

    def mul_(self, other: Vector | float) -> Vector:
        """By a number, a number per replica, or number by number."""
        return self._each(torch.Tensor.mul_, other)

    def div_(self, other: Vector | float) -> Vector:
        return self._each(torch.Tensor.div_, other)

    def lerp_(self, other: Vector, weight: float) -> Vector:
        """(1 - weight)·self + weight·other."""
        torch._foreach_lerp_(self.tensors, other.tensors, weight)
        return self

    def __sub__(self, other: Vector) -> Vector:
        return Vector(torch._foreach_sub(self.tensors, other.tensors), self.numels)

    def norm(self) -> Vector:
        """Of each replica, over all of its numbers: one number."""
        squares = sum(tensor.double().square().sum(dim=1, keepdim=True) for tensor in self.tensors)
        return Vector([torch.as_tensor(squares).sqrt().to(torch.promote_types(self.tensors[0].dtype, torch.float32))])

    def _each(self, apply: Callable[[Tensor, Tensor | float], Tensor], other: Vector | float) -> Vector:
        theirs: Sequence[Tensor | float]
        if isinstance(other, Vector):
            few = len(other.tensors) == 1 and other.tensors[0].shape[1] == 1
            theirs = [other.tensors[0].to(mine.dtype) for mine in self.tensors] if few else other.tensors
        else:
            theirs = [other] * len(self.tensors)
        for mine, their in zip(self.tensors, theirs, strict=True):
            apply(mine, their)
        return self

    # --- Rows that come and go --------------------------------------------------------------------------------------------

    def take(self, rows: Tensor) -> Vector:
        """Row k becomes what row ``rows[k]`` was."""
        return Vector([tensor[rows] for tensor in self.tensors], self.numels)


class _OfBlocks(Vector):
    """Rows of blocks, wherever these keep them now."""

    def __init__(self, blocks: list[Block]) -> None:
        self.blocks = blocks

    @property
    def numels(self) -> list[int]:  # type: ignore[override]
        return [block.numel for block in self.blocks]


class Parameters(_OfBlocks):
    """``in_place``: they stay where they are, because a person's module shows them; otherwise what was mixed into a spare buffer becomes
    the current one."""

    def __init__(self, blocks: list[Block], in_place: bool) -> None:
        super().__init__(blocks)
        self.in_place = in_place

    @property
    def tensors(self) -> list[Tensor]:
        return [block.x for block in self.blocks]


class Gradients(_OfBlocks):
    @property
    def tensors(self) -> list[Tensor]:
        return [block.grad for block in self.blocks]
