"""For torch's own ``DistributedDataParallel``: gradients that travel in a quarter of their bytes, or an eighth.

    model = DistributedDataParallel(model)
    model.register_comm_hook(gossamer.hooks.state(), gossamer.hooks.eight_bit)

Each bucket of gradients is averaged while backward goes on, as DDP does it. Worker k owns a part of the bucket: all others send it their
numbers of that part, rounded (:mod:`gossamer.rows.codec`); it averages them, and sends the mean to all, rounded once more. All workers
have the same gradients afterwards, to the bit. Rounding is right on the average, so nothing is kept from step to step. While one bucket
travels, the next one is rounded.

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


@dataclass
class Lost:
    """What rounding has lost in one bucket: of a worker's own gradients, and of the means that it made."""

    own: Tensor
    mean: Tensor


@dataclass
class HookState:
    """Of one model. ``scatter``, ``gather``: process groups, so that what one bucket receives is not waited for by what the next one sends.
    ``bytes``: what this worker has sent since the start."""

    scatter: Any
    gather: Any
    error_feedback: bool
    bytes: int = 0
    steps: dict[int, int] = field(default_factory=dict)  # of each bucket
    lost: dict[int, Lost] = field(default_factory=dict)
    first: "queue.SimpleQueue[Job | None] | None" = None  # of the threads

    def later(self, bucket: "Bucket") -> torch.futures.Future[Tensor]:
        """A thread for each stage takes one bucket after the other, in the same order on all workers."""
        if self.first is None:
            then = None
            for stage in reversed(STAGES):
                jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
                threading.Thread(target=_work, args=(jobs, stage, then), name="gossamer-hook", daemon=True).start()
                then = jobs
            self.first = jobs
            weakref.finalize(self, jobs.put, None)  # with the model the threads end
        future: torch.futures.Future[Tensor] = torch.futures.Future()
        self.first.put((bucket, future))
        return future


def state(group: Any = None, error_feedback: bool = False) -> HookState:
    """What :func:`eight_bit` and :func:`four_bit` keep; all workers make it, at the same place. ``group``: a process group that
    nothing else uses; by default a new one of all workers."""
    if not dist.is_initialized():
        raise GossamerError("hooks.state() needs torch.distributed: call init_process_group() first, as for DDP")
    scatter = dist.new_group() if group is None else group
    gather = dist.new_group(dist.get_process_group_ranks(scatter), use_local_synchronization=True)
    return HookState(scatter, gather, error_feedback)


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
    mine = Bucket(state, index, step, row, wire)
    if row.device.type == "cpu":
        return state.later(mine)
    # A GPU does it on a stream of its own, and the stream of backward goes on. Written to the documentation: we had no GPU to try it on.
    stream = torch.cuda.Stream(row.device)
    stream.wait_stream(torch.cuda.current_stream(row.device))
    future: torch.futures.Future[Tensor] = torch.futures.Future(devices=[row.device])
    with torch.cuda.stream(stream):
        for stage in STAGES:
            stage(mine)
        future.set_result(row)
    return future


def _work(
    jobs: "queue.SimpleQueue[Job | None]", stage: Callable[["Bucket"], None], then: "queue.SimpleQueue[Job | None] | None"
) -> None:
    while (one := jobs.get()) is not None:
        bucket, future = one
        try:
            with torch.no_grad():
                stage(bucket)
        except Exception as error:  # DDP raises it where it waits for the bucket
            future.set_exception(error)  # type: ignore[arg-type]
        else:
            if then is None:
                future.set_result(bucket.row)
            else:
                then.put(one)
        del one, bucket, future  # and with them the state
    if then is not None:
        then.put(None)


class Bucket:
    """One on its way, in three stages."""

    def __init__(self, state: HookState, index: int, step: int, row: Tensor, wire: Wire) -> None:
        self.state, self.index, self.step, self.row, self.wire = state, index, step, row, wire
        self.rank, self.size = dist.get_rank(state.scatter), dist.get_world_size(state.scatter)
        self.owned = [columns(len(row), self.size, k, codec.SPAN) for k in range(self.size)]
        self.lost: Lost | None = None
        self.arriving: Arriving | None = None
        self.bytes = 0

    def scatter(self) -> None:
        """To each worker the part that it owns."""
        if self.size == 1:
            return
        numbers = self.row.float() if self.row.dtype != torch.float32 else self.row
        mine = self.wire.width(len(numbers[self.owned[self.rank]])) // self.wire.unit * self.wire.span
        self.lost = lost = _lost(self.state, self.index, numbers, mine)
        if lost is not None:
            numbers = numbers.add_(lost.own)
        codes = [_encoded(numbers[part], self.wire, codec.turn(self.step, self.rank)) for part in self.owned]
        self.codes = [code.numel() for code in codes]
        self._exchange(self.state.scatter, codes, [self.codes[self.rank]] * self.size)
        if lost is not None:
            for part, code in zip(self.owned, codes, strict=True):
                _decoded(code, lost.own[part], self.wire)
            torch.sub(numbers, lost.own, out=lost.own).nan_to_num_(0.0, 0.0, 0.0)

    def average(self) -> None:
        """What all have sent of the part that this worker owns; the mean goes to all."""
        if self.arriving is None:
            return
        arrived, lost = self.arriving.wait(), self.lost
        made = torch.empty_like(arrived[self.rank])
        if made.numel():
            mean_of_codes(arrived, self.size, made, self.step, wire=self.wire, lost=None if lost is None else lost.mean)
        self._exchange(self.state.gather, [made] * self.size, self.codes)

    def gather(self) -> None:
        if self.arriving is None:
            return
        for part, code in zip(self.owned, self.arriving.wait(), strict=True):
            _decoded(code, self.row[part], self.wire)
        self.state.bytes += self.bytes

    def _exchange(self, group: Any, codes: Sequence[Tensor], sizes: list[int]) -> None:
        """The k-th code goes to worker k. What comes: from each worker so many bytes."""
        sent = torch.cat(list(codes))
        received = sent.new_empty(sum(sizes))
        work = dist.all_to_all_single(received, sent, sizes, [code.numel() for code in codes], group=group, async_op=True)
        self.bytes += sent.numel() - codes[self.rank].numel()
        self.arriving = Arriving(work, received, sent, sizes)


STAGES = (Bucket.scatter, Bucket.average, Bucket.gather)
Job = tuple[Bucket, torch.futures.Future[Tensor]]


def _encoded(row: Tensor, wire: Wire, turn: int) -> Tensor:
    code = torch.empty(wire.width(len(row)), dtype=wire.code, device=row.device)
    if len(row):
        wire.encode(row, code, turn)
    return code


def _decoded(code: Tensor, row: Tensor, wire: Wire) -> Tensor:
    if len(row):
        wire.decode(code, row)
    return row


@dataclass
class Arriving:
    work: Any
    received: Tensor
    sent: Tensor  # it lives until it has left
    sizes: list[int]

    def wait(self) -> Sequence[Tensor]:
        self.work.wait()
        return self.received.split(self.sizes)


def _lost(state: HookState, index: int, numbers: Tensor, mine: int) -> Lost | None:
    """``mine``: numbers of the mean that this worker makes, in whole spans. DDP makes its buckets anew after the first step; then nothing
    is known of them."""
    if not state.error_feedback:
        return None
    lost = state.lost.get(index)
    if lost is None or lost.own.shape != numbers.shape:
        lost = state.lost[index] = Lost(torch.zeros_like(numbers), numbers.new_zeros(mine))
    return lost
