"""Who is alive: the threads around ``member.py`` and ``roster.py``.

Each worker has one thread that, without the training loop,

- says every second that it lives. A worker that waits for a hung one looks hung too, so the loop can't be asked;
- reads the log of events in the store, where all find the same in the same order, and does what the roster asks for: builds the group of a
  proposal in the background, says that it stands, reports its step;
- notices who is gone: at once from the launcher's word that the process ended, otherwise from heartbeats that do not come for
  ``evict_after`` seconds. An error on a connection alone kills nobody: the weight of that neighbour goes to oneself, and if it goes on to
  beat, all connections are made anew.

The training loop asks before each step, which costs nothing as long as nothing has happened. If the store is gone, nobody can be
declared dead and nobody can join; the living go on, and a lost neighbour's weight stays with oneself.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from typing import Any

from gossamer import handover
from gossamer.collectives import Collectives
from gossamer.effects import Build, Fly, Pause, Result, Rules, in_store
from gossamer.errors import GossamerError
from gossamer.links import Link
from gossamer.member import Member
from gossamer.roster import Change, Roster
from gossamer.seats import TICKETS, Seat, successor_key
from gossamer.waiting import Losses

_LOOK, _BUSY = 0.1, 0.01  # seconds between two looks at the log; while a change is under way
_PAUSE = 1.0  # seconds before a group that could not be built is tried again
_HELPERS = 12.0  # seconds to wait for what is still being built when the process ends
_KEPT = 30.0  # seconds that the connections of an old epoch are kept: others may be a few steps behind


class Membership:
    """``open_group(number, place, names, abandoned)`` builds the group of an epoch. ``capture()`` copies my state, for a newcomer, and
    returns what makes bytes of the copy."""

    def __init__(
        self,
        seat: Seat,
        name: str,
        link: Link | None,
        open_group: Callable[[int, int, tuple[int, ...], Callable[[], bool]], Link],
        capture: Callable[[], Callable[[], bytes]],
    ) -> None:
        self.seat = seat
        self._open_group, self._capture = open_group, capture
        self._store = seat.connect()
        self.member = Member(
            name, seat.ticket, seat.rank, tuple(range(seat.size)), link is None, seat.evict_after, time.monotonic
        )
        self._collectives = Collectives(self.member, f"{name}/votes")
        self._links: dict[int, Link] = {} if link is None else {0: link}
        self._retired: list[tuple[float, Link]] = []
        self._lock = threading.Condition()
        self._wake = threading.Event()
        self._ended = False
        self.store_gone: str | None = None
        self._wanted: list[tuple[int, Link]] = []  # copies of my state: (place, link), made before the next step
        self._arrived: tuple[int, bytes] | None = None  # the state that I got, as a newcomer
        self._helpers: list[threading.Thread] = []
        self._thread = threading.Thread(target=self._run, name="gossamer-membership", daemon=True)
        self._thread.start()

    def _carry_out(self, rules: Rules[Result], fly: Callable[[Fly], bool] | None = None) -> Result:
        """Run rules with the real store. They have the lock; what they ask for is done without it."""
        result: Any = None
        while True:
            with self._lock:
                before = self.member.part
                try:
                    effect = rules.send(result)
                except StopIteration as end:
                    return end.value
                finally:
                    if self.member.part is not before:
                        self._lock.notify_all()
            result = None
            if isinstance(effect, Pause):
                if self._wanted:  # in a collective parameters do not change, so a newcomer need not wait for its end
                    self._hand_out()
                time.sleep(effect.seconds)
            elif isinstance(effect, Build):
                self._start_helper(self._build, effect.roster, name="gossamer-group")
            elif isinstance(effect, Fly):
                assert fly is not None
                result = fly(effect)
            else:
                result = in_store(self._store, effect)

    # --- In the training loop --------------------------------------------------------------------------------------------

    @property
    def evicted(self) -> bool:
        return self.member.evicted

    def before(self, step: int, timeout: float) -> tuple[Change, Link] | None:
        """To be called before a step begins. Returns the change that happens now, if one does."""
        self.member.step = step  # before the look: whoever says that something is under way looks at the step after that
        if self._wanted:
            self._hand_out()
        if self.member.quiet:  # in nearly every step: no lock
            return None
        with self._lock:
            deadline = time.monotonic() + timeout
            member = self.member
            while member.part.held(step) and not self.evicted and self.store_gone is None:
                if not self._lock.wait(1.0) and time.monotonic() > deadline:
                    missing = self._missing()
                    raise GossamerError(f"rank {self.seat.rank} at step {step}: {missing} within {timeout:g} s")
            part = member.part
            if self.evicted:
                return None
            member.take(part.begun(step))
            return self._change(step) if part.due(step) else None

    def _missing(self) -> str:
        proposal, roster = self.roster.proposal, self.roster
        late = [roster.ranks[q] for q in roster.living if proposal is not None and not proposal.reported(q)]
        return f"rank {', '.join(map(str, late))} did not say at which step it is"

    def _change(self, step: int, rejoined: bool = False) -> tuple[Change, Link]:
        """With the lock held."""
        roster = self.roster
        ranks = roster.ranks
        donors = self.member.donors.get(roster.epoch, {})
        change = Change(
            step,
            tuple(ranks[q] for q in roster.members),
            {ranks[q]: roster.why.get(q, "") for q in roster.left if q in roster.dead},
            {ranks[q]: ranks[donors[q]] for q in roster.joined if q in donors},
            rejoined,
        )
        return change, self._links[roster.epoch]

    def _hand_out(self) -> None:
        """Newcomers want a copy of my state; it is made here, between two steps, and sent in the background."""
        with self._lock:
            wanted, self._wanted = self._wanted, []
        pack = self._capture()
        for place, link in wanted:
            self._start_helper(_send, link, place, pack, name="gossamer-handover")

    def join(self, timeout: float, load: Callable[[bytes], object]) -> tuple[Change, Link]:
        """Take part, as new: returns when the others know the step from which on I do. ``load`` takes over the state that was sent."""
        deadline = time.monotonic() + timeout
        loaded, member = -1, self.member
        member.asks = True
        self._wake.set()
        with self._lock:
            while not (self.roster.epoch in self._links and member.ticket in self.roster.members):
                if self.store_gone is not None:
                    raise GossamerError(f"rank {self.seat.rank} can't join: the store is gone ({self.store_gone})")
                if self.evicted:
                    raise GossamerError(f"rank {self.seat.rank} was given up while it joined; is this machine very busy?")
                if not self.roster.living and member.log_was_read:
                    raise GossamerError(f"rank {self.seat.rank} can't join: nobody is left; the job has ended without it")
                if time.monotonic() > deadline:
                    raise GossamerError(f"rank {self.seat.rank} could not join within {timeout:g} s")
                if self._arrived is not None and self._arrived[0] != loaded:
                    loaded, state = self._arrived
                    self._lock.release()
                    try:
                        load(state)
                    finally:
                        self._lock.acquire()
                    member.built = loaded
                    self._wake.set()
                self._lock.wait(0.1)
            start = self.roster.start
            member.step = start
            member.take(member.part.begun(start))
            return self._change(start, rejoined=True)

    def leave(self, why: str) -> None:
        """I take no part any more. Then I am evicted, and may come back as new; not if the store is gone."""
        if self.store_gone is None:
            with contextlib.suppress(RuntimeError):
                self._carry_out(self.member.leave(why))

    def rejoin(self) -> None:
        """I was evicted, and live: with a new ticket I am new."""
        with self._lock:
            self._stop_thread()
            ticket = self._store.add(TICKETS, 1) - 1
            self._store.set(successor_key(self.member.ticket), str(ticket))
            for link in self._links.values():
                self._retired.append((time.monotonic(), link))
            self._links, self._arrived, self._wanted = {}, None, []
            self.member.renamed(ticket)
            self._ended = False
            self._thread = threading.Thread(target=self._run, name="gossamer-membership", daemon=True)
        self._thread.start()

    def position(self) -> int:
        """The step that the others are in, about; for a newcomer."""
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline and not self.member.log_was_read:
            time.sleep(0.01)
        steps = [0]
        for q in self.roster.living:
            with contextlib.suppress(RuntimeError):
                key = self.member.beat_key(q)
                if self._store.check([key]):
                    steps.append(int(self._store.get(key).decode().split()[1]))
        return max(steps)

    def close(self, why: str) -> None:
        """I leave. The launcher would say so too, when the process has ended."""
        with self._lock:
            if self._ended:
                return
            self._stop_thread()
        if self.store_gone is None and not self.evicted:
            with contextlib.suppress(RuntimeError):
                self._carry_out(self.member.leave(why))
        # A thread that comes back from gloo when the interpreter has gone down aborts the process. Building ends by itself, in time.
        for helper in self._helpers:
            helper.join(_HELPERS)

    def _start_helper(self, work: Callable[..., object], *args: object, name: str) -> None:
        self._helpers = [thread for thread in self._helpers if thread.is_alive()]
        self._helpers.append(threading.Thread(target=work, args=args, name=name, daemon=True))
        self._helpers[-1].start()

    def _stop_thread(self) -> None:
        """With the lock held once."""
        self._ended = True
        self._wake.set()
        self._lock.release()
        self._thread.join(5)
        self._lock.acquire()

    # --- For flights: who is lost ------------------------------------------------------------------------------------------

    def losses(self, link: Link) -> Losses:
        return self.member.losses(link.epoch)

    def lose(self, link: Link, rank: int, why: str) -> None:
        with self._lock:
            self.member.lose(link.epoch, rank, why)
        self._wake.set()

    @property
    def blind(self) -> bool:
        return self.store_gone is not None

    def complete(self, what: str, timeout: float, fly: Callable[[Link, tuple[int, ...]], bool]) -> bool:
        """A collective; see :class:`Collectives`. False if the store is gone."""
        if self.blind:
            return False

        def once(effect: Fly) -> bool:
            with self._lock:
                link = self._links[effect.epoch]
            return fly(link, effect.places)

        try:
            self._carry_out(self._collectives.complete(what, timeout), once)
        except RuntimeError as error:
            self._without_store(error)
            return False
        return True

    @property
    def members(self) -> tuple[int, ...]:
        """The ranks of the workers that take part now, as all of them agreed in the last change or collective."""
        ranks = self.roster.ranks
        return tuple(ranks[q] for q in self._collectives.voters)

    @property
    def roster(self) -> Roster:
        return self.member.part.roster

    # --- In the thread -------------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._ended:
                self._carry_out(self.member.tick())
                self._retire(time.monotonic())
                if not self.member.again:
                    self._wake.wait(_LOOK if self.roster.proposal is None else _BUSY)
                self._wake.clear()
        except RuntimeError as error:
            self._without_store(error)

    def _without_store(self, error: RuntimeError) -> None:
        with self._lock:
            if self._ended or self.store_gone is not None:
                return
            self.store_gone = str(error).strip().splitlines()[0]
            self.member.blind = True
            self._lock.notify_all()
        print(
            f"gossamer: rank {self.seat.rank}: the store is gone ({self.store_gone}); training goes on, but nobody can join any more",
            flush=True,
        )

    def _retire(self, now: float) -> None:
        """Close what nobody needs any more: groups of proposals that came to nothing, and of epochs that are over."""
        with self._lock:
            epoch = self.member.part.epoch
            keep = {epoch, self.roster.epoch, self.member.building}
            for number in [number for number in self._links if number not in keep]:
                link = self._links.pop(number)
                self._retired.append((now if number < epoch else now - _KEPT, link))
            self.member.forget(keep | set(self._links))
            due = [link for since, link in self._retired if now - since >= _KEPT]
            self._retired = [(since, link) for since, link in self._retired if now - since < _KEPT]
        for link in due:
            link.close()

    # --- In a thread for each group that is built ----------------------------------------------------------------------------

    def _build(self, roster: Roster) -> None:
        proposal = roster.proposal
        assert proposal is not None
        member, number, members = self.member, proposal.number, proposal.members
        donors = member.donors[number]

        def abandoned() -> bool:
            return self._ended or member.building != number or self.store_gone is not None or member.void(number)

        names = tuple(roster.ranks[q] for q in members)
        try:
            link = self._open_group(number, members.index(member.ticket), names, abandoned)
            with self._lock:
                self._links[number], member.members[number] = link, members
                member.count_losses()
            if member.ticket in donors:
                state = handover.receive(link, members.index(donors[member.ticket]))
                with self._lock:
                    self._arrived = (number, state)
                    self._lock.notify_all()
            else:
                with self._lock:
                    self._wanted += [(members.index(q), link) for q, donor in donors.items() if donor == member.ticket]
                    member.built = number
        except RuntimeError:
            if not abandoned():
                time.sleep(_PAUSE)
                member.failed = number
        self._wake.set()


def _send(link: Link, place: int, pack: Callable[[], bytes]) -> None:
    with contextlib.suppress(RuntimeError):  # it is gone again; then the proposal is void
        handover.send(link, place, pack())
