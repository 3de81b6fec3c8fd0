"""Who is alive: the threads around ``roster.py``.

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

from gossamer import handover
from gossamer.ballots import Ballots
from gossamer.errors import GossamerError
from gossamer.links import Link
from gossamer.log import Log
from gossamer.roster import Change, Event, Part, Roster
from gossamer.seats import ENDS, TICKETS, Seat, ended_key, successor_key

_BEAT = 1.0  # seconds between two heartbeats
_LOOK, _BUSY = 0.1, 0.01  # seconds between two looks at the log; while a change is under way
_DOUBT = 2.5  # seconds after which a lost peer that still beats is taken to live
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
        self.seat, self.ticket = seat, seat.ticket
        self._open_group, self._capture = open_group, capture
        self._name = name
        self._store = seat.connect()
        self._log = Log(self._store, f"{name}/log")
        self._ballots = Ballots(self._store, f"{name}/ballots")
        everyone = {q: q for q in range(seat.size)}
        self._step = 0  # the last that the loop began, or is held from
        self._set(Part(self.ticket, Roster(everyone, tuple(everyone)), epoch=-1 if link is None else 0))
        self._members = {0: tuple(everyone)}  # of the epochs whose links are open, the tickets in the order of the link
        self._links: dict[int, Link] = {} if link is None else {0: link}
        self._retired: list[tuple[float, Link]] = []
        self._donors: dict[int, dict[int, int]] = {}  # of each proposal: newcomer -> who gives it its state
        self._lock = threading.Condition()
        self._wake = threading.Event()
        self._ended = False
        self._asks = False
        self.store_gone: str | None = None
        self._built = -1  # the proposal whose group stands here
        self._building = -1
        self._failed = -1
        self._wanted: list[tuple[int, Link]] = []  # copies of my state: (place, link), made before the next step
        self._arrived: tuple[int, bytes] | None = None  # the state that I got, as a newcomer
        self._lost: dict[tuple[int, int], tuple[float, str]] = {}  # (epoch, ticket) -> when the connection broke, and why
        self._told: set[tuple[int, int]] = set()
        self._gone: dict[int, tuple[frozenset[int], frozenset[int]]] = {}
        self._seen: dict[int, tuple[str, float]] = {}  # of each member its last heartbeat, and when it came
        self._beats, self._beaten = 0, 0.0
        self._looked = self._ticked = time.monotonic()
        self._ends = 0
        self._lease = time.monotonic() + seat.evict_after
        self._helpers: list[threading.Thread] = []
        self._thread = threading.Thread(target=self._run, name="gossamer-membership", daemon=True)
        self._thread.start()

    # --- In the training loop --------------------------------------------------------------------------------------------

    @property
    def evicted(self) -> bool:
        return self._part.evicted

    def before(self, step: int, timeout: float) -> tuple[Change, Link] | None:
        """To be called before a step begins. Returns the change that happens now, if one does."""
        self._step = step  # before the look: whoever says that something is under way looks at the step after that
        if self._wanted:
            self._hand_out()
        if self._quiet:  # in nearly every step: no lock
            return None
        with self._lock:
            deadline = time.monotonic() + timeout
            while self._part.held(step) and not self.evicted and self.store_gone is None:
                if not self._lock.wait(1.0) and time.monotonic() > deadline:
                    missing = self._missing()
                    raise GossamerError(f"rank {self.seat.rank} at step {step}: {missing} within {timeout:g} s")
            part = self._part
            if self.evicted:
                return None
            self._set(part.begun(step))
            return self._change(step) if part.due(step) else None

    def _set(self, part: Part) -> None:
        """With the lock held."""
        self._part = part
        self._quiet = part.quiet

    def _missing(self) -> str:
        proposal, roster = self._part.roster.proposal, self._part.roster
        late = [roster.ranks[q] for q in roster.living if proposal is not None and not proposal.reported(q)]
        return f"rank {', '.join(map(str, late))} did not say at which step it is"

    def _change(self, step: int, rejoined: bool = False) -> tuple[Change, Link]:
        """With the lock held."""
        roster = self._part.roster
        ranks = roster.ranks
        donors = self._donors.get(roster.epoch, {})
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
        loaded = -1
        self._asks = True
        self._wake.set()
        with self._lock:
            while not (self._part.roster.epoch in self._links and self.ticket in self._part.roster.members):
                if self.store_gone is not None:
                    raise GossamerError(f"rank {self.seat.rank} can't join: the store is gone ({self.store_gone})")
                if self.evicted:
                    raise GossamerError(f"rank {self.seat.rank} was given up while it joined; is this machine very busy?")
                if not self._part.roster.living and self._log_was_read:
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
                    self._built = loaded
                    self._wake.set()
                self._lock.wait(0.1)
            start = self._part.roster.start
            self._step = start
            self._set(self._part.begun(start))
            return self._change(start, rejoined=True)

    def rejoin(self) -> None:
        """I was evicted, and live: with a new ticket I am new."""
        with self._lock:
            self._stop_thread()
            old = self.ticket
            self.ticket = self._store.add(TICKETS, 1) - 1
            self._store.set(successor_key(old), str(self.ticket))
            for link in self._links.values():
                self._retired.append((time.monotonic(), link))
            self._links, self._built, self._building, self._arrived = {}, -1, -1, None
            self._wanted, self._lost, self._beaten = [], {}, 0.0
            self._step = -1
            self._set(Part(self.ticket, self._part.roster, epoch=-1, step=-1))
            self._ended = False
            self._seen = {}
            self._thread = threading.Thread(target=self._run, name="gossamer-membership", daemon=True)
        self._thread.start()

    def position(self) -> int:
        """The step that the others are in, about; for a newcomer."""
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline and not self._log_was_read:
            time.sleep(0.01)
        steps = [0]
        for q in self._part.roster.living:
            with contextlib.suppress(RuntimeError):
                if self._store.check([self._beat_key(q)]):
                    steps.append(int(self._store.get(self._beat_key(q)).decode().split()[1]))
        return max(steps)

    def close(self, why: str) -> None:
        """I leave. The launcher would say so too, when the process has ended."""
        with self._lock:
            if self._ended:
                return
            self._stop_thread()
        if self.store_gone is None and not self.evicted:
            with contextlib.suppress(RuntimeError):
                event = Event("dead", self.ticket, why=why)
                while not self._log.append(event) and event not in self._log.news():
                    pass
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

    def gone(self, link: Link) -> frozenset[int]:
        return self._gone.get(link.epoch, _NOBODY)[0]

    def doubtful(self, link: Link) -> frozenset[int]:
        return self._gone.get(link.epoch, _NOBODY)[1]

    def lose(self, link: Link, rank: int, why: str) -> None:
        with self._lock:
            members = self._members.get(link.epoch)
            if members is not None:
                self._lost.setdefault((link.epoch, members[rank]), (time.monotonic(), why))
                self._count_gone()
        self._wake.set()

    def expired(self) -> bool:
        return time.monotonic() > self._lease and self.store_gone is None

    def _count_gone(self) -> None:
        """With the lock held. Of each epoch, whose places are lost, and which are in doubt."""
        roster = self._part.roster
        for epoch, members in self._members.items():
            lost = {q for q in members if q in roster.dead or (epoch, q) in self._lost}
            doubt = lost | roster.doubtful(epoch)
            gone, doubtful = (frozenset(k for k, q in enumerate(members) if q in some) for some in (lost, doubt))
            self._gone[epoch] = (gone, doubtful)

    @property
    def blind(self) -> bool:
        return self.store_gone is not None

    def commit(self, link: Link, name: str, whole: bool, places: tuple[int, ...], timeout: float) -> tuple[int, ...] | None:
        """See :class:`Ballots`."""
        members = self._members[link.epoch]
        try:
            return self._ballots.decide(f"{link.epoch}/{name}", whole, {q: members[q] for q in places}, timeout, self)
        except RuntimeError as error:
            self._without_store(error)
        return None if whole else places

    @property
    def roster(self) -> Roster:
        return self._part.roster

    # --- In the thread -------------------------------------------------------------------------------------------------------

    _log_was_read = False

    def _run(self) -> None:
        try:
            while not self._ended:
                self._tick()
                self._wake.wait(_LOOK if self._part.roster.proposal is None else _BUSY)
                self._wake.clear()
        except RuntimeError as error:
            self._without_store(error)

    def _without_store(self, error: RuntimeError) -> None:
        with self._lock:
            if self._ended or self.store_gone is not None:
                return
            self.store_gone = str(error).strip().splitlines()[0]
            self._lock.notify_all()
        print(
            f"gossamer: rank {self.seat.rank}: the store is gone ({self.store_gone}); training goes on, but nobody can join any more",
            flush=True,
        )

    def _tick(self) -> None:
        now = time.monotonic()
        away, self._ticked = now - self._ticked, now
        if away > max(2.0, self.seat.evict_after / 4):
            self._seen = {}  # it was me who was away, so nobody can be blamed for having been silent
        self._read_log()
        if self._asks and self.ticket not in self._part.roster.ranks:
            self._append(Event("join", self.ticket, rank=self.seat.rank))
        if now - self._beaten >= _BEAT:
            self._beats, self._beaten = self._beats + 1, now
            self._store.set(self._beat_key(self.ticket), f"{self._beats} {self._step}")
            self._read_log()
            if not self.evicted:
                self._lease = now + self.seat.evict_after
        if self.evicted:
            return
        self._look_for_ends()
        if now - self._looked >= _BEAT:
            self._looked = now
            self._look_at_beats(now)
        self._tell_losses(now)
        self._do_my_part(now)

    def _read_log(self) -> None:
        events = self._log.news()
        self._log_was_read = True
        if not events:
            return
        with self._lock:
            for event in events:
                self._set(self._part.heard(event))
                proposal = self._part.roster.proposal
                if proposal is not None and proposal.number not in self._donors:
                    roster = self._part.roster
                    self._donors[proposal.number] = {q: roster.donor(q) for q in roster.newcomers()}
            self._count_gone()
            self._lock.notify_all()

    def _append(self, event: Event) -> bool:
        """If somebody else was first, it is tried again after a look at what they had to say."""
        written = self._log.append(event)
        if not written:
            self._wake.set()
        self._read_log()
        return written

    def _look_for_ends(self) -> None:
        ends = self._store.add(ENDS, 0)
        if ends == self._ends:
            return
        roster = self._part.roster
        for q in {*roster.members, *roster.asking} - roster.dead:
            if self._store.check([ended_key(q)]):
                self._append(Event("dead", q, why=self._store.get(ended_key(q)).decode()))
        if all(q in self._part.roster.dead for q in {*roster.members, *roster.asking} if self._store.check([ended_key(q)])):
            self._ends = ends

    def _look_at_beats(self, now: float) -> None:
        roster = self._part.roster
        for q in {*roster.members, *roster.asking} - roster.dead - {self.ticket}:
            beat = self._store.get(self._beat_key(q)).decode() if self._store.check([self._beat_key(q)]) else ""
            if q not in self._seen or self._seen[q][0] != beat:
                self._seen[q] = (beat, now)
            elif now - self._seen[q][1] > self.seat.evict_after:
                self._append(Event("dead", q, why=f"no heartbeat for {self.seat.evict_after:g} s"))

    def _tell_losses(self, now: float) -> None:
        roster = self._part.roster
        for (epoch, q), (since, why) in list(self._lost.items()):
            if epoch not in (roster.epoch, self._part.epoch) or q in roster.dead:
                continue
            if (epoch, q) not in self._told and not self._dead_by_now(q):
                if self._append(Event("lost", self.ticket, epoch, peer=q, why=why)):
                    self._told.add((epoch, q))
            elif now - since > _DOUBT and roster.proposal is None and self._part.epoch == epoch:
                beat, when = self._seen.get(q, ("", 0.0))
                if beat and when > since:  # it lives
                    self._append(Event("renew", self.ticket, epoch))
                elif now - since > 2 * _DOUBT:
                    self._append(Event("dead", q, why=f"{why}, and no heartbeat since"))

    def _dead_by_now(self, q: int) -> bool:
        self._look_for_ends()
        return q in self._part.roster.dead

    def _do_my_part(self, now: float) -> None:
        part = self._part
        proposal = part.roster.proposal
        if proposal is not None and self.ticket in proposal.members and self._building < proposal.number:
            self._building = proposal.number
            self._start_helper(self._build, part.roster, name="gossamer-group")
        if proposal is not None and self._failed == proposal.number:
            self._append(Event("failed", self.ticket, proposal.number))
        duty = part.duty(self._built)
        if duty is not None and duty.what == "at":
            with self._lock:  # the loop may have begun another step since
                duty = duty._replace(step=self._step)
                self._set(self._part.promise(duty))
        if duty is not None:
            self._append(duty)
        self._retire(now)

    def _retire(self, now: float) -> None:
        """Close what nobody needs any more: groups of proposals that came to nothing, and of epochs that are over."""
        with self._lock:
            keep = {self._part.epoch, self._part.roster.epoch, self._building}
            for number in [number for number in self._links if number not in keep]:
                link = self._links.pop(number)
                self._retired.append((now if number < self._part.epoch else now - _KEPT, link))
            for number in [number for number in self._members if number not in keep and number not in self._links]:
                if number < self._part.epoch - 2:
                    del self._members[number]
                    self._gone.pop(number, None)
            due = [link for since, link in self._retired if now - since >= _KEPT]
            self._retired = [(since, link) for since, link in self._retired if now - since < _KEPT]
        for link in due:
            link.close()

    def _beat_key(self, ticket: int) -> str:
        return f"{self._name}/beat/{ticket}"

    # --- In a thread for each group that is built ----------------------------------------------------------------------------

    def _build(self, roster: Roster) -> None:
        proposal = roster.proposal
        assert proposal is not None
        number, members, donors = proposal.number, proposal.members, self._donors[proposal.number]

        def abandoned() -> bool:
            return self._ended or self._building != number or self.store_gone is not None or self._void(number)

        names = tuple(roster.ranks[q] for q in members)
        try:
            link = self._open_group(number, members.index(self.ticket), names, abandoned)
            with self._lock:
                self._links[number], self._members[number] = link, members
                self._count_gone()
            if self.ticket in donors:
                state = handover.receive(link, members.index(donors[self.ticket]))
                with self._lock:
                    self._arrived = (number, state)
                    self._lock.notify_all()
            else:
                with self._lock:
                    self._wanted += [(members.index(q), link) for q, donor in donors.items() if donor == self.ticket]
                    self._built = number
        except RuntimeError:
            if not abandoned():
                time.sleep(_PAUSE)
                self._failed = number
        self._wake.set()

    def _void(self, number: int) -> bool:
        proposal = self._part.roster.proposal
        return self._part.roster.epoch != number and (proposal is None or proposal.number != number)


def _send(link: Link, place: int, pack: Callable[[], bytes]) -> None:
    with contextlib.suppress(RuntimeError):  # it is gone again; then the proposal is void
        handover.send(link, place, pack())


_NOBODY: tuple[frozenset[int], frozenset[int]] = (frozenset(), frozenset())
