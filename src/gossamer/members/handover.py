"""A worker's state on its way to a newcomer: bytes in the format of a checkpoint, over the group that both are in from then on."""

from __future__ import annotations

from typing import Any

import torch

from gossamer.transport.link import Link, Message, Tag

_CHUNK = 1 << 20
_NUMBERS = {False: 127, True: 126}  # the last collectives' numbers: no worker is near them while a group is new


def send(link: Link, peer: int, state: bytes, again: bool = False) -> None:
    """``again``: once more over the same group, when its first step begins."""
    data = torch.frombuffer(bytearray(state), dtype=torch.uint8)
    size = torch.tensor([len(data)])
    _wait(link, link.post([Message(peer, _tag(link, 0, again), size)], []))
    messages = [Message(peer, _tag(link, k + 1, again), piece) for k, piece in enumerate(data.split(_CHUNK))]
    _wait(link, link.post(messages, []))


def receive(link: Link, peer: int, again: bool = False) -> bytes:
    size = torch.zeros(1, dtype=torch.int64)
    _wait(link, link.post([], [Message(peer, _tag(link, 0, again), size)]))
    data = torch.empty(int(size), dtype=torch.uint8)
    _wait(link, link.post([], [Message(peer, _tag(link, k + 1, again), piece) for k, piece in enumerate(data.split(_CHUNK))]))
    return data.numpy().tobytes()


def _tag(link: Link, part: int, again: bool) -> int:
    return Tag(link.epoch, True, _NUMBERS[again]).part(part)


def _wait(link: Link, works: list[tuple[int, Any]]) -> None:
    for _, work in works:
        link.wait(work)
