"""One worker's part in a job whose members may change: the rules, without threads, sockets or sleep (see ``effects.py``).

What the worker knows: the log that it has read (``part``), when it heard each member's heart beat, which connections broke. What it does
about it, in a :meth:`Member.tick` every now and then: it beats, reads the log, says who is gone or done, and does what the roster asks for.
Each :class:`Member` is resumed by one caller at a time; ``membership.py`` holds a lock for that.
"""

from __future__ import annotations

from collections.abc import Callable

from gossamer.members.effects import Add, Build, Claim, Look, Rules
from gossamer.members.roster import FINISHED, Event, Part, Roster, parsed, written
from gossamer.members.store import ENDED, ENDS
from gossamer.transport.waiting import NONE, Losses

BEAT = 1.0  # seconds between two heartbeats
_BEATS = 20  # heartbeats in the time after which a worker is evicted, at most
DOUBT = 2.5  # seconds after which a lost peer that still beats is taken to live
_GONE = "gone -1"  # instead of a heartbeat: another worker has evicted this one


class Member:
    """``tickets``: of the members at the start, in the order of ranks. ``joins``: it is not one of them, and wants to become one.
    ``fixed``: no further group can be built, so a death is the end for all."""

    def __init__(
        self,
        name: str,
        ticket: int,
        rank: int,
        tickets: tuple[int, ...],
        joins: bool,
        evict_after: float,
        clock: Callable[[], float],
        roster: Roster | None = None,
        fixed: bool = False,
    ) -> None:
        self.name, self.ticket, self.rank, self.evict_after, self.clock = name, ticket, rank, evict_after, clock
        self.fixed, self._beat_every = fixed, max(BEAT, evict_after / _BEATS)
        self.step = 0  # the last that the loop began, or is held from
        roster = roster or Roster({q: q for q in tickets}, tickets)
        self.part = Part(ticket, roster, epoch=-1 if joins else 0)
        self.members: dict[int, tuple[int, ...]] = {0: tickets}  # of each group, in the order of its link
        self.epochs = {0: (0, tickets)}  # of each epoch, its group and its members
        self.donors: dict[int, dict[int, int]] = {}  # of each proposal: newcomer -> who gives it its state
        self.asks = False
        self.patience: float | None = None  # it has no more data; until then others that finish as well can leave with it
        self.blind = False  # the store is gone
        self.built = -1  # the proposal whose group stands here
        self.building = -1
        self.failed = -1
        self.read = 0  # entries of the log
        self.log_was_read = False
        self.again = False  # another worker wrote into the log first: tick at once
        self.lost: dict[tuple[int, int], tuple[float, str]] = {}  # (group, ticket) -> when the connection broke, and why
        self._told: set[tuple[int, int]] = set()
        self._losses: dict[int, Losses] = {}
        self._seen: dict[int, tuple[str, float]] = {}  # of each member its last heartbeat, and when it came
        self._beats, self._beaten, self._beat = 0, float("-inf"), ""
        self._looked = self._ticked = now = clock()
        self._ends = (0, len(tickets))  # (processes that have ended, workers that were known) when all of them were looked at
        self.lease = now + evict_after  # until then no other worker can have evicted this one
        self.confirmed = now  # whatever had happened by then is known

    @property
    def evicted(self) -> bool:
        return self.part.evicted

    @property
    def stands(self) -> bool:
        """It is done, and begins no step for the sake of the others now: soon it will be known how they go on."""
        part, patience = self.part, self.patience
        if patience is None:
            return False
        return part.still or (part.epoch == part.roster.epoch and self.clock() < patience)

    def renamed(self, ticket: int) -> None:
        """It was evicted, and lives: with a new ticket it is new."""
        self.ticket = ticket
        self.built = self.building = -1
        self.patience = None
        self.lost, self._beaten, self._beat, self._seen = {}, float("-inf"), "", {}
        self.step = -1
        self.part = Part(ticket, self.part.roster, epoch=-1, step=-1)
        self.count_losses()

    # --- For flights: who is lost ------------------------------------------------------------------------------------------

    @property
    def group(self) -> int:
        """Whose connections it uses now."""
        return self.epochs.get(self.part.epoch, (-1,))[0]

    def losses(self, group: int) -> Losses:
        return self._losses.get(group, NONE)

    def lose(self, group: int, place: int, why: str) -> None:
        members = self.members.get(group)
        if members is not None:
            self.lost.setdefault((group, members[place]), (self.clock(), why))
            self.count_losses()

    def uncertain(self, since: float) -> bool:
        """Whether this worker must hear from the store before it uses what had come by ``since``. A peer that has given it up goes on
        and changes its memory, so a row may be torn that was still on its way then."""
        return since > self.lease and self.confirmed < since and not self.evicted and not self.blind

    def count_losses(self) -> None:
        """Of each group. A peer that has lost me is gone for me too: it sends nothing any more, and waits for nothing of mine."""
        roster, me = self.part.roster, self.ticket
        if not (roster.dead or roster.lost or self.lost):
            self._losses = {}
            return
        counted = {}
        for group, members in self.members.items():
            pairs = {*roster.lost_pairs(group), *((me, q) for g, q in self.lost if g == group)}
            gone = roster.dead.union(*(pair for pair in pairs if me in pair))
            place = {q: k for k, q in enumerate(members)}
            counted[group] = Losses(
                frozenset(place[q] for q in gone if q in place and q != me),
                frozenset((place[a], place[b]) for a, b in pairs if a in place and b in place),
                self.evicted,
                roster.group > group and roster.dead.union(roster.members).issuperset(members),
            )
        self._losses = counted

    @property
    def orphaned(self) -> bool:
        """It came when the others were at the end: all that could have taken it in have finished before its first step."""
        newcomers, roster = self.donors.get(self.part.epoch, {}), self.part.roster
        if self.ticket not in newcomers:
            return False
        hosts = [q for q in self.epochs[self.part.epoch][1] if q not in newcomers]
        return all(q in roster.dead for q in hosts) and any(roster.why.get(q) == FINISHED for q in hosts)

    def forget(self, keep: set[int]) -> None:
        """Groups and epochs that are long over."""
        for number in [number for number in self.members if number not in keep and number < self.group - 2]:
            del self.members[number]
            self._losses.pop(number, None)
        self.epochs = {number: epoch for number, epoch in self.epochs.items() if number >= self.part.epoch}

    # --- Every now and then ------------------------------------------------------------------------------------------------

    def tick(self) -> Rules[None]:
        now = self.clock()
        self.again = False
        away, self._ticked = now - self._ticked, now
        if away > max(2.0, self.evict_after / 4):
            # This worker was away, or the store was silent: no other worker can be blamed for having said nothing.
            self._seen = {}
            self.lost = {key: (now, why) for key, (_, why) in self.lost.items()}
        yield from self.read_log()
        if self.asks and self.ticket not in self.part.roster.ranks:
            yield from self._append(Event("join", self.ticket, rank=self.rank))
        if now - self._beaten >= self._beat_every:
            yield from self._say_that_i_live(now)
        self.confirmed = now
        if self.evicted:
            return
        yield from self._look_for_ends()
        if now - self._looked >= self._beat_every:
            self._looked = now
            yield from self._look_at_beats(now)
        yield from self._tell_losses(now)
        if self.patience is not None:
            yield from self._say_that_i_am_done(now)
        yield from self._do_my_part()

    def _say_that_i_am_done(self, now: float) -> Rules[None]:
        me, roster = self.ticket, self.part.roster
        if me in roster.members and me not in roster.done:
            yield from self._append(Event("done", me))
        elif self.patience is not None and now > self.patience and me in roster.done - roster.leaving and not roster.over:
            yield from self._append(Event("leave", me))

    def _say_that_i_live(self, now: float) -> Rules[None]:
        """A heartbeat takes the place of the last one, and so does the word that this worker is gone: whichever comes first. So when the
        heartbeat is there, no worker can evict this one for what it has seen before."""
        self._beats, self._beaten = self._beats + 1, now
        beat = f"{self._beats} {self.step}"
        if (yield Claim(self.beat_key(self.ticket), beat, self._beat)) != beat:
            yield from self.leave(self._silence)  # the one that has evicted me may not have said so yet, or be gone
            return
        self._beat = beat
        yield from self.read_log()
        self.lease = now + self.evict_after

    @property
    def _silence(self) -> str:
        return f"no heartbeat for {self.evict_after:g} s"

    def read_log(self) -> Rules[None]:
        before = self.part.roster
        while True:
            at = self.read
            entry: str | None = yield Look(self._log_key)
            if entry is None:
                break
            if self.read == at:  # otherwise it was read meanwhile, when this worker says that it leaves
                self.read += 1
                self._hear(parsed(entry))
        self.log_was_read = True
        roster = self.part.roster
        if roster.dead is not before.dead or roster.lost is not before.lost or roster.group != before.group:
            self.count_losses()

    def _hear(self, event: Event) -> None:
        self.part = self.part.heard(event)
        proposal, roster = self.part.roster.proposal, self.part.roster
        if roster.epoch not in self.epochs:
            self.epochs[roster.epoch] = (roster.group, roster.members)
            if roster.together:
                self.patience = None
        if proposal is not None and proposal.number not in self.donors:
            self.donors[proposal.number] = {q: roster.donor(q) for q in roster.newcomers()}

    def _append(self, event: Event) -> Rules[bool]:
        """If another worker was first, it is tried again after a look at what that one had to say."""
        if self.evicted:
            return False  # it has no say any more
        text = written(event)
        first = (yield Claim(self._log_key, text)) == text
        self.again = self.again or not first
        yield from self.read_log()
        return first

    def leave(self, why: str) -> Rules[None]:
        """Say that I am gone."""
        event = Event("dead", self.ticket, why=why)
        while not (yield from self._append(event)) and not self.evicted:
            pass

    def _look_for_ends(self) -> Rules[None]:
        workers = len(self.part.roster.ranks)  # before the look: one that becomes known meanwhile may have ended already
        ends = ((yield Add(ENDS, 0)), workers)
        if ends == self._ends:
            return
        ended = {}
        for q in self.part.roster.known:
            if (why := (yield Look(f"{ENDED}/{q}"))) is not None:
                ended[q] = why
                if q not in self.part.roster.dead:
                    yield from self._append(Event("dead", q, why=why))
        if all(q in self.part.roster.dead for q in ended):
            self._ends = ends

    def _look_at_beats(self, now: float) -> Rules[None]:
        """Only members evict: so at least one that can go on is left. If none could go on anyway, all do."""
        roster = self.part.roster
        if self.ticket not in roster.members and not self.fixed:
            return
        for q in roster.known - {self.ticket}:
            beat = (yield Look(self.beat_key(q))) or ""
            if q not in self._seen or self._seen[q][0] != beat:
                self._seen[q] = (beat, now)
            elif beat != _GONE and now - self._seen[q][1] > self.evict_after:
                beat = yield Claim(self.beat_key(q), _GONE, beat)
            if beat == _GONE:
                yield from self._append(Event("dead", q, why=self._silence))

    def _tell_losses(self, now: float) -> Rules[None]:
        roster = self.part.roster
        for (group, q), (since, why) in list(self.lost.items()):
            if group not in self.members or q in roster.dead:
                continue  # it is said of a group that is not used here any more, too: the peer may still use it, and wait
            if (group, q) not in self._told and not (yield from self._dead_by_now(q)):
                if (yield from self._append(Event("lost", self.ticket, group, peer=q, why=why))):
                    self._told.add((group, q))
            elif now - since > DOUBT and roster.proposal is None and self.group == group:
                beat, when = self._seen.get(q, ("", 0.0))
                if beat and when > since:  # it lives; if it does not, it is evicted in time
                    yield from self._append(Event("renew", self.ticket, group))

    def _dead_by_now(self, q: int) -> Rules[bool]:
        yield from self._look_for_ends()
        return q in self.part.roster.dead

    def _do_my_part(self) -> Rules[None]:
        proposal = self.part.roster.proposal
        if proposal is not None and self.ticket in proposal.members and self.building < proposal.number:
            self.building = proposal.number
            if proposal.builds and not self.fixed:
                yield Build(self.part.roster)
        if proposal is not None and self.failed == proposal.number:
            yield from self._append(Event("failed", self.ticket, proposal.number))
        duty = self.part.duty(self.built)
        if duty is not None and duty.what == "at":
            duty = duty._replace(step=self.step)  # the loop may have begun another step since
            self.part = self.part.promise(duty)
        if duty is not None:
            yield from self._append(duty)

    def void(self, number: int) -> bool:
        """Whether the proposal has come to nothing."""
        proposal = self.part.roster.proposal
        return self.part.roster.epoch != number and (proposal is None or proposal.number != number)

    def beat_key(self, ticket: int) -> str:
        return f"{self.name}/beat/{ticket}"

    @property
    def _log_key(self) -> str:
        return f"{self.name}/log/{self.read}"
