"""``p.grad`` of a person's parameters as a Vector: methods compute with rows, and optimizers read ``p.grad``."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from gossamer.errors import GossamerError
from gossamer.rows.flat import Flat
from gossamer.rows.vector import Vector


class _Part(NamedTuple):
    """Of a block: the gradients and the flags in one row, its parameters, their gradients in the row, the flags."""

    row: Tensor
    params: list[nn.Parameter]
    views: list[Tensor]
    flags: Tensor


class OwnGradients(Vector):
    """Gradients are gathered when a method first asks for them in a moment, and :meth:`write_back` follows that moment.

    A gradient that is missing counts as zero. A mean over the workers carries one flag per parameter (:attr:`flagged`): a parameter gets a
    gradient if it had one on any worker, so all optimizers update the same parameters. A method that computes with :attr:`tensors` gives
    each trainable parameter a gradient. ``blank``: a step without training, in which all gradients are zero.
    """

    def __init__(self, flat: Flat) -> None:
        self._flat = flat
        self._parts: list[_Part] = []  # of each block
        self._gathered = self._dense = False
        self.blank = False
        self.refused = ""  # why a method can't have them now

    @property
    def tensors(self) -> list[Tensor]:
        rows = self._rows()
        self._dense = True
        return rows

    def norm(self) -> Vector:
        """Reads the gradients only, so no parameter gets one."""
        return Vector(self._rows()).norm()

    def _rows(self) -> list[Tensor]:
        if self.refused:
            raise GossamerError(self.refused)
        self._gather()
        return [part.row[:, : block.x.shape[1]] for part, block in zip(self._parts, self._flat.blocks, strict=True)]

    @property
    def numels(self) -> list[int]:  # type: ignore[override]
        return [block.numel for block in self._flat.blocks]

    @property
    def widths(self) -> list[int]:
        return [block.x.shape[1] for block in self._flat.blocks]

    @property
    def flagged(self) -> list[Tensor]:
        self._gather()
        return [part.row for part in self._parts]

    def _gather(self) -> None:
        if self._gathered:
            return
        self._gathered = True
        for block in self._flat.blocks[len(self._parts) :]:  # new ones: parameters that were frozen before
            columns = block.x.shape[1]
            row = block.x.new_zeros(1, columns + len(block.slots))
            views = [view[0] for view in block.tensors_of(row).values()]
            self._parts.append(_Part(row, self._flat.parameters_of(block), views, row[0, columns:]))
        for row, params, views, flags in self._parts:
            grads = [p.grad if p.requires_grad and not self.blank else None for p in params]
            present = [(p, view, grad) for p, view, grad in zip(params, views, grads, strict=True) if grad is not None]
            if len(present) < len(params):
                row.zero_()
            for p, _, grad in present:
                if grad.layout != torch.strided:
                    name = self._flat.names.get(id(p), "a parameter")
                    raise GossamerError(
                        f"the gradient of {name!r} is sparse, and only dense ones can be averaged; take a graph that averages parameters "
                        "(graph='one-peer-exponential'), or sparse=False"
                    )
            if present:
                torch._foreach_copy_([view for _, view, _ in present], [grad for _, _, grad in present])
            flags.copy_(torch.tensor([grad is not None for grad in grads], dtype=flags.dtype))

    def forget(self) -> None:
        """The moment is over, or has raised an error."""
        self._gathered = self._dense = False
        self.refused = ""

    def write_back(self) -> None:
        if not self._gathered or self.blank:
            return
        for _, params, views, flags in self._parts:
            somewhere = [p.requires_grad for p in params] if self._dense else [flag > 0 for flag in flags.tolist()]
            trained = [(p, view) for p, view, there in zip(params, views, somewhere, strict=True) if there]
            targets = []
            for p, _ in trained:
                if p.grad is None:
                    p.grad = torch.empty_like(p)
                targets.append(p.grad)
            if trained:
                torch._foreach_copy_(targets, [view for _, view in trained])
