"""A module's own parameters as views of one flat row per dtype, so that they can be sent and mixed without a copy.

The Parameter objects stay the same, so optimizers, schedulers and hooks that hold them go on to work; only their memory moves.
What would break that (``.to()``, ``load_state_dict(assign=True)``) is noticed here, and mended where it can be.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.dlpack import from_dlpack

from gossamer.errors import GossamerError
from gossamer.rows.block import Block, check_parameters


@dataclass(frozen=True)
class _Held:
    """One parameter: where the module keeps it, and the view that its memory should be."""

    name: str
    parameter: nn.Parameter
    owner: dict[str, nn.Parameter | None]
    key: str
    view: Tensor
    pointer: int

    def describe(self) -> str:
        p = self.owner.get(self.key)
        return f"parameter {self.name!r}" + ("" if p is None else f", now {str(p.dtype)[6:]} {list(p.shape)} on {p.device},")


class Flat:
    """``blocks``: one ``[1, D]`` row per dtype. Parameters that are frozen at the start and not later get their block when
    they are first trained."""

    r = 1

    def __init__(self, module: nn.Module) -> None:
        check_parameters(module)
        self.module = module
        self.blocks: list[Block] = []
        self.names = {id(p): name for name, p in module.named_parameters()}  # of a tied one, its first name
        self._held: list[_Held] = []
        self._versions: list[int] = []  # of the parameters when they set out
        self._settled: list[int] = []  # and when the last step was done
        self._frozen: list[nn.Parameter] = list(module.parameters())
        self.adopt()

    def adopt(self) -> bool:
        """Take in the parameters that have become trainable. Returns whether there were any."""
        if not any(p.requires_grad for p in self._frozen):
            return False
        by_dtype: dict[torch.dtype, list[tuple[str, nn.Parameter, bool]]] = {}
        for p in self._frozen:
            if p.requires_grad:
                by_dtype.setdefault(p.dtype, []).append((self.names[id(p)], p, False))
        self._frozen = [p for p in self._frozen if not p.requires_grad]
        owners = dict(self.module.named_modules())
        for named in by_dtype.values():
            block = Block(named, 1, named[0][1].device)
            self.blocks.append(block)
            views = block.tensors(block.x)
            for name, p, _ in named:
                view = _alone(views[name][0])
                owner, key = owners[name.rpartition(".")[0]]._parameters, name.rpartition(".")[2]
                held = _Held(name, p, owner, key, view, view.data_ptr())
                self._held.append(held)
                self._move(held)
        return True

    @staticmethod
    def _move(held: _Held) -> None:
        with torch.no_grad():
            held.view.copy_(held.parameter)
            held.parameter.data = held.view

    def depart(self) -> None:
        """Rows set out straight from the parameters, so from here on nothing may change them."""
        self._versions = [held.parameter._version for held in self._held]

    def settle(self) -> None:
        """A step is done. What changes parameters from here on to the next one is not the optimizer."""
        self._settled = [held.parameter._version for held in self._held]

    @property
    def touched(self) -> bool:
        """Whether parameters have changed since the last step was done."""
        return any(held.parameter._version != was for held, was in zip(self._held, self._settled, strict=False))

    def check(self, busy: bool = False) -> bool:
        """The parameters are still where we put them; or were not, and are again: then True. ``busy``: rows are on their way, so they must
        not have been touched."""
        moved = False
        for held in self._held:
            if held.parameter.data_ptr() != held.pointer or held.owner.get(held.key) is not held.parameter:
                self._mend(held, busy)
                moved = True
        if busy:
            for held, version in zip(self._held, self._versions, strict=False):  # what was adopted since is not on its way
                if held.parameter._version != version:
                    raise GossamerError(
                        f"parameter {held.name!r} was changed between forward and step(), while it was being sent (by an "
                        "optimizer that gossip() was not given?); change it after step() and before the next forward, or use "
                        "send_copy=True"
                    )
        return moved

    def _mend(self, held: _Held, busy: bool) -> None:
        p, was = held.owner.get(held.key), held.view
        if p is not held.parameter:
            raise GossamerError(
                f"{held.describe()} was replaced by another object after it was wrapped (load_state_dict(assign=True) on the "
                "inner module does that), so the optimizer trains the old one; load with model.load_state_dict(...)"
            )
        if p.shape != was.shape or p.dtype != was.dtype or p.device != was.device:
            raise GossamerError(
                f"{held.describe()} was {str(was.dtype)[6:]} {list(was.shape)} on {was.device} when it was wrapped; "
                "call .to(), .half() and the like before DecentralizedDataParallel"
            )
        if busy:
            raise GossamerError(
                f"{held.describe()} got new memory between forward and step(), while it was being sent; "
                "load or replace parameters after step() and before the next forward"
            )
        self._move(held)

    def point_at(self, rows: list[Tensor] | None) -> None:
        """Let the parameters show other rows (one per block), or their own again."""
        views = self.views(rows or [None] * len(self.blocks))
        for held in self._held:
            shown = views.get(id(held.parameter))
            held.parameter.data = held.view if shown is None else _alone(shown)

    def views(self, rows: Sequence[Tensor | None]) -> dict[int, Tensor]:
        """Rows (one per block, or none) as tensors of the parameters' shapes, by ``id(parameter)``."""
        views: dict[str, Tensor] = {}
        for block, row in zip(self.blocks, rows, strict=True):
            if row is not None:
                views |= {name: view[0] for name, view in block.tensors_of(row.reshape(1, -1)).items()}
        return {id(held.parameter): views[held.name] for held in self._held if held.name in views}

    @property
    def device(self) -> torch.device:
        return self.blocks[0].x.device

    def parameters(self) -> list[nn.Parameter]:
        return [held.parameter for held in self._held]

    def parameters_of(self, block: Block) -> list[nn.Parameter]:
        """In the order of the block's slots."""
        by_name = {held.name: held.parameter for held in self._held}
        return [by_name[slot.name] for slot in block.slots]

    def rest(self) -> list[Tensor]:
        """What is not in the blocks: frozen parameters and buffers."""
        return [p.detach() for p in self._frozen] + [b.detach() for b in self.module.buffers()]

    def signature(self) -> dict[str, str]:
        """Shape, dtype and memory format of each parameter and buffer: must be the same everywhere."""
        made = {}
        for kind, tensors in (("parameter", self.module.named_parameters()), ("buffer", self.module.named_buffers())):
            for name, t in tensors:
                trained = "" if t.requires_grad or kind == "buffer" else " frozen"
                made[f"{kind} {name!r}"] = f"{str(t.dtype)[6:]} {list(t.shape)} strides {list(t.stride())}{trained}"
        return made


def _alone(view: Tensor) -> Tensor:
    """The same memory, as a tensor whose storage is no larger than itself: ``torch.save`` of one parameter writes a whole storage, and
    safetensors refuses tensors that share one."""
    if not view.numel():
        return view
    line = view.as_strided((view.numel(),), (1,)).view(torch.uint8)  # bytes: the same for each dtype
    return from_dlpack(line).view(view.dtype).as_strided(view.shape, view.stride())
