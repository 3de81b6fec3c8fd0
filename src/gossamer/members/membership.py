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
from dataclasses import dataclass
from typing import Any, Generic

from gossamer.errors import GossamerError
from gossamer.members import handover
from gossamer.members.collectives import Collectives
from gossamer.members.effects import Build, Fly, Look, Pause, Result, Rules, in_store
from gossamer.members.member import Member
from gossamer.members.roster import FINISHED, Change, Roster
from gossamer.members.store import TICKETS, Seat, successor_key
from gossamer.transport.link import Link
from gossamer.transport.store_client import Silent, StoreClient
from gossamer.transport.waiting import Losses

_LOOK, _BUSY = 0.1, 0.01  # seconds between two looks at the log; while a change is under way
_PAUSE = 1.0  # seconds before a group that could not be built is tried again
_HELPERS = 12.0  # seconds to wait for what is still being built when the process ends
_LEAVE = 1.0  # seconds for each thing that has to be done before the process can end, if it takes that long
_KEPT = 30.0  # seconds that the connections of an old epoch are kept: others may be a few steps behind


@dataclass(frozen=True)
class _End(Generic[Result]):
    """Rules have come to their end."""

    value: Result


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
        self._votes = StoreClient(seat.connect_patiently)  # for what the training loop asks
        self.member = Member(
            name, seat.ticket, seat.rank, tuple(range(seat.size)), link is None, seat.evict_after, time.monotonic
        )
        self._collectives = Collectives(self.member, f"{name}/votes")
        self._links: dict[int, Link] = {} if link is None else {0: link}
        self._retired: list[tuple[float, Link]] = []
        self._lock = threading.Condition()
        self._wake = threading.Event()
        self._ended, self._anew, self._leaving = False, False, ""  # why this worker has to leave
        self.store_gone: str | None = None
        self._wanted: list[tuple[int, Link]] = []  # copies of my state: (place, link), made before the next step
        self._arrived: tuple[int, bytes] | None = None  # the state that I got, as a newcomer
        self._helpers: list[threading.Thread] = []
        self._thread = threading.Thread(target=self._run, name="gossamer-membership", daemon=True)
        self._thread.start()

    def _carry_out(self, rules: Rules[Result], store: Any, result: Any = None) -> Fly | _End[Result]:
        """Run rules with the real store, to their end or to the next flight. They have the lock; what they ask for is done without it."""
        while True:
            with self._lock:
                before = self.member.part
                try:
                    effect = rules.send(result)
                except StopIteration as end:
                    return _End(end.value)
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
                return effect
            else:
                result = in_store(store, effect)

    # --- In the training loop --------------------------------------------------------------------------------------------

    @property
    def evicted(self) -> bool:
        return self.member.evicted

    def before(self, step: int, timeout: float) -> tuple[Change, Link] | None:
        """To be called before a step begins. Returns the change that happens now, if one does."""
        self.member.step = step  # before the look: a worker that says that something is under way looks at the step after that
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
                if self.evicted:  # it was away once more
                    self.rejoin(deadline - time.monotonic())
                    loaded = -1
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

    def leave(self, why: str, timeout: float) -> None:
        """This worker takes no part any more. Then it is evicted, and may come back as new; not if the store is gone."""
        deadline = time.monotonic() + timeout
        with self._lock:
            self._leaving = why
            self._wake.set()
            while not self.evicted and self.store_gone is None:
                if not self._lock.wait(1.0) and time.monotonic() > deadline:
                    raise GossamerError(f"rank {self.seat.rank} {why}, and the store was silent for {timeout:g} s")

    def rejoin(self, timeout: float) -> None:
        """This worker was evicted, and lives: with a new ticket it is new."""
        deadline = time.monotonic() + timeout
        with self._lock:
            self._anew = True
            self._wake.set()
            while self._anew and self.store_gone is None:
                if not self._lock.wait(1.0) and time.monotonic() > deadline:
                    raise GossamerError(f"rank {self.seat.rank} could not join again: the store was silent for {timeout:g} s")

    def _take_new_ticket(self, store: Any) -> None:
        """In the thread."""
        ticket = store.add(TICKETS, 1) - 1
        store.set(successor_key(self.member.ticket), str(ticket))
        with self._lock:
            self._retired += [(time.monotonic(), link) for link in self._links.values()]
            self._links, self._arrived, self._wanted = {}, None, []
            self.member.renamed(ticket)
            self._anew, self._leaving = False, ""
            self._lock.notify_all()

    def position(self) -> int:
        """The step that the others are in, about; for a newcomer."""
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline and not self.member.log_was_read:
            time.sleep(0.01)

        def steps(store: Any) -> list[int]:
            beats = [in_store(store, Look(self.member.beat_key(q))) for q in self.roster.living]
            return [int(beat.split()[1]) for beat in beats if beat is not None]

        with contextlib.suppress(RuntimeError, Silent):
            return max(self._votes.ask(steps, 10.0), default=0)
        return 0

    def close(self, orderly: bool) -> None:
        """I leave. The launcher would say so too, when the process has ended."""
        why = FINISHED if orderly else "ended with an error"
        with self._lock:
            if self._ended:
                return
            self._ended = True
            self._wake.set()
        self._thread.join(_LEAVE)
        if self.store_gone is None and not self.evicted:
            with contextlib.suppress(RuntimeError, Silent):
                self._votes.ask(lambda store: self._carry_out(self.member.leave(why), store), _LEAVE)
        self._votes.close()
        # A thread that comes back from gloo when the interpreter has gone down aborts the process. Building ends by itself, in time.
        for helper in self._helpers:
            helper.join(_HELPERS if orderly else _LEAVE)
        self._links, self._retired, self._wanted, self._arrived = {}, [], [], None

    def _start_helper(self, work: Callable[..., object], *args: object, name: str) -> None:
        self._helpers = [thread for thread in self._helpers if thread.is_alive()]
        self._helpers.append(threading.Thread(target=work, args=args, name=name, daemon=True))
        self._helpers[-1].start()

    # --- For flights: who is lost ------------------------------------------------------------------------------------------

    def losses(self, link: Link) -> Losses:
        return self.member.losses(link.epoch)

    def lose(self, link: Link, rank: int, why: str) -> None:
        with self._lock:
            self.member.lose(link.epoch, rank, why)
        self._wake.set()

    def shut_out(self, timeout: float) -> bool:
        member, now = self.member, time.monotonic()
        if now < member.lease and (member.quiet or not member.evicted):  # nearly always: no lock
            return False
        with self._lock:
            self._wake.set()
            while member.uncertain(now):
                self._lock.wait(0.1)
                if time.monotonic() > now + timeout:
                    raise GossamerError(
                        f"rank {self.seat.rank}: the store has not answered for {timeout:g} s; is the host of the first launcher reachable?"
                    )
            return self.evicted

    @property
    def blind(self) -> bool:
        return self.store_gone is not None

    def complete(self, what: str, timeout: float, fly: Callable[[Link, tuple[int, ...]], bool]) -> bool:
        """A collective; see :class:`Collectives`. False if the store is gone."""
        rules = self._collectives.complete(what, timeout)
        whole: bool | None = None

        def go_on(store: Any) -> Fly | _End[tuple[int, ...]]:
            return self._carry_out(rules, store, whole)

        try:
            while not self.blind:
                now = self._votes.ask(go_on, timeout + 1)  # the rules give up by themselves, as long as the store answers
                if isinstance(now, _End):
                    return True
                with self._lock:
                    link = self._links[now.epoch]
                whole = fly(link, now.places)
        except RuntimeError as error:
            self._without_store(error)
        except Silent as error:
            raise GossamerError(
                f"rank {self.seat.rank} in {what}: {error}; is the host of the first launcher reachable?"
            ) from None
        return False

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
            store = self.seat.connect_patiently()
            while not self._ended:
                if self._leaving:
                    self._carry_out(self.member.leave(self._leaving), store)
                if self._anew:
                    self._take_new_ticket(store)
                self._carry_out(self.member.tick(), store)
                with self._lock:
                    self._lock.notify_all()
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
