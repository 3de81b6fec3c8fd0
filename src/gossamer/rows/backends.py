"""The ways to compute the gradients of many replicas, and which of them is fastest for this model, batch and machine.

``loop``      one replica after the other; random numbers (dropout) are exactly those of (seed, step, replica)
``vmap:16``   ``vmap(grad(loss))`` over 16 replicas at a time; plain ``vmap`` takes all at once
``tape:16``   vmap of the forward pass only, then one ordinary backward pass; often faster where convolutions dominate

None of them wins everywhere, so ``auto`` times a few on the first step and keeps the best.
"""

from __future__ import annotations

import time
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch

from gossamer.data import seeds
from gossamer.data.sources import Batch, Loss
from gossamer.errors import GossamerError

if TYPE_CHECKING:
    from gossamer.rows.replicas import Replicas

Kind = Literal["loop", "vmap", "tape"]

_CHUNKS = (4, 16, 64, 256)
_LARGEST = 128 << 20  # bytes of parameters in one chunk: more has never been faster, and costs memory
_SAMPLE = 16  # replicas in one measurement, at least
_REPEATS = 2
_FINALISTS, _CLOSE = 3, 1.3  # how many whole steps are compared in the end, and how near to the best they must be
_PATIENCE = 3.0  # seconds for one turn of the finalists: longer steps are told apart well enough by the first measurement
_HOPELESS = 2.5  # times slower than the best so far after the warm-up: not measured any further


@dataclass(frozen=True)
class Backend:
    """``chunk``: replicas at a time (0: all of them)."""

    kind: Kind
    chunk: int = 0

    def __str__(self) -> str:
        return f"{self.kind}:{self.chunk}" if self.chunk else self.kind

    @staticmethod
    def parse(text: str) -> Backend:
        kind, colon, chunk = text.partition(":")
        well_formed = not colon or (kind != "loop" and chunk.isdecimal() and int(chunk) > 0)
        if kind not in ("loop", "vmap", "tape") or not well_formed:
            raise GossamerError(f"backend {text!r} is not known; use auto, loop, vmap, vmap:16, tape or tape:16")
        return Backend(kind, int(chunk or 0))  # type: ignore[arg-type]


def choose(replicas: Replicas, loss: Loss, batch: Batch) -> tuple[Backend, dict[str, float]]:
    """The fastest backend, and the seconds per replica of each that was tried. Changes nothing but ``grad``."""
    if replicas.r == 1:
        return Backend("loop"), {}
    saved = {name: stacked.clone() for name, stacked in replicas.buffers.items()}
    try:
        candidates = [Backend("loop")]
        draws = _uses_randomness(replicas, loss, batch)
        # vmap would lose a buffer that forward replaces by a new tensor.
        if (replicas.vmap_randomness or not draws) and not replicas.replaces_buffers:
            candidates += _vectorised(replicas)
        seconds: dict[Backend, float] = {}
        with warnings.catch_warnings():  # vmap warns of operations that it can only loop over: the clock will tell
            warnings.filterwarnings("ignore", message="There is a performance drop")
            for backend in candidates:
                measured = _measure(replicas, backend, loss, batch, min(seconds.values(), default=float("inf")))
                if measured is not None:
                    seconds[backend] = measured
            best = _final(replicas, loss, batch, seconds)
    finally:
        for name, stacked in replicas.buffers.items():
            stacked.copy_(saved[name])
    return best, {str(backend): value for backend, value in seconds.items()}


def _final(replicas: Replicas, loss: Loss, batch: Batch, seconds: dict[Backend, float]) -> Backend:
    """Whole steps, in turns, between those that came close: single measurements on a busy machine are off by 20 %."""
    ranked = sorted(seconds, key=seconds.__getitem__)
    close = [backend for backend in ranked[:_FINALISTS] if seconds[backend] <= _CLOSE * seconds[ranked[0]]]
    if len(close) == 1 or len(close) * seconds[ranked[0]] * replicas.r > _PATIENCE:
        return ranked[0]
    times: dict[Backend, list[float]] = {backend: [] for backend in close}
    for _ in range(3):
        for backend in close:
            began = _now(replicas.device)
            replicas.run(backend, loss, batch, 0, 0, replicas.r)
            times[backend].append(_now(replicas.device) - began)
    for backend, values in times.items():
        seconds[backend] = sorted(values)[1] / replicas.r
    return min(close, key=seconds.__getitem__)


def _vectorised(replicas: Replicas) -> list[Backend]:
    r = replicas.r
    sizes = [chunk for chunk in _CHUNKS if chunk < r and (chunk == _CHUNKS[0] or chunk * replicas.row_bytes <= _LARGEST)]
    backends = [Backend(kind, chunk) for chunk in reversed(sizes) for kind in ("vmap", "tape")]
    if r * replicas.row_bytes <= _LARGEST or not sizes:
        backends = [Backend("vmap"), Backend("tape"), *backends]
    return backends


def _uses_randomness(replicas: Replicas, loss: Loss, batch: Batch) -> bool:
    """Whether a training step draws random numbers (dropout …): then only the loop gives each replica its own exact stream."""
    replicas.run(Backend("loop"), loss, batch, 0, 0, 1)  # seeds the default generators, then runs replica 0
    generators = [torch.default_generator]
    if replicas.device.type == "cuda":
        generators.append(seeds.cuda_generator(replicas.device))
    untouched = (torch.Generator(g.device).manual_seed(g.initial_seed()).get_state() for g in generators)
    return any(not torch.equal(g.get_state(), state) for g, state in zip(generators, untouched, strict=True))


def _measure(replicas: Replicas, backend: Backend, loss: Loss, batch: Batch, best: float) -> float | None:
    """Seconds per replica (the best of a few runs, on different replicas each time), or None where it can't run."""
    r = replicas.r
    chunk = 1 if backend.kind == "loop" else backend.chunk or r
    count = min(r, -(-_SAMPLE // chunk) * chunk)
    times: list[float] = []
    for repeat in range(_REPEATS + 1):
        start = (repeat * count) % (r - count + 1)
        began = _now(replicas.device)
        try:
            replicas.run(backend, loss, batch, 0, start, start + count)
        except GossamerError:
            if backend.kind == "loop":
                raise
            return None
        times.append((_now(replicas.device) - began) / count)
        if times[0] > _HOPELESS * best:
            break
    return min(times[1:], default=times[0])


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
