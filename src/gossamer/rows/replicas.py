"""r replicas of one module over flat ``[r, D]`` storage, and the ways to run them forward and backward.

The template module never holds values of its own: to run replica i its parameters and buffers are pointed at row i.
How the gradients of all replicas are computed is up to a backend (``backends.py``): loop, vmap or tape.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Literal

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap

from gossamer.data import machine, seeds
from gossamer.errors import GossamerError
from gossamer.rows import decay
from gossamer.rows.backends import Backend, Batch, Loss, choose
from gossamer.rows.block import Block, check_parameters, local_buffers

Across = Callable[[Tensor], Tensor]


class Replicas:
    """``build``: a module (all replicas start as it) or a function that makes one. With ``init="different"`` the function is
    called once per replica, each time with a random stream of its own. ``first`` is the index of the first row among all n."""

    def __init__(
        self,
        build: nn.Module | Callable[[], nn.Module],
        r: int,
        *,
        init: Literal["same", "different"] = "same",
        seed: int = 0,
        first: int = 0,
        device: torch.device | str = "cpu",
        backend: str = "auto",
        vmap_randomness: bool = False,
    ) -> None:
        if r < 1:
            raise GossamerError(f"r={r}: at least one replica is needed")
        if init not in ("same", "different"):
            raise GossamerError(f"init={init!r} is not known; replicas start 'same' or 'different'")
        if init == "different" and isinstance(build, nn.Module):
            raise GossamerError("init='different' needs a function that makes a module, such as the class itself, not a module")
        self.r, self.seed = r, seed
        self.numbers: Sequence[int] = range(first, first + r)  # of each row, which replica it is among all n
        self.device = torch.device(device)
        self.backend = None if backend == "auto" else Backend.parse(backend)
        self.vmap_randomness = vmap_randomness
        self.timings: dict[str, float] = {}  # seconds per replica that `auto` saw
        self.template = self._built(build, 0 if init == "same" else first).to(self.device)
        params = dict(self.template.named_parameters())
        trainable = {name: p for name, p in params.items() if p.requires_grad}
        spared = decay.spared(self.template)
        refuse_too_large(self.template, r, self.device)
        by_dtype: dict[torch.dtype, list[tuple[str, nn.Parameter, bool]]] = {}
        for name, p in trainable.items():
            by_dtype.setdefault(p.dtype, []).append((name, p, name in spared))
        self.blocks = [Block(named, r, self.device) for named in by_dtype.values()]
        self._trainable = [[trainable[slot.name] for slot in block.slots] for block in self.blocks]
        places = {slot.name: (block, k) for block in self.blocks for k, slot in enumerate(block.slots)}
        self._in_order = [places[name] for name in trainable]  # the module's own order
        # What is not trained: buffers (each replica its own) and frozen parameters (one copy, seen r times).
        self.frozen = {name: p.detach() for name, p in params.items() if not p.requires_grad}
        self.buffers = {name: b.detach().expand(r, *b.shape).clone() for name, b in self.template.named_buffers()}
        self._buffer_rows = {name: stacked.unbind(0) for name, stacked in self.buffers.items()}
        owners = dict(self.template.named_modules())
        # A buffer that is registered in two places is one buffer: both places point at the same row.
        first_name = {id(b): name for name, b in self.template.named_buffers()}
        everywhere = self.template.named_buffers(remove_duplicate=False)
        self._buffer_places = [
            (owners[n.rpartition(".")[0]]._buffers, n.rpartition(".")[2], first_name[id(b)]) for n, b in everywhere
        ]
        self.replaces_buffers = False  # found out by the loop: forward assigns a new tensor instead of changing the old one
        self._fill(0, self.template)
        if init == "same":
            for block in self.blocks:
                block.x[1:] = block.x[:1]
        else:
            for i in range(1, r):
                self._fill(i, self._built(build, first + i).to(self.device))
        self._point_at(0)

    @property
    def row_bytes(self) -> int:
        """The size of one model's trainable parameters: what one row costs to send."""
        return sum(block.numel * block.dtype.itemsize for block in self.blocks)

    @property
    def slots(self) -> list[str]:
        """The names of the trainable tensors, block by block, in the order of their columns."""
        return [slot.name for block in self.blocks for slot in block.slots]

    # --- Forward and backward --------------------------------------------------------------------------------------------

    def gradients(self, loss: Loss, batch: Batch, step: int = 0) -> Tensor:
        """Fill ``grad`` of every block with each replica's own gradient. Returns the losses ``[r]``."""
        for k, tensor in enumerate(batch):
            if tensor.ndim == 0 or tensor.shape[0] != self.r:
                raise GossamerError(
                    f"batch tensor {k} has shape {list(tensor.shape)}, which does not split over {self.r} replicas: "
                    f"the first dimension is the replica, as in [{self.r}, batch, …]"
                )
        with seeds.undisturbed(self.device):
            if self.backend is None:
                self.backend, self.timings = choose(self, loss, batch)
            return self.run(self.backend, loss, batch, step, 0, self.r)

    def run(self, backend: Backend, loss: Loss, batch: Batch, step: int, start: int, end: int) -> Tensor:
        """Gradients of replicas ``start`` to ``end`` by the given backend."""
        if backend.kind == "loop":
            return self._loop(loss, batch, step, start, end)
        chunk = backend.chunk or self.r
        chunk = -(-(end - start) // -(-(end - start) // chunk))  # the same number of chunks, of even size
        way = self._vmap if backend.kind == "vmap" else self._tape
        losses = []
        for low in range(start, end, chunk):
            rows = slice(low, min(low + chunk, end))
            seeds.set_default(seeds.derive(self.seed, step, self.numbers[low]), self.device)
            try:
                losses.append(way(loss, rows, tuple(tensor[rows] for tensor in batch)))
            except (RuntimeError, NotImplementedError, ValueError, TypeError, AttributeError) as error:
                raise GossamerError(
                    f"backend {str(backend)!r} can't run this model ({_first_line(error)}); use 'loop'"
                ) from error
        return torch.cat(losses)

    def _loop(self, loss: Loss, batch: Batch, step: int, start: int, end: int) -> Tensor:
        self.template.train()
        losses = []
        for i in range(start, end):
            seeds.set_default(seeds.derive(self.seed, step, self.numbers[i]), self.device)
            self._point_at(i)
            for params in self._trainable:
                for p in params:
                    p.grad = None  # so that backward leaves its own tensor there instead of adding to an old one
            value = loss(self.template, *(tensor[i] for tensor in batch))
            value.backward()
            for block, params in zip(self.blocks, self._trainable, strict=True):
                targets = block.rows(block.grad)[i]
                got = [(t, p.grad) for t, p in zip(targets, params, strict=True) if p.grad is not None]
                torch._foreach_copy_([t for t, _ in got], [g for _, g in got])
                if len(got) < len(params):
                    for t, p in zip(targets, params, strict=True):
                        if p.grad is None:
                            t.zero_()
            self._keep_replaced_buffers(i)
            losses.append(value.detach())
        for params in self._trainable:
            for p in params:
                p.grad = None
        return torch.stack(losses)

    def _keep_replaced_buffers(self, i: int) -> None:
        """``self.seen = self.seen + 1`` in forward leaves a new tensor in the module; its value belongs to row i."""
        for place, key, name in self._buffer_places:
            left = place[key]
            if left is not None and left is not self._buffer_rows[name][i]:
                self.replaces_buffers = True
                self._buffer_rows[name][i].copy_(left.detach())

    def _vmap(self, loss: Loss, rows: slice, batch: Batch) -> Tensor:
        call = vmap(grad_and_value(self._functional(loss)), randomness="different")
        grads, losses = call(self._stacked(rows), self._state(rows), *batch)
        self._store(rows, grads)
        return losses.detach()

    def _tape(self, loss: Loss, rows: slice, batch: Batch) -> Tensor:
        leaves = {name: view.detach().requires_grad_() for name, view in self._stacked(rows).items()}
        losses = vmap(self._functional(loss), randomness="different")(leaves, self._state(rows), *batch)
        grads = torch.autograd.grad(losses.sum(), list(leaves.values()), allow_unused=True)
        self._store(rows, dict(zip(leaves, grads, strict=True)))
        return losses.detach()

    def _functional(self, loss: Loss) -> Callable[..., Tensor]:
        self.template.train()
        wrapped = _WithLoss(self.template, loss)

        def value(params: dict[str, Tensor], state: dict[str, Tensor], *batch: Tensor) -> Tensor:
            named = {f"module.{name}": tensor for name, tensor in {**self.frozen, **params, **state}.items()}
            return functional_call(wrapped, named, batch)

        return value

    def _stacked(self, rows: slice) -> dict[str, Tensor]:
        return {name: view[rows] for block in self.blocks for name, view in block.tensors(block.x).items()}

    def _state(self, rows: slice) -> dict[str, Tensor]:
        return {name: stacked[rows] for name, stacked in self.buffers.items()}

    def _store(self, rows: slice, grads: dict[str, Tensor | None]) -> None:
        for block in self.blocks:
            for name, target in block.tensors(block.grad).items():
                grad = grads[name]
                if grad is None:
                    target[rows].zero_()
                else:
                    target[rows].copy_(grad)

    def row_gradients(self, i: int) -> list[Tensor]:
        """Replica i's gradient, tensor by tensor, in the order of the module's parameters."""
        return [block.rows(block.grad)[i][k] for block, k in self._in_order]

    # --- Single replicas and their mean ----------------------------------------------------------------------------------

    def alike(self, i: int, j: int) -> bool:
        """Whether these two are the same to the bit."""
        pairs = [(block.x[i], block.x[j]) for block in self.blocks] + [(b[i], b[j]) for b in self.buffers.values()]
        return all(torch.equal(a, b) for a, b in pairs)

    @contextlib.contextmanager
    def replica(self, i: int) -> Iterator[nn.Module]:
        """Replica i as an ordinary module, in evaluation mode, for as long as the block lasts."""
        self._point_at(i)
        with self._evaluating():
            yield self.template

    @contextlib.contextmanager
    def _evaluating(self) -> Iterator[None]:
        was_training = self.template.training
        self.template.eval()
        try:
            yield
        finally:
            self.template.train(was_training)

    def mean_state(self, across: Across = lambda row: row) -> dict[str, Tensor]:
        """Parameters and floating-point buffers averaged over the rows; other buffers, and those that a module declares as
        ``local_buffers``, are the first replica's. ``across``: the mean of a flat tensor over processes, if there are several."""
        state = dict(self.frozen)
        local = local_buffers(self.template)
        for block in self.blocks:
            mean = across(block.x.mean(dim=0))
            for slot in block.slots:
                state[slot.name] = mean.as_strided(slot.shape, slot.strides, slot.start)
        for name, stacked in self.buffers.items():
            if stacked.is_floating_point() and name not in local:
                mean = stacked.mean(dim=0)
                state[name] = across(mean.flatten()).reshape(mean.shape)
            else:
                state[name] = stacked[0].clone()
        return state

    @contextlib.contextmanager
    def averaged(self, across: Across = lambda row: row) -> Iterator[nn.Module]:
        """The averaged model as an ordinary module, in evaluation mode, for as long as the block lasts."""
        state = self.mean_state(across)
        for params, block in zip(self._trainable, self.blocks, strict=True):
            for p, slot in zip(params, block.slots, strict=True):
                p.data = state[slot.name]
        for place, key, name in self._buffer_places:
            place[key] = state[name]
        try:
            with self._evaluating():
                yield self.template
        finally:
            self._point_at(0)

    def share_buffers(self) -> None:
        """Inside ``averaged()``: every replica gets the floating-point buffers that the averaged model has now, but for local ones."""
        local, shown = local_buffers(self.template), {name: place[key] for place, key, name in self._buffer_places}
        for name, stacked in self.buffers.items():
            if stacked.is_floating_point() and name not in local:
                stacked.copy_(shown[name])

    # --- Storage ---------------------------------------------------------------------------------------------------------

    def _point_at(self, i: int) -> None:
        for block, params in zip(self.blocks, self._trainable, strict=True):
            for p, view in zip(params, block.rows(block.x)[i], strict=True):
                p.data = view
        for place, key, name in self._buffer_places:
            place[key] = self._buffer_rows[name][i]

    def take(self, rows: Sequence[int], numbers: Sequence[int]) -> None:
        """Replicas leave, or come back as another: row k becomes what row ``rows[k]`` was, buffers included, and is replica
        ``numbers[k]`` from now on. Gradients are forgotten."""
        index = torch.tensor(rows, device=self.device)
        self.r, self.numbers = len(rows), numbers
        for block in self.blocks:
            block.take(index)
        self.buffers = {name: stacked[index] for name, stacked in self.buffers.items()}
        self._buffer_rows = {name: stacked.unbind(0) for name, stacked in self.buffers.items()}
        self._point_at(0)

    def _fill(self, i: int, module: nn.Module) -> None:
        params, buffers = dict(module.named_parameters()), dict(module.named_buffers())
        with torch.no_grad():
            for block in self.blocks:
                for slot, view in zip(block.slots, block.rows(block.x)[i], strict=True):
                    view.copy_(params[slot.name])
            for name, stacked in self.buffers.items():
                stacked[i].copy_(buffers[name])

    def _built(self, build: nn.Module | Callable[[], nn.Module], i: int) -> nn.Module:
        """The module of replica i (counted among all n). A given module is copied: it stays its owner's."""
        if isinstance(build, nn.Module):
            check_parameters(build)
            return copy.deepcopy(build)
        with seeds.undisturbed(self.device):
            seeds.set_default(seeds.derive(self.seed, -1, i), self.device)
            module = build()
        check_parameters(module)
        return module


class _WithLoss(nn.Module):
    """The loss as a module, so that whatever it does with the model (call it, a method of it, or a part of it) is computed with
    the given parameters and buffers."""

    def __init__(self, module: nn.Module, loss: Loss) -> None:
        super().__init__()
        self.module, self.loss = module, loss

    def forward(self, *batch: Tensor) -> Tensor:
        return self.loss(self.module, *batch)


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__


def split(batch: Sequence[Tensor], r: int) -> Batch:
    """``[r·b, …]`` to ``[r, b, …]``."""
    for k, tensor in enumerate(batch):
        if tensor.ndim == 0 or tensor.shape[0] % r:
            raise GossamerError(
                f"batch tensor {k} has {tensor.shape[0] if tensor.ndim else 'no'} samples, which do not split over {r} replicas"
            )
    return tuple(tensor.reshape(r, -1, *tensor.shape[1:]) for tensor in batch)


def refuse_too_large(model: nn.Module, r: int, device: torch.device) -> None:
    """Of each replica there are parameters, gradients and the mixed row, and buffers; an optimizer's state comes on top."""
    row = sum(p.nbytes for p in model.parameters() if p.requires_grad)
    need, there = r * (3 * row + sum(b.nbytes for b in model.buffers())), machine.memory()
    if device.type == "cpu" and there is not None and need > there:
        raise GossamerError(
            f"{r:,} replicas of a model of {row / 1e6:.3g} MB need {need / 1e9:,.0f} GB at least, and this machine has "
            f"{there / 1e9:,.0f} GB; use at most {int(there // (need // r)):,} replicas here, or spread them over machines (torchrun)"
        )
