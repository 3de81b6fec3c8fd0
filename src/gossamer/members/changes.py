"""What a change of members means for one model.

``membership.py`` says who takes part from which step on. Here the exchange gets the new group, or other places of the present one, the
graph is rebuilt, and the person's callback hears of it (:class:`Participation`). With :class:`Survival` training goes on when workers die,
hang and come back: a newcomer takes over the state of one who is in.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable
from typing import Any

import torch

from gossamer.checkpoints import checkpoint, snapshot
from gossamer.checkpoints.snapshot import Layout
from gossamer.errors import Diverged, GossamerError
from gossamer.members.membership import Turn
from gossamer.members.roster import DIVERGED, Change
from gossamer.members.store import Seat
from gossamer.members.survivors import Survivors
from gossamer.rows.finite import Fault
from gossamer.schedules import Schedule, rebuilt
from gossamer.transport.exchange import Exchange
from gossamer.transport.mixer import Mixer

_AGAIN_STEPS = 100  # a worker that diverges so soon after its return does not come back once more

_models: weakref.WeakSet[Survival] = weakref.WeakSet()  # of this process


class _Left(Diverged):
    """Found when a newcomer asked for the state of this worker."""


class Participation:
    """Of one model in what its workers do together. ``planned``: the schedule for as many as there are at the start; ``schedule``: what it
    has become for the members of now."""

    def __init__(self, exchange: Exchange, mixer: Mixer, planned: Schedule) -> None:
        self.exchange, self.mixer, self.planned = exchange, mixer, planned
        self.schedule = planned
        self.changes: list[Change] = []
        self.on_change: Callable[[Change], object] | None = None

    def _take_part(self, turn: Turn) -> None:
        change = turn.change
        self.exchange.change(turn.link, turn.places)
        self.mixer.resize()
        self.schedule, note = rebuilt(self.planned, len(change.members), self.schedule)
        self.mixer.step = change.step
        self.planned.note(change.step, f"{self.schedule.describe()} over {len(change.members)}", change.describe() + note)
        self.changes.append(change)
        if self.on_change is not None:
            self.on_change(change)


class Survival(Participation):
    """Of one model. ``capture()`` and ``restore(state)`` give and take all that a worker knows; ``signature`` must be the same.
    ``look()``: what of the parameters is not finite. ``equal``: replicas must be the same to the bit, because gradients are averaged."""

    def __init__(
        self,
        seat: Seat,
        exchange: Exchange,
        mixer: Mixer,
        planned: Schedule,
        capture: Callable[[], dict[str, Any]],
        restore: Callable[[dict[str, Any]], object],
        signature: dict[str, str],
        look: Callable[[], Fault | None],
        layout: Layout,
        equal: bool = False,
    ) -> None:
        super().__init__(exchange, mixer, planned)
        self.seat, self.joining, self._layout, self._equal = seat, seat.joins, layout, equal
        _models.add(self)
        self._refuse_several()
        self._capture, self._restore, self._signature, self._look = capture, restore, signature, look
        first, me = exchange.link, weakref.proxy(self)  # the thread of the membership must not keep a model that is dropped
        start = None if self.joining else first
        self._membership = Survivors(seat, first.name, start, first.timeout, lambda: me._copied())
        exchange.guarded(self._membership)
        self._joins = seat.joins  # it was started to join, and has not yet
        self._fault: Fault | None = None  # why it left, until it is back
        self._returned: int | None = None  # the step in which it was back, the last time
        mixer.on_fault = self.leave
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
            with contextlib.suppress(_Left):
                if (turn := membership.before(step)) is not None:
                    self._take_part(turn)
            if not membership.evicted:
                return step
            self.joining = True
            self._refuse_several()
        if membership.evicted:
            membership.rejoin(membership.timeout)
        try:
            turn = membership.join(self._unpack)
        except GossamerError as error:
            if self._fault is None:
                raise
            raise self._end(self._fault, str(error)) from None
        self.seat.announce_training()
        self.joining = False
        self._back(turn.change.step, turn.change.joined)
        if self._joins:
            self._joins = False
            print(
                f"gossamer: rank {self.seat.rank} has joined the others at step {turn.change.step}; a counter of the script's own, a "
                "learning rate that follows it too, does not know that: take model.steps",
                flush=True,
            )
        self.schedule = self.planned  # what those have learnt who were there; what I knew may be old
        self._take_part(turn)
        return turn.change.step

    def leave(self, fault: Fault) -> None:
        """This worker has diverged: the others go on without it. With its next step it comes back, with the state of another one."""
        membership, last = self._membership, self._returned
        membership.leave(f"{DIVERGED}: {fault.parameter!r} is not finite at step {fault.step}")
        if membership.blind or not membership.roster.living:
            raise self._end(fault, "the store is gone, so it can't take over the state of another worker")
        if len(_models) > 1:
            raise self._end(fault, f"it trains {len(_models)} models, so it can't come back")
        if last is not None and fault.step - last < _AGAIN_STEPS:
            raise self._end(
                fault, f"it took over the state of another worker in step {last}, and does so once only in {_AGAIN_STEPS}"
            )
        self._fault, self.joining = fault, True

    def _end(self, fault: Fault, why: str) -> Diverged:
        if not self._membership.roster.living:
            why = "no worker is left whose state it could take over; start again from a checkpoint"
            self.seat.announce_divergence(fault.describe(self.seat.rank))
        return Diverged(f"{fault.describe(self.seat.rank)}; {why}")

    def _back(self, step: int, joined: dict[int, int]) -> None:
        if self._fault is not None:
            donor = joined.get(self.seat.rank, -1)
            said = f"{self._fault.describe(self.seat.rank)}; it has taken over the state of rank {donor}, and goes on with step {step}"
            print(f"gossamer: {said}", flush=True)
            self._fault, self._returned, self.mixer.fault = None, step, None

    def _refuse_several(self) -> None:
        if self.joining and len(_models) > 1:
            raise GossamerError(
                f"rank {self.seat.rank} can't join: it trains {len(_models)} models, and could enter them at different steps only; "
                "then all would wait for each other"
            )

    def _take_part(self, turn: Turn) -> None:
        super()._take_part(turn)
        change, rank = turn.change, self.seat.rank
        if change.members == (rank,):
            self._tell_alone(change)
        if not self._equal:
            return
        # What a newcomer has is some steps old.
        for newcomer, donor in change.joined.items():
            if newcomer == rank and change.rejoined:
                self._unpack(self._membership.take_again(change.members.index(donor), turn.link))
                self.schedule.succeed(self.planned)
            elif donor == rank:
                self._membership.hand_out_again(change.members.index(newcomer), turn.link, self._copied())

    def _tell_alone(self, change: Change) -> None:
        gone = "; ".join(f"rank {rank} {why}" for rank, why in change.lost.items())
        print(f"gossamer: {gone}: rank {self.seat.rank} trains alone from step {change.step} on", flush=True)
        self.seat.announce_alone(change.step)

    # --- The state for a newcomer -----------------------------------------------------------------------------------------

    def _copied(self) -> Callable[[], bytes]:
        """One pass over the memory between two steps; the rest can be done in the background."""
        if (fault := self._look()) is not None:
            self.leave(fault)
            raise _Left(fault.describe(self.seat.rank))
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
        self._restore(snapshot.unpack(header.get("parts"), tensors, self._layout, "the state that was sent"))
