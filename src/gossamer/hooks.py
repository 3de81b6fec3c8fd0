"""For torch's own ``DistributedDataParallel``: gradients that travel in a quarter of their bytes, or an eighth.

    model = DistributedDataParallel(model)
    model.register_comm_hook(gossamer.hooks.state(), gossamer.hooks.eight_bit)

Each bucket of gradients is averaged while backward goes on, as DDP does it. Worker k owns a part of the bucket: all others send it their
numbers of that part, rounded (:mod:`gossamer.rows.codec`); it averages them, and sends the mean to all, rounded once more. All workers
have the same gradients afterwards, to the bit. Rounding is right on the average, so nothing is kept from step to step.

``state(error_feedback=True)`` adds what rounding has lost to the next step's gradients. It takes memory for one more copy of the gradients.
"""

# DDP looks at the annotations of a hook, so they must be no strings: no `from __future__ import annotations` here.
import queue
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gossamer.errors import GossamerError
from gossamer.rows import codec
from gossamer.rows.movement import mean_of_codes
from gossamer.rows.wires import WIRES, Wire
from gossamer.transport.routes import columns

Job = tuple[Callable[[], Tensor], torch.futures.Future[Tensor]]


@dataclass
class Lost:
    """What rounding has lost in one bucket: of a worker's own gradients, and of the means that it made."""

    own: Tensor
    mean: Tensor


@dataclass
class HookState:
    """Of one model. ``bytes``: what this worker has sent since the start."""

    group: Any
    error_feedback: bool
    bytes: int = 0
    steps: dict[int, int] = field(default_factory=dict)  # of each bucket
    lost: dict[int, Lost] = field(default_factory=dict)
    jobs: queue.SimpleQueue[Job | None] | None = None

    def later(self, job: Callable[[], Tensor]) -> torch.futures.Future[Tensor]:
        """A thread does one job after the other, in the same order on all workers."""
        if self.jobs is None:
            self.jobs = queue.SimpleQueue()
            threading.Thread(target=_work, args=(self.jobs,), name="gossamer-hook", daemon=True).start()
            weakref.finalize(self, self.jobs.put, None)  # with the model the thread ends
        future: torch.futures.Future[Tensor] = torch.futures.Future()
        self.jobs.put((job, future))
        return future


def state(group: Any = None, error_feedback: bool = False) -> HookState:
    """What :func:`eight_bit` and :func:`four_bit` keep; all workers make it, at the same place. ``group``: a process group that
    nothing else uses; by default a new one of all workers."""
    if not dist.is_initialized():
        raise GossamerError("hooks.state() needs torch.distributed: call init_process_group() first, as for DDP")
    return HookState(dist.new_group() if group is None else group, error_feedback)


def eight_bit(state: HookState, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """25 % of the bytes of float32."""
    return _hook(state, bucket, WIRES["8bits"])


def four_bit(state: HookState, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """13 % of the bytes. Rounding to 15 levels is noise that costs some loss; ``error_feedback`` helps."""
    return _hook(state, bucket, WIRES["4bits"])


def _hook(state: HookState, bucket: dist.GradBucket, wire: Wire) -> torch.futures.Future[Tensor]:
    if not isinstance(state, HookState):
        raise GossamerError(
            f"the hook needs a state: model.register_comm_hook(gossamer.hooks.state(), …); it got {type(state).__name__}"
        )
    index, row = bucket.index(), bucket.buffer()
    step = state.steps[index] = state.steps.get(index, -1) + 1
    if row.device.type == "cpu":
        return state.later(lambda: _average(state, index, step, row, wire))
    # A GPU does it on a stream of its own, and the stream of backward goes on. Written to the documentation: we had no GPU to try it on.
    stream = torch.cuda.Stream(row.device)
    stream.wait_stream(torch.cuda.current_stream(row.device))
    future: torch.futures.Future[Tensor] = torch.futures.Future(devices=[row.device])
    with torch.cuda.stream(stream):
        future.set_result(_average(state, index, step, row, wire))
    return future


def _work(jobs: queue.SimpleQueue[Job | None]) -> None:
    while (one := jobs.get()) is not None:
        job, future = one
        try:
            future.set_result(job())
        except Exception as error:  # DDP raises it where it waits for the bucket
            future.set_exception(error)  # type: ignore[arg-type]
        del one, job, future  # and with them the state


@torch.no_grad()
def _average(state: HookState, index: int, step: int, row: Tensor, wire: Wire) -> Tensor:
    rank, size = dist.get_rank(state.group), dist.get_world_size(state.group)
    if size == 1:
        return row
    owned = [columns(len(row), size, k, codec.SPAN) for k in range(size)]
    numbers = row.float() if row.dtype != torch.float32 else row
    lost = _lost(state, index, numbers, wire.width(len(numbers[owned[rank]])) // wire.unit * wire.span)
    if lost is not None:
        numbers = numbers.add_(lost.own)
    codes = [_encoded(numbers[part], wire, codec.turn(step, rank)) for part in owned]
    arrived = _exchange(state, codes, [codes[rank].numel()] * size)
    if lost is not None:
        for part, code in zip(owned, codes, strict=True):
            _decoded(code, lost.own[part], wire)
        torch.sub(numbers, lost.own, out=lost.own).nan_to_num_(0.0, 0.0, 0.0)
    made = torch.empty_like(codes[rank])
    if made.numel():
        mean_of_codes(arrived, size, made, step, wire=wire, lost=None if lost is None else lost.mean)
    for part, code in zip(owned, _exchange(state, [made] * size, [code.numel() for code in codes]), strict=True):
        _decoded(code, row[part], wire)
    return row


def _encoded(row: Tensor, wire: Wire, turn: int) -> Tensor:
    code = torch.empty(wire.width(len(row)), dtype=wire.code, device=row.device)
    if len(row):
        wire.encode(row, code, turn)
    return code


def _decoded(code: Tensor, row: Tensor, wire: Wire) -> Tensor:
    if len(row):
        wire.decode(code, row)
    return row


def _exchange(state: HookState, codes: Sequence[Tensor], sizes: Sequence[int]) -> Sequence[Tensor]:
    """The k-th code goes to worker k. What comes: from each worker so many bytes."""
    sent = torch.cat(list(codes))
    received = sent.new_empty(sum(sizes))
    dist.all_to_all_single(received, sent, list(sizes), [code.numel() for code in codes], group=state.group)
    state.bytes += sent.numel() - codes[dist.get_rank(state.group)].numel()
    return received.split(list(sizes))


def _lost(state: HookState, index: int, numbers: Tensor, mine: int) -> Lost | None:
    """``mine``: numbers of the mean that this worker makes, in whole spans. DDP makes its buckets anew after the first step; then nothing
    is known of them."""
    if not state.error_feedback:
        return None
    lost = state.lost.get(index)
    if lost is None or lost.own.shape != numbers.shape:
        lost = state.lost[index] = Lost(torch.zeros_like(numbers), numbers.new_zeros(mine))
    return lost
