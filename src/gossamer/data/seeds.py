"""Random numbers as a pure function of (seed, step, replica): nothing depends on the order in which work is done."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

_MASK = (1 << 64) - 1


def derive(*parts: int) -> int:
    """A 63-bit seed from integers, by SplitMix64: near parts give unrelated seeds."""
    state = 0
    for part in parts:
        state = (state + (part & _MASK) + 0x9E3779B97F4A7C15) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state >> 1


def set_default(seed: int, device: torch.device) -> None:
    """Seed the generators that a module on ``device`` draws from (dropout does)."""
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        cuda_generator(device).manual_seed(seed)


def cuda_generator(device: torch.device) -> torch.Generator:
    index = torch.cuda.current_device() if device.index is None else device.index
    return torch.cuda.default_generators[index]


@contextlib.contextmanager
def undisturbed(device: torch.device) -> Iterator[None]:
    """The caller's own random stream goes on afterwards as if nothing had happened."""
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        yield


def generator(*parts: int) -> torch.Generator:
    return torch.Generator().manual_seed(derive(*parts))
