"""The mean over the workers of a module's parameters and floating-point buffers: for a while, or for good.

Buffers that a module declares as its ``local_buffers`` (a hidden state) are left out: each worker keeps its own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gossamer.errors import Diverged
from gossamer.rows.block import Block, local_buffers
from gossamer.rows.finite import culprit, finite
from gossamer.rows.flat import Flat
from gossamer.transport.exchange import Exchange
from gossamer.transport.mixer import Mixer


@contextlib.contextmanager
def averaged(flat: Flat, mixer: Mixer, model: nn.Module, batches: Iterable[Any] | None) -> Iterator[None]:
    """Parameters and buffers show their mean. Their own memory is not touched, so rows may be on their way meanwhile.

    ``batches``: inputs with which BatchNorm's statistics are estimated anew, on ``model``.
    """
    with torch.inference_mode(False), torch.no_grad():
        rows = [mean_row(block, mixer, "consensus()").clone() for block in flat.blocks]
        places = [(m._buffers, key) for m in flat.module.modules() for key, b in m._buffers.items() if b is not None]
        own = [owner[key] for owner, key in places]
        shared = _shared(flat.module, own)
        means = mean_buffers([b for b in own if b is not None], shared, mixer)
        flat.point_at(rows)
    for (owner, key), mean in zip(places, means, strict=True):
        owner[key] = mean
    try:
        if batches is not None:
            torch.optim.swa_utils.update_bn(batches, model, device=flat.blocks[0].x.device)
            for b, mean in zip(means, mean_buffers(means, shared, mixer), strict=True):
                b.copy_(mean)
        yield
    finally:
        with torch.inference_mode(False):
            flat.point_at(None)
        for (owner, key), before in zip(places, own, strict=True):
            owner[key] = before


@torch.inference_mode(False)
@torch.no_grad()
def average_(flat: Flat, mixer: Mixer) -> None:
    rows = [mean_row(block, mixer, "average_()") for block in flat.blocks]
    for block, row in zip(flat.blocks, rows, strict=True):
        block.x[0].copy_(row)
    buffers = list(flat.module.buffers())
    for b, mean in zip(buffers, mean_buffers(buffers, _shared(flat.module, buffers), mixer, "average_()"), strict=True):
        _write(b, mean)


@torch.no_grad()
def broadcast(flat: Flat, exchange: Exchange) -> None:
    """All workers get rank 0's parameters, frozen ones included, and buffers of any dtype."""
    for block in flat.blocks:
        exchange.broadcast_(block.x[0].view(torch.uint8), "the start")
    for t in flat.rest():
        sent = t.contiguous().flatten()
        exchange.broadcast_(sent.view(torch.uint8), "the start")
        _write(t, sent.reshape(t.shape))


def hand_over(flat: Flat, exchange: Exchange, donors: dict[int, int], also: Sequence[Tensor] = ()) -> None:
    """Each of ``donors`` gets the parameters and buffers of its donor, and what is in ``also``. All take part, so that all count alike."""
    to = [q for q, donor in donors.items() if donor == exchange.rank]
    for t in [*(block.x[0] for block in flat.blocks), *flat.rest(), *also]:
        tag = exchange.collective_tag("uneven()")
        sent = t.contiguous().flatten()
        row = sent.view(torch.uint8)
        if exchange.rank in donors:
            exchange.edges([], [(donors[exchange.rank], row)], tag, "uneven()").wait()
            _write(t, sent.reshape(t.shape))
        else:
            exchange.edges([(q, row) for q in to], [], tag, "uneven()").wait()


def mean_row(block: Block, mixer: Mixer, what: str) -> Tensor:
    """The mean of the workers' parameters. It is an error on all workers if those of one are not finite; under ``gossamer launch`` that
    one leaves, and the others have the mean of theirs."""
    row = block.x[0]
    if not mixer.check_finite:
        return mixer.mean(row, what)

    def sound(mean: Tensor) -> bool:
        whole = finite(mean)
        if not whole:
            mixer.look_for_fault(block, row)
            if mixer.fault is not None and mixer.on_fault is not None:
                mixer.on_fault(mixer.fault)
        return whole

    mean = mixer.mean(row, what, sound)
    if not finite(mean):
        raise Diverged(_blame(block, mixer, what))
    return mean


def _blame(block: Block, mixer: Mixer, what: str) -> str:
    exchange, name = mixer.exchange, culprit(block, block.x[0])
    ranks: list[int] = []
    if exchange is not None and exchange.guard is None:
        flags = exchange.gather(block.x.new_tensor([bool(name)]), what).flatten().tolist()
        ranks = [exchange.link.names[exchange.living[k]] for k, flag in enumerate(flags) if flag]
    shown = f"rank {', '.join(map(str, ranks))}" if ranks else "a worker"
    mine = f" (here {name!r})" if name else ""
    return f"{what}: parameters of {shown} are not finite{mine}, so there is no mean of all; a checkpoint from before may help"


def mean_buffers(buffers: list[Tensor], shared: list[bool], mixer: Mixer, what: str = "consensus()") -> list[Tensor]:
    """The floating-point ones that are shared averaged, the others copied."""
    made = [b.detach().clone() for b in buffers]
    averaged = [b for b, meant in zip(made, shared, strict=True) if meant and b.is_floating_point()]
    for dtype in dict.fromkeys(b.dtype for b in averaged):
        some = [b for b in averaged if b.dtype == dtype]
        mean = mixer.mean(torch.cat([b.flatten() for b in some]), what)
        for b, part in zip(some, mean.split([b.numel() for b in some]), strict=True):
            b.copy_(part.reshape(b.shape))
    return made


def _shared(module: nn.Module, buffers: Sequence[Tensor | None]) -> list[bool]:
    """Which of its buffers are not local."""
    names = local_buffers(module)
    local = {id(b) for name, b in module.named_buffers(remove_duplicate=False) if name in names}
    return [id(b) not in local for b in buffers]


def _write(t: Tensor, values: Tensor) -> None:
    """A buffer may have been made with ``expand()``: then several of its elements are one in memory."""
    once = tuple(slice(0, 1) if stride == 0 else slice(None) for stride in t.stride())
    t.detach()[once].copy_(values[once])
