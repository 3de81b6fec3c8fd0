"""Training goes on when workers die, hang and come back: what a change of members means for one model.

``membership.py`` says who takes part from which step on. Here the exchange gets the new group, the graph is rebuilt, a
newcomer takes over the state of one who is in, and the person's callback hears of it.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch

from gossamer import checkpoint, snapshot
from gossamer.errors import GossamerError
from gossamer.exchange import Exchange
from gossamer.links import Link
from gossamer.membership import Membership
from gossamer.mixer import Mixer
from gossamer.roster import Change
from gossamer.schedules import Schedule, rebuilt
from gossamer.seats import Seat
from gossamer.state import LAYOUT

_models: weakref.WeakSet[Survival] = weakref.WeakSet()  # of this process


def open_group(
    seat: Seat, name: str, timeout: float, number: int, place: int, names: tuple[int, ...], abandoned: Callable[[], bool]
) -> Link:
    """The group of an epoch."""
    # On a connection of its own: gloo waits on it for those who have to come, up to 10 s, and nothing else gets through meanwhile.
    # If one of them dies, the next group must not wait for that.
    link = Link(seat.connect(), place, len(names), timeout, number, name, abandoned)
    link.names = names
    return link


class Survival:
    """Of one model. ``capture()`` and ``restore(state)`` give and take all that a worker knows; ``signature`` must be the same."""

    def __init__(
        self,
        seat: Seat,
        exchange: Exchange,
        mixer: Mixer,
        planned: Schedule,
        capture: Callable[[], dict[str, Any]],
        restore: Callable[[dict[str, Any]], object],
        signature: dict[str, str],
    ) -> None:
        self.seat, self.exchange, self.mixer, self.planned = seat, exchange, mixer, planned
        self.schedule = planned
        self.joining = seat.joins
        _models.add(self)
        self._refuse_several()
        self.changes: list[Change] = []
        self.on_change: Callable[[Change], object] | None = None
        self._capture, self._restore, self._signature = capture, restore, signature
        self._timeout = exchange.link.timeout
        first, me = exchange.link, weakref.ref(self)  # the thread of the membership must not keep a model that is dropped

        def copied() -> Callable[[], bytes]:
            here = me()
            assert here is not None
            return here._copied()

        opened = functools.partial(open_group, seat, first.name, self._timeout)
        self._membership = Membership(seat, first.name, None if self.joining else first, opened, copied)
        exchange.guarded(self._membership)
        if not self.joining:
            seat.announce_training()

    @property
    def members(self) -> tuple[int, ...]:
        """Ranks, as all of them agreed in the last change or collective. None but itself while a worker joins."""
        return (self.seat.rank,) if self.joining else self._membership.members

    def position(self) -> int:
        """About the step that the others are in."""
        return self._membership.position()

    def before(self, step: int) -> int:
        """Before a step begins. Returns its number, which is another one for a worker that has just come."""
        membership = self._membership
        if not self.joining:
            changed = membership.before(step, self._timeout)
            if changed is not None:
                self._take_part(*changed)
            if not membership.evicted:
                return step
            self.joining = True
            self._refuse_several()
            membership.rejoin(self._timeout)
        change, link = membership.join(self._timeout, self._unpack)
        self.seat.announce_training()
        self.joining = False
        self.schedule = self.planned  # what those have learnt who were there; what I knew may be old
        self._take_part(change, link)
        return change.step

    def _refuse_several(self) -> None:
        if self.joining and len(_models) > 1:
            raise GossamerError(
                f"rank {self.seat.rank} can't join: it trains {len(_models)} models, and could enter them at different steps only; "
                "then all would wait for each other"
            )

    def _take_part(self, change: Change, link: Link) -> None:
        self.exchange.change(link)
        self.mixer.resize()
        self.schedule, note = rebuilt(self.planned, len(change.members), self.schedule)
        self.mixer.step = change.step
        self.planned.note(change.step, f"{self.schedule.describe()} over {len(change.members)}", change.describe() + note)
        self.changes.append(change)
        if self.on_change is not None:
            self.on_change(change)

    # --- The state for a newcomer -----------------------------------------------------------------------------------------

    def _copied(self) -> Callable[[], bytes]:
        """One pass over the memory between two steps; the rest can be done in the background."""
        tensors, parts = snapshot.pack(self._capture())
        copies = {key: t.detach().clone(memory_format=torch.contiguous_format) for key, t in tensors.items()}
        return lambda: checkpoint.dumps(copies, {"signature": self._signature, "parts": parts})

    def _unpack(self, data: bytes) -> None:
        tensors, header = checkpoint.loads(data)
        theirs, mine = header.get("signature"), self._signature
        if not isinstance(theirs, dict):
            raise checkpoint.Unreadable("the state that was sent is damaged: it has no signature")
        differ = next((key for key in {**theirs, **mine} if theirs.get(key) != mine.get(key)), None)
        if differ is not None:
            raise GossamerError(
                f"rank {self.seat.rank} can't join: {differ} is {mine.get(differ, 'missing')} here and "
                f"{theirs.get(differ, 'missing')} on the others"
            )
        self._restore(snapshot.unpack(header.get("parts"), tensors, LAYOUT.parts, "the state that was sent"))
