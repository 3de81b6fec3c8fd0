"""X <- W X: a fast path for each kind of Round, and the plain reference beside it that the tests hold it to.

X is ``[n, D]``, one replica's parameters a row. Nothing is mixed in place: the result goes to ``out``, so that x_t can still
be read (by a backward pass, or by a neighbour) while it is being averaged. The limit is memory bandwidth, so the paths below
touch each row of X as few times as they can while it is in the cache. This is the only place where averaging arithmetic lives;
``mixer.py`` puts it together with rows that come from other processes.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, singledispatch

import numpy as np
import scipy.sparse
import torch
from torch import Tensor

from gossamer.errors import GossamerError
from gossamer.graphs.rounds import General, Groups, Hosts, Mean, Permutation, Round, Window

_RESTART = 64  # rows after which a moving sum starts afresh, so that rounding errors do not pile up
_NARROW = 5  # rows in a window that is summed row by row
_TILE = 512  # columns of X that a sparse product takes at a time on a CPU: what it gathers stays in the cache
_PIECE = 1 << 16  # numbers of a row that several passes take at a time: they stay in the cache
_DENSE = 0.25  # share of non-zero weights from which a dense product is faster than a sparse one


Rows = Sequence[Tensor] | Mapping[int, Tensor]  # by replica


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
    width = 2 * round_.half + 1
    _windows(round_, x.unbind(0), range(round_.n), out.unbind(0), lambda i, out: _window_mean(x, i - round_.half, width, out))


def _windows(round_: Window, rows: Rows, wanted: range, outs: Sequence[Tensor], first: Callable[[int, Tensor], None]) -> None:
    """Rows ``wanted`` of the result. ``first(i, out)`` makes the first of a stretch."""
    n, h = round_.n, round_.half
    width = 2 * h + 1
    restart = max(_RESTART, 4 * width)
    for k, i in enumerate(wanted):
        if width <= _NARROW:
            _window_sum(round_, rows, i, outs[k])
        elif k % restart == 0:
            first(i, outs[k])
        else:
            torch.sub(rows[(i + h) % n], rows[(i - h - 1) % n], out=outs[k])
            torch.add(outs[k - 1], outs[k], alpha=1 / width, out=outs[k])


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
        _swap_half(round_, rows, i, outs[i])


def _swap_half(round_: Permutation, rows: Rows, i: int, out: Tensor) -> None:
    j = round_.source[i]
    if i == j:
        out.copy_(rows[i])
    else:
        torch.lerp(rows[i], rows[j], round_.weight, out=out)


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
def _(round_: Hosts, x: Tensor, out: Tensor) -> None:
    means = x.unflatten(0, (-1, round_.per_node)).mean(dim=1)
    mixed = mix(round_.inner, means, torch.empty_like(means))
    out.unflatten(0, (-1, round_.per_node)).copy_(mixed.unsqueeze(1))


@_apply.register
def _(round_: General, x: Tensor, out: Tensor) -> None:
    product([(round_.weights, x)], out)


def product(terms: Sequence[tuple[scipy.sparse.csr_array, Tensor]], out: Tensor) -> None:
    """out <- Σ weights @ rows. Each is sparse or dense, whichever is faster."""
    pairs = [(_weights(_ById(w), rows.dtype, rows.device), rows) for w, rows in terms if w.shape[1]]
    sparse = any(w.layout != torch.strided for w, _ in pairs)
    tile = _TILE if sparse and out.device.type == "cpu" else out.shape[1]
    for start in range(0, out.shape[1], tile):
        columns = slice(start, start + tile)
        for k, (w, rows) in enumerate(pairs):
            if w.layout == torch.strided and tile == out.shape[1]:
                torch.mm(w, rows, out=out) if k == 0 else torch.addmm(out, w, rows, out=out)
            elif k == 0:
                out[:, columns] = w @ rows[:, columns]
            else:
                out[:, columns] += w @ rows[:, columns]


@dataclass(frozen=True)
class _ById:
    """A matrix as a key: by identity, and it stays alive as long as it is in the cache."""

    weights: scipy.sparse.csr_array

    def __hash__(self) -> int:
        return id(self.weights)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _ById) and self.weights is other.weights


@lru_cache(maxsize=256)
def _weights(key: _ById, dtype: torch.dtype, device: torch.device) -> Tensor:
    w = key.weights
    half = dtype not in (torch.float32, torch.float64)  # no sparse product in half precision
    if w.nnz > _DENSE * w.shape[0] * w.shape[1] or half:
        return torch.from_numpy(w.toarray()).to(device, dtype)
    starts, columns = (torch.from_numpy(part.astype("int64")) for part in (w.indptr, w.indices))
    values = torch.from_numpy(w.data)
    with warnings.catch_warnings():  # torch says that its CSR tensors are "in beta" each time; our tests cover our use
        warnings.filterwarnings("ignore", message="Sparse CSR tensor support is in beta")
        return torch.sparse_csr_tensor(starts, columns, values, size=w.shape, check_invariants=True).to(device, dtype)


# --- With rows that came from other processes -----------------------------------------------------------------------------


def mix_some(
    round_: Round,
    first: int,
    x: Tensor,
    received: Tensor,
    names: Sequence[int] | None,
    local: scipy.sparse.csr_array,
    remote: scipy.sparse.csr_array,
    out: Tensor,
) -> None:
    """My rows of W X by edges.

    - ``x``: my own rows, from number ``first`` on, with their weights ``local``.
    - ``received``: what came, with its weights ``remote``. ``names``: which rows these are; None if there are sums of rows among them.

    Sums run in the order of the neighbours, never in that of arrival.
    """
    mine = range(first, first + len(x))
    if names is not None and isinstance(round_, (Window, Permutation)):
        rows: dict[int, Tensor] = dict(zip(mine, x.unbind(0), strict=True))
        rows |= dict(zip(names, received.unbind(0), strict=True))
        outs = out.unbind(0)
        if isinstance(round_, Permutation):
            for k, i in enumerate(mine):
                _swap_half(round_, rows, i, outs[k])
        else:
            _windows(round_, rows, mine, outs, lambda i, out: _window_sum(round_, rows, i, out))
        return
    patterns, inverse = _distinct(_ById(local), _ById(remote))
    if len(inverse) == patterns[0].shape[0]:
        product([(local, x), (remote, received)], out)
        return
    made = out.new_empty(patterns[0].shape[0], out.shape[1])
    product([(patterns[0], x), (patterns[1], received)], made)
    torch.index_select(made, 0, inverse.to(out.device), out=out)


def _window_sum(round_: Window, rows: Rows, i: int, out: Tensor) -> None:
    h, n = round_.half, round_.n
    torch.add(rows[(i - h) % n], rows[(i - h + 1) % n], out=out)
    for j in range(i - h + 2, i + h + 1):
        out.add_(rows[j % n])
    out.div_(2 * h + 1)


@lru_cache(maxsize=256)
def _distinct(local: _ById, remote: _ById) -> tuple[tuple[scipy.sparse.csr_array, scipy.sparse.csr_array], Tensor]:
    """Rows of the same weights are worked out once: in a mean all of them are the same."""
    r = local.weights.shape[0]
    both = np.hstack([local.weights.toarray(), remote.weights.toarray()])
    _, index, inverse = np.unique(both, axis=0, return_index=True, return_inverse=True)
    made = (scipy.sparse.csr_array(both[index, :r]), scipy.sparse.csr_array(both[index, r:]))
    return made, torch.from_numpy(np.asarray(inverse).reshape(-1))


def blend(x: Tensor, own: float, others: Sequence[tuple[float, Tensor]], out: Tensor) -> None:
    """One row: out <- own·x + Σ weight·row. ``out`` may be ``x``."""
    if len(others) == 1 and abs(own + others[0][0] - 1) < 1e-12:
        torch.lerp(x, others[0][1], others[0][0], out=out)
        return
    for piece in range(0, x.numel(), _PIECE):  # several passes over what is in the cache
        part = slice(piece, piece + _PIECE)
        torch.mul(x[part], own, out=out[part])
        for weight, row in others:
            out[part].add_(row[part], alpha=weight)


def correct(x: Tensor, snapshot: Tensor, others: Sequence[tuple[float, Tensor]]) -> None:
    """One row, in place: x <- x + Σ weight·(row - snapshot), in the precision of x. What was sent may be rounded
    (``snapshot`` and ``row`` in bfloat16) or older than x; the difference is exact, so means are kept."""
    for piece in range(0, x.numel(), _PIECE):
        part = slice(piece, piece + _PIECE)
        target, base = x[part], snapshot[part]
        base = base if base.dtype == x.dtype else base.to(x.dtype)
        for weight, row in others:
            target.add_(row[part].to(x.dtype).sub_(base) if row.dtype != x.dtype else row[part] - base, alpha=weight)
