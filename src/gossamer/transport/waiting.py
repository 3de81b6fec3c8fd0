"""Waiting for rows when peers are lost: what a worker gives up, and when. Pure; ``operation.py`` has the threads."""

from __future__ import annotations

from typing import NamedTuple

OVERDUE_SECONDS = 5.0

Pairs = frozenset[tuple[int, int]]


class Losses(NamedTuple):
    """What a worker knows to be lost among the places of a link. ``gone``: nothing comes from these, and nothing is sent to them.
    ``pairs``: these two have no connection, so each gives up what needs both. ``evicted``: the others have gone on without the worker
    itself. ``replaced``: a member has died, and those that live have agreed on newer connections."""

    gone: frozenset[int] = frozenset()
    pairs: Pairs = frozenset()
    evicted: bool = False
    replaced: bool = False

    def hopeless(self, essential: frozenset[int]) -> frozenset[int]:
        """Of the places that all need each other, those that make it in vain."""
        apart = {place for pair in self.pairs if essential.issuperset(pair) for place in pair}
        return (self.gone & essential) | apart


NONE = Losses()


class GivenUp(NamedTuple):
    """``lost``: peers whose rows are not waited for any more. ``in_vain``: all of the operation ends at once."""

    lost: frozenset[int]
    in_vain: bool


def at_start(essential: frozenset[int], peers: frozenset[int], losses: Losses) -> GivenUp:
    """Before anything is sent. If it is in vain, the others know that as well."""
    if losses.evicted:
        return GivenUp(peers, True)
    hopeless = losses.hopeless(essential)
    return GivenUp(losses.gone | hopeless, bool(hopeless))


def while_waiting(
    essential: frozenset[int], peers: frozenset[int], lost: frozenset[int], peer: int, losses: Losses, overdue: bool = False
) -> GivenUp | None:
    """``peer``: whose row the operation waits for now; ``lost``: what it knows to be lost. ``overdue``: it is a try of a collective, which
    has waited for OVERDUE_SECONDS. A try is done again on newer connections, so it never hangs on one that brings nothing and does not
    break. (A step is not done again: what a worker gives up there may reach its peer torn.) None: wait on."""
    if losses.evicted or (overdue and losses.replaced):
        return GivenUp(peers, True)
    hopeless = losses.hopeless(essential)
    if hopeless or not lost.isdisjoint(essential):
        return GivenUp(hopeless, True)
    return GivenUp(losses.gone, False) if peer in losses.gone else None
