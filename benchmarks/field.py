"""What others do, as methods of DBench in one process: plain references, to be compared with. ``studies`` knows them by name.

    fp16-hook        torch's ``fp16_compress_hook``
    powersgd         torch's ``powerSGD_hook``, with its error feedback and warm start (Vogels et al., NeurIPS 2019)
    post-local-sgd   torch's ``post_localSGD_hook`` and ``PeriodicModelAverager`` (Lin et al., ICLR 2020)

Each replica's gradients are those that it would have as a worker of its own, so the loss is that of real workers.
``tests/test_frontier.py`` holds the first two against torch's own hooks. DiLoCo is Gossamer's own ``diloco:lr=0.7,momentum=0.9``, and
decent-dp's update is ``awc`` on the one-peer exponential graph.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from gossamer import GossamerError, Method, Step, Vector


@dataclass(frozen=True)
class Fp16Hook(Method):
    """Gradients are halved in precision, divided, and added up in half precision."""

    name, averages, graphless = "fp16-hook", "gradients", True

    def after_backward(self, s: Step) -> None:
        for rows in _all(s, s.grad):
            parts = rows.half().div_(len(rows))
            total = parts[0].clone()
            for part in parts[1:]:
                total.add_(part)
            rows.copy_(total)
        s.bytes += s.mixer.cost_of_mean(s.grad) // 2


@dataclass(frozen=True)
class PowerSGD(Method):
    """A gradient matrix M travels as P Qᵀ of rank ``rank``: P = mean(M Q), orthogonalized; Q = mean(Mᵀ P). What was lost is added to the
    next step's gradients. ``start``: steps of plain all-reduce before."""

    name, averages, graphless = "powersgd", "gradients", True
    rank: int = 1
    start: int = 110

    def state(self, like: Vector) -> dict[str, Vector]:
        """Of each Q its place in ``q`` is that of its matrix, from the left; the same on all replicas."""
        generator, q = torch.Generator().manual_seed(0), like.zeros()
        for rows in q.tensors:
            rows.copy_(torch.randn(rows.shape[1], generator=generator))
        return {"lost": like.zeros(), "q": q}

    def after_backward(self, s: Step) -> None:
        if s.t < self.start:
            s.mean(s.grad).into(s.grad)
            return
        lost, sent, whole = s.state["lost"], 0, 0
        s.grad.add_(lost)
        lost.copy_(s.grad)
        _all(s, s.grad)
        for matrix, q in self._matrices(s):
            sent += compressed(matrix, q, self.rank)
            whole += matrix[0].numel()
        lost.sub_(s.grad)
        s.bytes += s.mixer.cost_of_mean(s.grad) * sent // whole

    def _matrices(self, s: Step) -> Iterator[tuple[Tensor, Tensor]]:
        """Of each parameter: its gradient ``[r, n, m]`` and the place of its Q."""
        for block, kept in zip(s.grad.blocks, s.state["q"].tensors, strict=True):  # type: ignore[attr-defined]
            for slot in block.slots:
                places = slice(slot.start, slot.start + slot.numel)
                yield block.grad[:, places].view(block.r, slot.shape[0], -1), kept[:, places]


def compressed(matrix: Tensor, place: Tensor, rank: int) -> int:
    """``[r, n, m]`` becomes P Qᵀ, and what is in ``place`` the new Q. Returns how many numbers travel; a matrix that would not become half
    as large becomes its mean."""
    n, m = matrix.shape[1:]
    rank = min(n, m, rank)
    if (n + m) * rank * 2 >= n * m:
        matrix.copy_(matrix.mean(dim=0).expand_as(matrix))
        return n * m
    q = _orthogonal(place[0, : m * rank].view(m, rank))
    p = _orthogonal((matrix @ q).mean(dim=0))
    q = (matrix.transpose(1, 2) @ p).mean(dim=0)
    place[:, : m * rank] = q.flatten()
    matrix.copy_((p @ q.T).expand_as(matrix))
    return (n + m) * rank


def _orthogonal(columns: Tensor) -> Tensor:
    return torch.linalg.qr(columns).Q


@dataclass(frozen=True)
class PostLocalSGD(Method):
    """``start`` steps as all-reduce; then local steps, and parameters are averaged in every ``H``-th."""

    name, graphless = "post-local-sgd", True
    H: int = 8
    start: int = 110

    def after_backward(self, s: Step) -> None:
        if s.t < self.start:
            s.mean(s.grad).into(s.grad)

    def after_update(self, s: Step) -> None:
        s.look()
        if s.t >= self.start and (s.t - self.start) % self.H == 0:
            s.mean(s.x).into(s.x)


def _all(s: Step, rows: Vector) -> list[Tensor]:
    """The rows, if they are those of all replicas."""
    if len(s.mixer.rows) < s.mixer.n:
        raise GossamerError("methods of benchmarks/field.py are references for one process; run them without torchrun")
    return rows.tensors
