"""The members under ``gossamer launch``: they die, hang and come back, and the others go on.

Beyond ``membership.py`` a worker here

- builds the group of a proposal in the background, and says that it stands;
- notices who is gone: at once from the launcher's word that the process ended, otherwise from heartbeats that do not come for
  ``evict_after`` seconds. An error on a connection alone is no death: the weight of that neighbour goes to oneself, and if it goes on to
  beat, all connections are made anew;
- joins as new, with the state of another worker.

If the store is gone, no worker can be declared dead and none can join; the living go on, and a lost neighbour's weight stays with oneself.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from typing import Any

from gossamer.errors import GossamerError
from gossamer.members import handover
from gossamer.members.collectives import Collectives
from gossamer.members.effects import Build, Came, Effect, Fly, Look, Pause, in_store
from gossamer.members.membership import LEAVE, Membership, Turn
from gossamer.members.roster import Roster
from gossamer.members.store import SUCCESSOR, TICKETS, Seat
from gossamer.transport.link import Link
from gossamer.transport.store_client import Silent
from gossamer.transport.waiting import Losses

_PAUSE = 1.0  # seconds before a group that could not be built is tried again
_HELPERS = 12.0  # seconds to wait for what is still being built when the process ends
_KEPT = 30.0  # seconds that the connections of an old epoch are kept: others may be a few steps behind


class Survivors(Membership):
    """``capture()`` copies my state, for a newcomer, and returns what makes bytes of the copy."""

    fixed = False

    def __init__(
        self, seat: Seat, name: str, link: Link | None, timeout: float, capture: Callable[[], Callable[[], bytes]]
    ) -> None:
        self._name, self._capture = name, capture
        self._retired: list[tuple[float, Link]] = []
        self._anew, self._leaving = False, ""  # why this worker has to leave
        self._wanted: list[tuple[int, Link]] = []  # copies of my state: (place, link), made before the next step
        self._arrived: tuple[int, bytes] | None = None  # the state that I got, as a newcomer
        self._helpers: list[threading.Thread] = []
        super().__init__(seat, name, link, timeout)
        self._collectives = Collectives(self.member, f"{name}/votes")

    # --- In the training loop --------------------------------------------------------------------------------------------

    def _between_steps(self) -> None:
        self.hand_out()

    def hand_out(self) -> None:
        """Newcomers want a copy of my state; it is made here, and sent in the background."""
        if not self._wanted:
            return
        with self._lock:
            wanted, self._wanted = self._wanted, []
        pack = self._capture()
        for place, link in wanted:
            self._start_helper(_send, link, place, pack, name="gossamer-handover")

    def hand_out_again(self, place: int, link: Link, pack: Callable[[], bytes]) -> None:
        """A newcomer gets my state of just before its first step. It is sent in the background: the newcomer may be gone again."""
        self._start_helper(_send, link, place, pack, True, name="gossamer-handover")

    def take_again(self, place: int, link: Link) -> bytes:
        """The same, for the newcomer."""
        arrived: list[bytes] = []

        def take() -> None:
            with contextlib.suppress(RuntimeError):
                arrived.append(handover.receive(link, place, again=True))

        helper = self._start_helper(take, name="gossamer-handover")
        deadline = time.monotonic() + self.timeout
        while helper.is_alive() and place not in self.losses(link).gone and time.monotonic() < deadline:
            helper.join(0.05)
        if not arrived:
            raise GossamerError(
                f"rank {self.seat.rank} could not join: rank {link.names[place]} was lost while it handed its state over"
            )
        return arrived[0]

    def join(self, load: Callable[[bytes], object]) -> Turn:
        """Take part, as new: returns when the others know the step from which on I do. ``load`` takes over the state that was sent."""
        deadline = time.monotonic() + self.timeout
        loaded, member = -1, self.member
        member.asks = True
        self._wake.set()
        with self._lock:
            while not (self.roster.group in self._links and member.ticket in self.roster.members):
                if self.store_gone is not None:
                    raise GossamerError(f"rank {self.seat.rank} can't join: the store is gone ({self.store_gone})")
                if self.evicted:  # it was away once more
                    self.rejoin(deadline - time.monotonic())
                    loaded = -1
                if not self.roster.living and member.log_was_read:
                    raise GossamerError(f"rank {self.seat.rank} can't join: no worker is left; the job has ended without it")
                if time.monotonic() > deadline:
                    raise GossamerError(f"rank {self.seat.rank} could not join within {self.timeout:g} s")
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
            return self._enter()

    def leave(self, why: str) -> None:
        """This worker takes no part any more. Then it is evicted, and may come back as new; not if the store is gone."""
        with self._lock:
            self._leaving = why
            self._wait_for_store(lambda: self.evicted, self.timeout, f"{why}, and")

    def rejoin(self, timeout: float) -> None:
        """This worker was evicted, and lives: with a new ticket it is new."""
        with self._lock:
            self._anew = True
            self._wait_for_store(lambda: not self._anew, timeout, "could not join again:")

    def _wait_for_store(self, done: Callable[[], bool], timeout: float, failed: str) -> None:
        """Until the thread has ``done`` it, or the store is gone. With the lock held."""
        deadline = time.monotonic() + timeout
        self._wake.set()
        while not done() and self.store_gone is None:
            if not self._lock.wait(1.0) and time.monotonic() > deadline:
                raise GossamerError(f"rank {self.seat.rank} {failed} the store was silent for {timeout:g} s")

    def _take_new_ticket(self, store: Any) -> None:
        """In the thread."""
        ticket = store.add(TICKETS, 1) - 1
        store.set(f"{SUCCESSOR}/{self.member.ticket}", str(ticket))
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
        super().close(orderly)
        # A thread that comes back from gloo when the interpreter has gone down aborts the process. Building ends by itself, in time.
        for helper in self._helpers:
            helper.join(_HELPERS if orderly else LEAVE)
        self._links, self._retired, self._wanted, self._arrived = {}, [], [], None

    def _start_helper(self, work: Callable[..., object], *args: object, name: str) -> threading.Thread:
        """Several threads may call it."""
        helper = threading.Thread(target=work, args=args, name=name, daemon=True)
        helper.start()
        with self._lock:
            self._helpers = [*(thread for thread in self._helpers if thread.is_alive()), helper]
        return helper

    # --- For flights: who is lost ------------------------------------------------------------------------------------------

    def losses(self, link: Link) -> Losses:
        return self.member.losses(link.epoch)

    def lose(self, link: Link, rank: int, why: str) -> None:
        with self._lock:
            self.member.lose(link.epoch, rank, why)
        self._wake.set()

    def shut_out(self, timeout: float) -> bool:
        member, now = self.member, time.monotonic()
        if now < member.lease and not member.evicted:  # nearly always: no lock
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

    def complete(
        self, what: str, timeout: float, fly: Callable[[Link, tuple[int, ...]], Came], acknowledged: bool = False
    ) -> bool:
        """A collective; see :class:`Collectives`. False if the store is gone."""
        rules = self._collectives.complete(what, timeout, acknowledged)
        came: Came | None = None

        def go_on(store: Any) -> Fly | None:
            return self._carry_out(rules, store, came)

        try:
            while not self.blind:
                # The rules ask for nothing of the store before the first try, nor if all workers have the result. Otherwise they give up by
                # themselves, as long as the store answers.
                now = go_on(None) if came in (None, Came.EVERYWHERE) else self._votes.ask(go_on, timeout + 1)
                if now is None:
                    return True
                with self._lock:
                    link = self._links[now.epoch]
                came = fly(link, now.places)
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

    # --- In the thread -------------------------------------------------------------------------------------------------------

    def _do(self, effect: Effect, store: Any) -> Any:
        if isinstance(effect, Pause):  # in a collective parameters do not change, so a newcomer need not wait for its end
            self.hand_out()
            time.sleep(effect.seconds)
        elif isinstance(effect, Build):
            self._start_helper(self._build, effect.roster, name="gossamer-group")
        else:
            return super()._do(effect, store)
        return None

    def _tick(self, store: Any) -> None:
        if self._leaving:
            self._carry_out(self.member.leave(self._leaving), store)
        if self._anew:
            self._take_new_ticket(store)
        super()._tick(store)
        self._retire(time.monotonic())

    def _without_store(self, error: RuntimeError) -> None:
        known = self._ended or self.blind
        super()._without_store(error)
        if not known:
            said = f"the store is gone ({self.store_gone}); training goes on, but no worker can join any more"
            print(f"gossamer: rank {self.seat.rank}: {said}", flush=True)

    def _retire(self, now: float) -> None:
        """Close what no worker needs any more: groups of proposals that came to nothing, and of epochs that are over."""
        with self._lock:
            group = self.member.group
            keep = {group, self.roster.group, self.member.building}
            for number in [number for number in self._links if number not in keep]:
                link = self._links.pop(number)
                self._retired.append((now if number < group else now - _KEPT, link))
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
            link = open_group(self.seat, self._name, self.timeout, number, members.index(member.ticket), names, abandoned)
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


def open_group(
    seat: Seat, name: str, timeout: float, number: int, place: int, names: tuple[int, ...], abandoned: Callable[[], bool]
) -> Link:
    """The group of an epoch."""
    # On a connection of its own: gloo waits on it for the members that have to come, up to 10 s, and nothing else gets through meanwhile.
    # If one of them dies, the next group must not wait for that.
    link = Link(seat.connect(), place, len(names), timeout, number, name, abandoned)
    link.names = names
    return link


def _send(link: Link, place: int, pack: Callable[[], bytes], again: bool = False) -> None:
    with contextlib.suppress(RuntimeError):  # it is gone again; then the proposal is void
        handover.send(link, place, pack(), again)
