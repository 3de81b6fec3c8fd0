"""X <- W X: a fast path for each kind of Round, and the plain reference beside it that the tests hold it to.

X is ``[n, D]``, one replica's parameters a row. Nothing is mixed in place: the result goes to ``out``, so that x_t can still
be read (by a backward pass, or by a neighbour) while it is being averaged. The limit is memory bandwidth, so the paths below
touch each row of X as few times as they can while it is in the cache. This is the only place where averaging arithmetic lives.
"""

from __future__ import annotations

import warnings
from functools import lru_cache, singledispatch

import torch
from torch import Tensor

from gossamer.blocks import Block
from gossamer.errors import GossamerError
from gossamer.rounds import General, Groups, Mean, Permutation, Round, Window

_RESTART = 64  # rows after which a moving sum starts afresh, so that rounding errors do not pile up
_NARROW = 5  # rows in a window that is summed row by row
_TILE = 512  # columns of X that a sparse product takes at a time on a CPU: what it gathers stays in the cache
_DENSE = 0.25  # share of non-zero weights from which a dense product is faster than a sparse one


def reference(round_: Round, x: Tensor) -> Tensor:
    """W X in float64, rounded once. Slow, and the truth."""
    return (torch.from_numpy(round_.matrix()).to(x.device) @ x.double()).to(x.dtype)


def mix(round_: Round, x: Tensor, out: Tensor) -> Tensor:
    """out <- W X by the fast path of the Round's kind."""
    if x.shape[0] != round_.n:
        raise GossamerError(f"this Round is for {round_.n} replicas, but X has {x.shape[0]} rows")
    if x.shape != out.shape or x.data_ptr() == out.data_ptr():
        raise GossamerError(f"mix needs an `out` of X's shape {list(x.shape)} and apart from X; got {list(out.shape)}")
    if round_.n == 1:
        return out.copy_(x)
    _apply(round_, x, out)
    return out


@singledispatch
def _apply(round_: Round, x: Tensor, out: Tensor) -> None:
    raise TypeError(f"no fast path for {type(round_).__name__}")


@_apply.register
def _(round_: Mean, x: Tensor, out: Tensor) -> None:
    out.copy_(x.mean(dim=0, keepdim=True).expand_as(x))


@_apply.register
def _(round_: Window, x: Tensor, out: Tensor) -> None:
    """A narrow window adds its rows. A wide one moves: out[i] = out[i-1] + (x[i+h] - x[i-h-1])/(2h+1), two passes over a row
    whatever the width.

    The moving sum starts afresh every 64 rows; for a very wide window every 4 widths, so that starting stays a small part of
    the work. The error of a stretch of m rows is about √m roundings, and a row much larger than the others leaves one of its
    own roundings, divided by the width, behind: that is why narrow windows do not move.
    """
    n, h = round_.n, round_.half
    width = 2 * h + 1
    rows, outs = x.unbind(0), out.unbind(0)
    if width <= _NARROW:
        for i in range(n):
            torch.add(rows[i - h], rows[i - h + 1], out=outs[i])
            for j in range(i - h + 2, i + h + 1):
                outs[i].add_(rows[j % n])
            outs[i].div_(width)
        return
    restart = max(_RESTART, 4 * width)
    for i in range(n):
        if i % restart == 0:
            _window_mean(x, i - h, width, outs[i])
        else:
            torch.sub(rows[(i + h) % n], rows[i - h - 1], out=outs[i])
            torch.add(outs[i - 1], outs[i], alpha=1 / width, out=outs[i])


def _window_mean(x: Tensor, start: int, width: int, out: Tensor) -> None:
    """The mean of ``width`` rows from ``start``, around the end of X if need be."""
    start %= x.shape[0]
    first = x[start : start + width]
    torch.sum(first, dim=0, out=out)
    if width > len(first):
        out.add_(x[: width - len(first)].sum(dim=0))
    out.div_(width)


@_apply.register
def _(round_: Permutation, x: Tensor, out: Tensor) -> None:
    rows, outs = x.unbind(0), out.unbind(0)
    for i in _cycle_order(round_.source):
        j = round_.source[i]
        if i == j:
            outs[i].copy_(rows[i])
        else:
            torch.lerp(rows[i], rows[j], round_.weight, out=outs[i])


@lru_cache(maxsize=256)
def _cycle_order(source: tuple[int, ...]) -> tuple[int, ...]:
    """Rows along the permutation's cycles: the row just read as a peer is the next to be written, still in the cache."""
    order: list[int] = []
    seen = [False] * len(source)
    for start in range(len(source)):
        i = start
        while not seen[i]:
            seen[i] = True
            order.append(i)
            i = source[i]
    return tuple(order)


@_apply.register
def _(round_: Groups, x: Tensor, out: Tensor) -> None:
    rows, outs = x.unbind(0), out.unbind(0)
    for group in round_.groups:
        first = outs[group[0]]
        if len(group) == 1:
            first.copy_(rows[group[0]])
            continue
        torch.add(rows[group[0]], rows[group[1]], out=first)
        for i in group[2:]:
            first.add_(rows[i])
        first.div_(len(group))
        for i in group[1:]:
            outs[i].copy_(first)


@_apply.register
def _(round_: General, x: Tensor, out: Tensor) -> None:
    weights = _weights(round_, x.dtype, x.device)
    if weights.layout == torch.strided:
        torch.mm(weights, x, out=out)
        return
    tile = _TILE if x.device.type == "cpu" else x.shape[1]
    for start in range(0, x.shape[1], tile):
        columns = slice(start, start + tile)
        out[:, columns] = weights @ x[:, columns]


@lru_cache(maxsize=64)
def _weights(round_: General, dtype: torch.dtype, device: torch.device) -> Tensor:
    w = round_.weights
    if w.nnz > _DENSE * round_.n**2 or dtype not in (torch.float32, torch.float64):  # no sparse product in half precision
        return torch.from_numpy(w.toarray()).to(device, dtype)
    starts, columns = (torch.from_numpy(part.astype("int64")) for part in (w.indptr, w.indices))
    values = torch.from_numpy(w.data)
    with warnings.catch_warnings():  # torch says that its CSR tensors are "in beta" each time; our tests cover our use
        warnings.filterwarnings("ignore", message="Sparse CSR tensor support is in beta")
        return torch.sparse_csr_tensor(starts, columns, values, size=w.shape, check_invariants=True).to(device, dtype)


class Mixer:
    """Applies the Round of the moment to a block. In one process the block is all of X, and nothing has to be waited for."""

    def __init__(self, n: int) -> None:
        self.n = n
        self.round: Round = Mean(n)

    def start(self, block: Block) -> None:
        """Start to mix ``block.x`` into ``block.spare``. ``block.x`` may be read, not changed, until ``finish``."""
        mix(self.round, block.x, block.spare)

    def finish(self, block: Block) -> None:
        """The mixed rows are there and become ``block.x``."""
        block.swap()

    def mean_(self, rows: Tensor) -> None:
        """Every row becomes the mean of all n rows."""
        if self.n > 1:
            rows.copy_(rows.mean(dim=0, keepdim=True).expand_as(rows))
