"""Collectives under survival: all members that live have the result, or do it again without the dead. Pure: see ``effects.py``.

A worker may die when some have the result and others have not. So each votes whether it has the result. The first worker that has
heard all votes claims the decision in the store: *done*, with the members that live; or *again*, over the living, on the newest group
that all of them have built. That group may be of an epoch that begins with a later step: so a collective takes over from a connection
that broke, though no step can begin meanwhile.

A worker that is not among the living of a decision has no result: it raises :class:`Evicted`.
Collectives are rare (evaluation, logging, the end of training), so a few looks at the store cost nothing.

A mean of gradients comes in each step. There the workers tell each other directly whether the mean came: a worker that hears it of all has
*passed*, and asks no store. A worker that does not hear it of all votes. It may wait for the vote of a worker that has passed: then that
worker votes on a later collective, is in a later step, or has finished. Each of these says that all workers have the mean.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from gossamer.errors import Evicted, GossamerError
from gossamer.members.effects import Came, Claim, Drop, Fly, Look, Pause, Put, Rules
from gossamer.members.roster import DIVERGED, FINISHED

if TYPE_CHECKING:
    from gossamer.members.member import Member

_SHORTEST, _LONGEST = 0.0005, 0.02  # seconds between two looks for votes


class Collectives:
    """Of one worker. ``voters``: the members that take part in the next one, as all of them agreed in the last one."""

    def __init__(self, member: Member, prefix: str) -> None:
        self._member, self._prefix = member, prefix
        self._epoch = -1  # whose steps are done now; calls are counted from its begin on, alike on all of its members
        self._calls = 0
        self._group = -1  # whose connections are used
        self._voters: tuple[int, ...] = ()
        self._old: list[tuple[str, str]] = []
        self._differ = math.inf  # since when the votes are known to be of different collectives

    @property
    def voters(self) -> tuple[int, ...]:
        self._begin_epoch()
        return self._voters

    def _begin_epoch(self) -> None:
        epoch = self._member.part.epoch
        if self._epoch != epoch:
            self._epoch, self._calls = epoch, 0
            self._group, self._voters = self._member.epochs.get(epoch, (-1, (self._member.ticket,)))

    def complete(self, what: str, timeout: float, acknowledged: bool = False) -> Rules[tuple[int, ...]]:
        """Returns the tickets of the members that live and have the result. ``acknowledged``: a mean of gradients."""
        member = self._member
        self._begin_epoch()
        self._calls += 1
        deadline, attempt = member.clock() + timeout, 0
        while True:
            attempt += 1
            self._refuse_evicted(what)
            places = member.members[self._group]
            came: Came = yield Fly(self._group, tuple(places.index(q) for q in self._voters), acknowledged)
            if came == Came.EVERYWHERE:
                return self._voters
            name = f"{self._prefix}/{self._epoch}/{self._calls}/{attempt}"
            decision = yield from self._decide(name, what, bool(came), deadline, acknowledged)
            if "error" in decision:
                raise GossamerError(f"rank {member.rank}: {decision['error']}")
            self._voters = tuple(decision.get("voters", decision["living"]))
            if member.ticket not in decision["living"]:
                raise self._evicted(what)
            if decision["done"]:
                return self._voters
            self._group = decision["group"]

    def _decide(self, name: str, what: str, whole: bool, deadline: float, acknowledged: bool) -> Rules[Mapping[str, Any]]:
        member = self._member
        if self._voters == (member.ticket,):
            self._refuse_evicted(what)  # it may have joined others meanwhile that went on without it
            return {"done": whole, "living": self._voters, "group": self._group}
        mine, decided = f"{name}/{member.ticket}", f"{name}/decision"
        pause, self._differ = _SHORTEST, math.inf
        yield Put(mine, f"{int(whole)} {what}")
        yield from self._forget(mine, decided)
        while (text := (yield Look(decided))) is None:
            self._refuse_evicted(what)
            votes = {}
            for q in self._voters:
                votes[q] = yield Look(f"{name}/{q}")
            decision = self._decision(votes, acknowledged)
            # A worker passes only if this one has said that it has the result.
            silent = [q for q, vote in votes.items() if vote is None] if acknowledged and whole else []
            if silent and (yield from self._passed(silent)):
                dead = member.part.roster.dead
                decision = {"done": True, "living": [q for q in self._voters if q not in dead], "voters": self._voters}
            if decision is not None:
                text = yield Claim(decided, json.dumps(decision))
                break
            if member.clock() > deadline:
                raise GossamerError(self._failure(what, votes))
            yield Pause(pause)
            pause = min(2 * pause, _LONGEST)
        result: Mapping[str, Any] = json.loads(text)
        return result

    def _passed(self, silent: list[int]) -> Rules[bool]:
        """Whether one of these, which have not voted, went on because all workers have the result."""
        member = self._member
        for q in silent:
            if member.part.roster.why.get(q) == FINISHED:
                return True
            if (yield Look(f"{self._prefix}/{self._epoch}/{self._calls + 1}/1/{q}")) is not None:
                return True
            beat = (yield Look(member.beat_key(q))) or ""
            if beat and int(beat.split()[1]) > member.step:
                return True
        return False

    def _decision(self, votes: Mapping[int, str | None], acknowledged: bool = False) -> dict[str, Any] | None:
        """None: something has to happen first. A vote is missing, or the connections that broke are not made anew yet. An evicted worker
        has no say."""
        roster = self._member.part.roster
        if self._member.evicted or any(vote is None and q not in roster.dead for q, vote in votes.items()):
            return None
        said = {q: vote.split(" ", 1) for q, vote in votes.items() if vote is not None}
        living = [q for q in self._voters if q not in roster.dead]
        if len({said[q][1] for q in living}) > 1:
            # One of them may have been evicted, and not know it when it voted: the log says so by now, and is read first.
            self._differ = min(self._differ, self._member.clock())
            if self._member.confirmed <= self._differ:
                return None
            shown = ", ".join(f"rank {roster.ranks[q]} is in {said[q][1]}" for q in living)
            return {
                "error": f"{shown}: collectives must be called by all workers, in the same order, and no worker skips a step()"
            }
        # A mean of gradients may count workers that died since. A worker that passed knows nothing of that yet. So all go on as it does,
        # with the same voters.
        if acknowledged and all(said[q][0] == "1" for q in living):
            return {"done": True, "living": living, "voters": self._voters}
        if all(q in said and said[q][0] == "1" for q in self._voters):
            return {"done": True, "living": living}
        newer = roster.group > self._group and set(roster.members).issuperset(living)
        if len(living) == len(self._voters) and not newer:
            return None
        return {"done": False, "living": living, "group": roster.group if newer else self._group}

    def _refuse_evicted(self, what: str) -> None:
        if self._member.evicted:
            raise self._evicted(what)
        if self._member.orphaned:
            raise GossamerError(f"rank {self._member.rank} can't take part in {what}: the job has ended without it")

    def _evicted(self, what: str) -> Evicted:
        why = self._member.part.roster.why.get(self._member.ticket, "")
        why = why if why.startswith(DIVERGED) else "was away for too long, and the others went on without it"
        return Evicted(
            f"rank {self._member.rank} {why}: it has no result of {what}. With its next training step it joins them again"
        )

    def _failure(self, what: str, votes: Mapping[int, str | None]) -> str:
        ranks = self._member.part.roster.ranks
        late = ", ".join(str(ranks[q]) for q, vote in votes.items() if vote is None)
        why = f"rank {late} did not come" if late else "connections between the workers broke, and could not be made anew"
        return f"rank {self._member.rank} in {what}: {why} in time"

    def _forget(self, vote: str, decision: str) -> Rules[None]:
        """A worker that votes has read the last decision, which all voted on after they had read the one before: no worker needs that."""
        self._old = [*self._old[-2:], (vote, decision)]
        if len(self._old) == 3:
            for key in self._old[0]:
                yield Drop(key)
