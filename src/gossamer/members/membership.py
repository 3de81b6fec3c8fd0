"""Who takes part, from which step on: the thread around ``member.py`` and ``roster.py``.

Each worker has one thread that, without the training loop,

- says every now and then that it lives. A worker that waits for a hung one looks hung too, so the loop can't be asked;
- reads the log of events in the store, where all find the same in the same order, and does what the roster asks for: reports its step, and
  says that it has no more data.

The training loop asks before each step, which costs nothing as long as nothing has happened.

This is all that ``uneven()`` under torchrun needs: members leave, and come together at the end, on connections that they have. No worker is
replaced there: a death, or the loss of the store, is an error on all. ``survivors.py`` has what deaths need.
"""

from __future__ import annotations

import contextlib
import threading
import time
from typing import Any, NamedTuple

from gossamer.errors import GossamerError
from gossamer.members.effects import Add, Claim, Drop, Effect, Fly, Look, Put, Rules, in_store
from gossamer.members.member import Member
from gossamer.members.roster import DONE, FINISHED, Change, Roster
from gossamer.members.store import Seat
from gossamer.transport.link import Link
from gossamer.transport.store_client import Silent, StoreClient

_LOOK, _BUSY = 0.1, 0.01  # seconds between two looks at the log; while a change is under way
LEAVE = 1.0  # seconds for each thing that has to be done before the process can end, if it takes that long


class Turn(NamedTuple):
    """The change that happens before a step, and how the members reach each other from then on: by these places of the link."""

    change: Change
    link: Link
    places: tuple[int, ...]


class Membership:
    """``link``: of the members at the start; None for a newcomer. ``timeout``: seconds that the training loop waits for the others."""

    fixed = True  # no worker joins, and no group is built

    def __init__(self, seat: Seat, name: str, link: Link | None, timeout: float) -> None:
        self.seat, self.timeout = seat, timeout
        self._votes = StoreClient(seat.connect_patiently)  # for what the training loop asks
        tickets, rank = tuple(range(seat.size)), seat.rank
        self.member = Member(name, seat.ticket, rank, tickets, link is None, seat.evict_after, time.monotonic, fixed=self.fixed)
        self._links: dict[int, Link] = {} if link is None else {0: link}
        self._lock = threading.Condition()
        self._wake = threading.Event()
        self._ended = False
        self.store_gone: str | None = None
        self._thread = threading.Thread(target=self._run, name="gossamer-membership", daemon=True)
        self._thread.start()

    def _carry_out(self, rules: Rules[Any], store: Any, result: Any = None) -> Fly | None:
        """Run rules with the real store, to the next flight or to their end. They have the lock; what they ask for is done without it."""
        while True:
            with self._lock:
                before = self.member.part
                try:
                    effect = rules.send(result)
                except StopIteration:
                    return None
                finally:
                    if self.member.part is not before:
                        self._lock.notify_all()
            if isinstance(effect, Fly):
                return effect
            result = self._do(effect, store)

    def _do(self, effect: Effect, store: Any) -> Any:
        assert isinstance(effect, Look | Put | Claim | Add | Drop)
        return in_store(store, effect)

    # --- In the training loop --------------------------------------------------------------------------------------------

    @property
    def evicted(self) -> bool:
        return self.member.evicted

    @property
    def roster(self) -> Roster:
        return self.member.part.roster

    def before(self, step: int) -> Turn | None:
        """To be called before a step begins. Returns the change that happens now, if one does."""
        self.member.step = step  # before the look: a worker that says that something is under way looks at the step after that
        self._between_steps()
        if self.member.part.quiet:  # in nearly every step: no lock
            return None
        with self._lock:
            deadline = time.monotonic() + self.timeout
            member = self.member
            self._refuse_end()
            while member.part.held(step) and not self.evicted and self.store_gone is None:
                self._wait(step, deadline)
            part = member.part
            if self.evicted:
                return None
            member.part = part.begun(step)
            return self._turn(step) if part.due(step) and member.part.epoch >= 0 else None

    def _between_steps(self) -> None:
        """What is to be done while parameters do not change."""

    def _wait(self, step: int, deadline: float, pause: float = 1.0) -> None:
        """For the others, with the lock held."""
        if not self._lock.wait(pause) and time.monotonic() > deadline:
            proposal, roster = self.roster.proposal, self.roster
            late = [roster.ranks[q] for q in roster.living if proposal is None or not proposal.reported(q)]
            missing = f"rank {', '.join(map(str, late))} did not say at which step it is within {self.timeout:g} s"
            raise GossamerError(f"rank {self.seat.rank} at step {step}: {missing}")
        self._refuse_end()

    def _refuse_end(self) -> None:
        """Without a launcher the job can't go on if a worker, or the store, is gone."""
        roster = self.roster
        if self.fixed and (roster.dead or self.store_gone is not None):
            gone = [f"rank {roster.ranks[q]} {why}" for q, why in roster.why.items()]  # the first is the cause of all others
            why = gone[0] if gone else f"the store is gone ({self.store_gone})"
            raise GossamerError(f"rank {self.seat.rank} can't go on in uneven(): {why}")

    def _turn(self, step: int, rejoined: bool = False) -> Turn:
        """With the lock held."""
        roster = self.roster
        ranks, places = roster.ranks, self.member.members[roster.group]
        donors = self.member.donors.get(roster.epoch, {})
        change = Change(
            step,
            tuple(ranks[q] for q in roster.members),
            {ranks[q]: roster.why.get(q, DONE) for q in roster.left},
            {ranks[q]: ranks[donors[q]] for q in roster.joined if q in donors},
            rejoined,
        )
        return Turn(change, self._links[roster.group], tuple(places.index(q) for q in roster.members))

    def done(self, patience: float) -> None:
        """I have no more data. ``patience``: seconds that are given to the others to finish as well."""
        self.member.patience = time.monotonic() + patience
        self._wake.set()

    def stand(self, step: int) -> None:
        """I am done, and wait until I begin a step for the sake of the others, or it is known how they go on."""
        deadline = time.monotonic() + self.timeout
        with self._lock:
            self._refuse_end()
            while self.member.stands and not self.evicted:
                self._wait(step, deadline, _LOOK)

    def reunion(self) -> Turn:
        """I have left: returns when all are done. It takes as long as the others' data lasts."""
        with self._lock:
            while self.member.ticket not in self.roster.members:
                self._lock.wait(1.0)
                self._refuse_end()
            return self._enter()

    def _enter(self) -> Turn:
        """With the lock held."""
        member, start = self.member, self.roster.start
        member.step = start
        member.part = member.part.begun(start)
        return self._turn(start, rejoined=member.ticket in self.roster.joined)

    def close(self, orderly: bool) -> None:
        """I take no part any more. The launcher would say so too, when the process has ended."""
        why = FINISHED if orderly else "ended with an error"
        with self._lock:
            if self._ended:
                return
            self._ended = True
            self._wake.set()
        self._thread.join(LEAVE)
        if self.store_gone is None and not self.evicted and not (orderly and self.fixed):
            with contextlib.suppress(RuntimeError, Silent):
                self._votes.ask(lambda store: self._carry_out(self.member.leave(why), store), LEAVE)
        self._votes.close()

    # --- In the thread -------------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            store = self.seat.connect_patiently()
            while not self._ended:
                self._tick(store)
                if not self.member.again:
                    self._wake.wait(_LOOK if self.roster.proposal is None else _BUSY)
                self._wake.clear()
        except RuntimeError as error:
            self._without_store(error)

    def _tick(self, store: Any) -> None:
        self._carry_out(self.member.tick(), store)
        with self._lock:
            self._lock.notify_all()

    def _without_store(self, error: RuntimeError) -> None:
        with self._lock:
            if not self._ended and self.store_gone is None:
                self.store_gone = str(error).strip().splitlines()[0]
                self.member.blind = True
                self._lock.notify_all()
