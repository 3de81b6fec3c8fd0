"""Who is in, in which epoch, from which step on: the agreement of all workers, without threads and without a network.

All workers read one log of events in the same order (it lies in the store; see ``membership.py``) and fold it with the same
function, so all of them know the same. A member is named by its *ticket*, which is never used again: a worker that comes back has another.

An epoch is a set of members and a process group: one of their own, or places of the present one, if all members have connections there.
A change goes through three marks in the log:

1. A member is dead, a worker wants to join, members leave, or connections are to be made anew: the fold opens a *proposal*. If it needs a
   group of its own, all who are in it build that in the background; a newcomer also gets the state of one who is in. Each says ``built``.
2. When all have said so, each old member says ``at``: the step that it is in. It begins no step beyond that + LEAD until it knows more.
3. When all have, the new epoch begins before step max + LEAD + 1, which no worker can have begun.

A death on the way makes the proposal void, at the same place in the log for all, and opens the next. So there is one agreement
per change and none per step.

A member that has no more data says ``done``; soon after, it or another one says ``leave``, and all who are done leave together. They take
part in the exchange, without training, until the change. When all members are done, the next epoch brings together all who live. It has no
LEAD, because no worker is in a hurry: it begins after the last step that one of them has begun.

``tests/test_roster.py`` tries all interleavings.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

DIVERGED = "has diverged"  # why a worker is gone whose parameters are not finite; more follows
DONE = "has no more data"  # why a worker has left that comes back when all are done
FINISHED = "has finished"  # why a worker is gone that has done all it had to do
LEAD = 8  # steps that a worker may go on without knowing when the change happens

What = Literal["join", "dead", "done", "leave", "lost", "renew", "failed", "built", "at"]


class Event(NamedTuple):
    """One entry of the log.

    - ``join``: ``who`` wants to take part, under the name ``rank``.
    - ``dead``: ``who`` died, hangs or has finished; it never comes back under this ticket.
    - ``done``: ``who`` has no more data.
    - ``leave``: all members that are done leave with the next epoch.
    - ``lost``: ``who`` has no connection to ``peer`` any more in the group ``epoch``. It may be dead, or not.
    - ``renew``: both live, so the connections of this group should be made anew.
    - ``failed``: ``who`` could not build the group of proposal ``epoch``.
    - ``built``, ``at``: see above.
    """

    what: What
    who: int
    epoch: int = 0
    step: int = 0
    rank: int = -1
    peer: int = -1
    why: str = ""


@dataclass(frozen=True)
class Proposal:
    """``group``: that of the epoch with this number, which may be its own. ``lead``: steps that a worker may go on after it has said
    ``at``."""

    number: int
    members: tuple[int, ...]
    group: int = 0
    lead: int = LEAD
    reunion: bool = False  # all are done, and come together
    built: frozenset[int] = frozenset()
    at: frozenset[tuple[int, int]] = frozenset()  # (who, step)

    @property
    def builds(self) -> bool:
        return self.group == self.number

    @property
    def standing(self) -> bool:
        """All have built the group."""
        return self.group != self.number or self.built.issuperset(self.members)

    def reported(self, who: int) -> bool:
        return any(who == q for q, _ in self.at)


@dataclass(frozen=True)
class Roster:
    """What the log says so far. ``epoch`` was agreed on, and begins before step ``start``; ``members`` are in the order of ranks."""

    ranks: Mapping[int, int]  # of every ticket, its rank: a name for people, and the order in the graph
    members: tuple[int, ...]
    epoch: int = 0
    start: int = 0
    group: int = 0  # the epoch for which the present group was built
    proposal: Proposal | None = None
    dead: frozenset[int] = frozenset()
    asking: frozenset[int] = frozenset()  # want to join
    done: frozenset[int] = frozenset()  # members without data
    leaving: frozenset[int] = frozenset()  # those of them that are not in the next epoch
    away: frozenset[tuple[int, int]] = frozenset()  # (ticket, group): these have left, and come back when all are done
    together: bool = False  # this epoch brought all together again
    # (group, ticket, ticket): these two have no connection any more. Kept when the next epoch is agreed on: until all are in that, a worker
    # that comes to a step later must give up the same transfers as those that came to it before.
    lost: frozenset[tuple[int, int, int]] = frozenset()
    numbers: int = 0  # proposals so far
    renewing: bool = False  # though the members stay the same
    lead: int = LEAD
    joined: tuple[int, ...] = field(default=(), compare=False)  # at the last change
    left: tuple[int, ...] = field(default=(), compare=False)
    why: Mapping[int, str] = field(default_factory=dict, compare=False)

    @property
    def living(self) -> tuple[int, ...]:
        return tuple(q for q in self.members if q not in self.dead)

    @property
    def known(self) -> set[int]:
        """All who are to be in this epoch, or in a later one."""
        return {*self.members, *self.asking, *(q for q, _ in self.away)} - self.dead

    @property
    def over(self) -> bool:
        """No member has data."""
        return bool(self.done) and self.done.issuperset(self.living)

    def lost_pairs(self, group: int) -> frozenset[tuple[int, int]]:
        return frozenset((a, b) for g, a, b in self.lost if g == group)

    def donor(self, newcomer: int) -> int:
        """Who gives a newcomer its state: the next old member, in the order of the proposal. Several newcomers ask different ones."""
        assert self.proposal is not None
        order = self.proposal.members
        here = order.index(newcomer)
        return next(q for q in (*order[here + 1 :], *order[:here]) if q in self.members)

    def newcomers(self) -> tuple[int, ...]:
        assert self.proposal is not None
        return tuple(q for q in self.proposal.members if q not in self.members)

    def apply(self, event: Event) -> Roster:
        """The fold: what is known after one more event. Events that come too late change nothing."""
        who, open_ = event.who, self.proposal
        here = open_ is not None and open_.number == event.epoch
        match event.what:
            case "join" if who not in self.ranks and who not in self.dead:
                after = replace(self, ranks={**self.ranks, who: event.rank}, asking=self.asking | {who})
            case "dead" if who not in self.dead:
                after = replace(self, dead=self.dead | {who}, asking=self.asking - {who}, why={**self.why, who: event.why})
            case "done" if who in self.members:
                after = replace(self, done=self.done | {who})
            case "leave" if who in self.done:
                after = replace(self, leaving=self.done)
            case "lost":
                after = replace(self, lost=self.lost | {(event.epoch, min(who, event.peer), max(who, event.peer))})
            case "renew" if event.epoch == self.group and open_ is None:
                after = replace(self, renewing=True)
            case "failed" if here:
                after = replace(self, proposal=None)
            case "built" if here and open_ is not None and who in open_.members:
                after = replace(self, proposal=replace(open_, built=open_.built | {who}))
            case "at" if here and open_ is not None and open_.standing and who in self.members and not open_.reported(who):
                after = replace(self, proposal=replace(open_, at=open_.at | {(who, event.step)}))
            case _:
                return self
        return after._settled()

    def _settled(self) -> Roster:
        now, open_ = self, self.proposal
        if open_ is not None and not self.dead.isdisjoint(open_.members):
            now = replace(now, proposal=None)
        elif open_ is not None and open_.standing and all(open_.reported(q) for q in self.living):
            together = open_.reunion
            stay = frozenset() if together else frozenset(open_.members)
            left = tuple(q for q in self.members if q not in open_.members)
            now = replace(
                now,
                epoch=open_.number,
                members=open_.members,
                start=max(step for _, step in open_.at) + open_.lead + 1,
                group=open_.group,
                proposal=None,
                asking=self.asking.difference(open_.members),
                done=self.done & stay,
                leaving=self.leaving & stay,
                away=frozenset() if together else self.away.union((q, self.group) for q in left if q not in self.dead),
                together=together,
                renewing=False,
                joined=self.newcomers(),
                left=left,
            )
        return now._proposing()

    def _proposing(self) -> Roster:
        if self.proposal is not None or not self.living:
            return self
        over = self.over
        wanted = self.known if over else {*self.living, *self.asking} - self.leaving
        if wanted == set(self.members) and not self.renewing and not over:
            return self
        connected = {*self.members, *(q for q, group in self.away if group == self.group)}
        number = self.numbers + 1
        own = self.renewing or len(self.living) < len(self.members) or not connected.issuperset(wanted)
        members = tuple(sorted(wanted, key=lambda q: (self.ranks[q], q)))
        proposal = Proposal(number, members, number if own else self.group, 0 if over else self.lead, over)
        return replace(self, proposal=proposal, numbers=number)


@dataclass(frozen=True)
class Part:
    """One worker's part in it: what it has read of the log, what it has promised, and what it has to say.

    ``epoch``: which it is in; -1 for a newcomer, and for one that has left. ``step``: the last that it began. ``exit_step``: before this
    one it leaves.
    """

    me: int
    roster: Roster
    epoch: int = 0
    step: int = 0
    promised: tuple[int, int] | None = None  # (number of the proposal, the last step that may begin until it is settled)
    exit_step: int | None = None  # kept here: when it comes to that step, the others may have agreed on further epochs

    def heard(self, event: Event) -> Part:
        return self.knowing(self.roster.apply(event))

    def knowing(self, after: Roster) -> Part:
        """After one more event."""
        before, exit_step = self.roster, self.exit_step
        if after.epoch != before.epoch and self.me in before.members and self.me not in after.members:
            exit_step = after.start
        return Part(self.me, after, self.epoch, self.step, self.promised, exit_step)

    @property
    def evicted(self) -> bool:
        return self.me in self.roster.dead

    def duty(self, built: int) -> Event | None:
        """What to put into the log now, if anything; the group of proposal ``built`` stands here."""
        proposal = self.roster.proposal
        if proposal is None or self.evicted:
            return None
        if proposal.number == built and self.me in proposal.members and self.me not in proposal.built:
            return Event("built", self.me, built)
        # Only a worker that has changed to the last epoch speaks about the next, so at most one change is ahead of any worker.
        if self.epoch == self.roster.epoch and proposal.standing and not proposal.reported(self.me):
            return Event("at", self.me, proposal.number, self.step)
        return None

    def promise(self, event: Event) -> Part:
        """Before ``at`` goes into the log."""
        assert self.roster.proposal is not None
        return replace(self, step=event.step, promised=(event.epoch, event.step + self.roster.proposal.lead))

    def held(self, step: int) -> bool:
        """Whether the step must not begin before the proposal is settled."""
        proposal = self.roster.proposal
        settled = self.promised is None or proposal is None or proposal.number != self.promised[0]
        return not settled and self.promised is not None and step > self.promised[1]

    def due(self, step: int) -> bool:
        """Whether the change to the roster's epoch, or without me, comes before this step."""
        if self.exit_step is not None:
            return step >= self.exit_step
        return self.epoch != self.roster.epoch and self.me in self.roster.members and step >= self.roster.start

    def begun(self, step: int) -> Part:
        if not self.due(step):
            return Part(self.me, self.roster, self.epoch, step, self.promised, self.exit_step)
        return Part(self.me, self.roster, self.roster.epoch if self.exit_step is None else -1, step, self.promised)

    @property
    def still(self) -> bool:
        """The members can agree on the next epoch though this one begins no step. Not if they build a group for it: the donor of a newcomer
        copies its state between two steps."""
        proposal = self.roster.proposal
        return self.epoch == self.roster.epoch and (proposal is None or not proposal.builds)

    @property
    def quiet(self) -> bool:
        """Nothing is under way: any step may begin, and nothing changes with it."""
        return self.roster.proposal is None and self.epoch == self.roster.epoch and not self.evicted


@dataclass(frozen=True)
class Change:
    """Before ``step`` begins, ``members`` (ranks) take over from those before. ``lost``: who is gone, and why. ``joined``: who has
    come (back), and whose state it takes over."""

    step: int
    members: tuple[int, ...]
    lost: dict[int, str]
    joined: dict[int, int]
    rejoined: bool = False  # it is me who has come

    def describe(self) -> str:
        parts = [f"without {rank} ({why})" for rank, why in self.lost.items()]
        parts += [f"with {rank}, which took over from {donor}" for rank, donor in self.joined.items()]
        return f"step {self.step}: workers {', '.join(map(str, self.members))} go on" + "".join(f", {p}" for p in parts)


@functools.lru_cache(maxsize=4096)
def written(event: Event) -> str:
    """As an entry of the log."""
    blank = Event(event.what, event.who)
    return json.dumps({k: v for k, v in event._asdict().items() if k in ("what", "who") or v != getattr(blank, k)})


@functools.lru_cache(maxsize=4096)
def parsed(entry: str) -> Event:
    return Event(**json.loads(entry))
