"""All-reduce, the baseline: each gradient becomes its mean over the workers, as in ``DistributedDataParallel``."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from gossamer.errors import GossamerError
from gossamer.transport.mixer import Mixer


class Gradients:
    """Of one optimizer. ``average()`` once per step, or ``again`` if somebody asks for it; ``done()`` when the step is over, or if it does
    not come.

    A gradient that is missing here counts as zero. One flag per parameter travels along, so that all workers know which
    parameters had a gradient somewhere: only those get one, and all workers' optimizers update the same ones.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, mixer: Mixer, names: dict[int, str]) -> None:
        self.optimizer, self.mixer, self.names = optimizer, mixer, names
        self._averaged = False
        self._rows: dict[tuple[torch.dtype, int], Tensor] = {}

    @torch.no_grad()
    def average(self, again: bool = False) -> None:
        if self._averaged and not again:
            return
        self._averaged = True
        if self.mixer.exchange is None:
            return
        params = [p for group in self.optimizer.param_groups for p in group["params"] if p.requires_grad]
        for dtype in dict.fromkeys(p.dtype for p in params):
            self._average([p for p in params if p.dtype == dtype])

    def done(self) -> None:
        self._averaged = False

    def _average(self, params: list[nn.Parameter]) -> None:
        sizes = [p.numel() for p in params]
        row = self._row(params[0], sum(sizes) + len(sizes))
        *parts, flags = row.split([*sizes, len(sizes)])
        flags.copy_(torch.tensor([float(p.grad is not None) for p in params]))
        for p, part in zip(params, parts, strict=True):
            if p.grad is None:
                part.zero_()
            elif p.grad.layout != torch.strided:
                raise GossamerError(
                    f"the gradient of {self.names.get(id(p), 'a parameter')!r} is sparse; all-reduce averages dense ones only"
                )
            else:
                part.view(p.shape).copy_(p.grad)
        *parts, flags = self.mixer.mean(row, "all-reduce").split([*sizes, len(sizes)])
        for p, part, somewhere in zip(params, parts, flags.tolist(), strict=True):
            if somewhere:
                p.grad = torch.empty_like(p) if p.grad is None else p.grad
                p.grad.copy_(part.view(p.shape))

    def _row(self, like: Tensor, numel: int) -> Tensor:
        key = (like.dtype, numel)
        if key not in self._rows:
            self._rows = {k: row for k, row in self._rows.items() if k[0] != like.dtype}
            self._rows[key] = like.new_empty(numel)
        return self._rows[key]
