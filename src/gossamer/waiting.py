"""Waiting for rows when peers are lost: what a worker gives up, and when. Pure; ``flights.py`` has the threads."""

from __future__ import annotations

from typing import NamedTuple

_NOBODY: frozenset[int] = frozenset()


class GivenUp(NamedTuple):
    """``lost``: peers whose rows are not waited for any more. ``in_vain``: without them all of the flight is worth nothing."""

    lost: frozenset[int]
    in_vain: bool


def at_start(essential: frozenset[int], gone: frozenset[int], doubtful: frozenset[int]) -> GivenUp:
    """Before anything is sent. In vain, and the others know it as well."""
    doubt = doubtful & essential
    return GivenUp(gone | doubt, bool(doubt))


def while_waiting(
    essential: frozenset[int], lost: frozenset[int], peer: int, gone: frozenset[int], doubtful: frozenset[int]
) -> GivenUp | None:
    """``peer``: whose row the flight waits for now; ``lost``: what it knows to be lost. None: wait on."""
    doubt = doubtful & essential
    if doubt or not lost.isdisjoint(essential):
        return GivenUp(doubt, True)
    return GivenUp(gone, False) if peer in gone else None


def at_the_end(peers: frozenset[int], lost: frozenset[int], expired: bool) -> frozenset[int]:
    """What else is lost when everything has come: if the others did not go on without us, they have what we throw away, and all must
    begin anew together."""
    return peers - lost if expired else _NOBODY
