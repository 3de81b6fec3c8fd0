"""A Block is the state that is mixed: r replicas' trainable parameters of one dtype as rows of one flat ``[r, D]`` buffer.

Beside the parameters ``x`` stand, once they are asked for, the gradients ``grad`` and a ``spare`` buffer that receives the
mixed rows; ``swap()`` makes it the current one. Each tensor starts at a multiple of 64 bytes, as torch's own allocations do,
so that kernels (and their rounding) behave as on a separate tensor.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from gossamer.errors import GossamerError

_ALIGN = 64  # bytes


@dataclass(frozen=True)
class Slot:
    """Where one parameter tensor lies in a row. ``spared``: a bias or a norm layer's parameter (weight decay may spare it)."""

    name: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    start: int
    numel: int
    spared: bool


class Block:
    def __init__(self, named: Sequence[tuple[str, nn.Parameter, bool]], r: int, device: torch.device) -> None:
        """``named``: (name, parameter, spared). Parameters that weight decay may spare come last, so that each of the two
        groups is one range of columns."""
        self.dtype = named[0][1].dtype
        per_line = max(1, _ALIGN // self.dtype.itemsize)
        slots: list[Slot] = []
        start = 0
        self.decayed = 0  # columns before this one belong to tensors that always take weight decay
        for name, p, spared in sorted(named, key=lambda item: item[2]):
            slots.append(Slot(name, tuple(p.shape), _dense_strides(p), start, p.numel(), spared))
            start += -(-p.numel() // per_line) * per_line
            if not spared:
                self.decayed = start
        self.slots = tuple(slots)
        self.x = torch.zeros(r, start, dtype=self.dtype, device=device)
        self._grad: Tensor | None = None
        self._spare: Tensor | None = None
        self._views: dict[int, dict[str, Tensor]] = {}
        self._rows: dict[int, list[list[Tensor]]] = {}

    @property
    def r(self) -> int:
        return self.x.shape[0]

    @property
    def numel(self) -> int:
        """Numbers in one row, padding not counted: what has to be sent."""
        return sum(slot.numel for slot in self.slots)

    @property
    def grad(self) -> Tensor:
        if self._grad is None:
            self._grad = torch.zeros_like(self.x)
        return self._grad

    @property
    def spare(self) -> Tensor:
        if self._spare is None:
            self._spare = torch.empty_like(self.x)
        return self._spare

    def swap(self) -> None:
        """The spare buffer, which holds the mixed rows, becomes the current one."""
        self.x, self._spare = self.spare, self.x

    def take(self, rows: Tensor) -> None:
        """Row k becomes what row ``rows[k]`` was. Gradients are forgotten."""
        self.x = self.x[rows]
        self._grad = self._spare = None
        self._views.clear()
        self._rows.clear()

    def tensors(self, flat: Tensor) -> dict[str, Tensor]:
        """``flat`` (x or grad) as ``{name: [r, *shape]}``, in the memory format of the original parameter."""
        key = flat.data_ptr()
        if key not in self._views:
            self._views[key] = self.tensors_of(flat)
        return self._views[key]

    def tensors_of(self, flat: Tensor) -> dict[str, Tensor]:
        """The same for any tensor of the block's shape, made anew each time."""
        return {
            s.name: flat.as_strided((self.r, *s.shape), (flat.stride(0), *s.strides), flat.storage_offset() + s.start)
            for s in self.slots
        }

    def rows(self, flat: Tensor) -> list[list[Tensor]]:
        """``flat`` as one list of tensors per replica, in the order of ``slots``."""
        key = flat.data_ptr()
        if key not in self._rows:
            stacked = [view.unbind(0) for view in self.tensors(flat).values()]
            self._rows[key] = [list(row) for row in zip(*stacked, strict=True)]
        return self._rows[key]


def _dense_strides(p: Tensor) -> tuple[int, ...]:
    """p's own strides if it fills its memory without gaps (contiguous, channels_last …), else contiguous ones."""
    expected = 1
    for stride, size in sorted(zip(p.stride(), p.shape, strict=True)):
        if size != 1 and stride != expected:
            return torch.empty(p.shape, device="meta").stride()
        expected *= size
    return p.stride()


def check_parameters(module: nn.Module) -> None:
    """Whether the parameters can be rows of a block at all."""
    params = dict(module.named_parameters())
    if not any(p.requires_grad for p in params.values()):
        raise GossamerError(f"{type(module).__name__} has no trainable parameters, so there is nothing to train or average")
    places: list[tuple[int, int, str]] = []
    for name, p in params.items():
        if p.layout != torch.strided or not p.dtype.is_floating_point:
            raise GossamerError(
                f"parameter {name!r} is {p.dtype} ({p.layout}); only dense floating-point parameters can be averaged"
            )
        places.append((p.data_ptr(), p.data_ptr() + p.numel() * p.element_size(), name))
    places.sort()
    for (_, end, name), (start, _, other) in itertools.pairwise(places):
        if start < end:
            raise GossamerError(
                f"parameters {name!r} and {other!r} share memory but are not the same Parameter; "
                "tie weights by assigning the same Parameter object to both"
            )


def local_buffers(module: nn.Module) -> set[str]:
    """The full names of buffers that belong to one replica's data, such as the hidden state of a recurrent network, so that
    their mean over replicas has no meaning. A module class says which of its own are: ``local_buffers = {"h", "c"}``."""
    return {
        f"{prefix}.{name}" if prefix else name
        for prefix, part in module.named_modules(remove_duplicate=False)
        for name in getattr(type(part), "local_buffers", ())
    }
