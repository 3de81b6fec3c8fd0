"""Collectives under survival: all who live have the result, or all do it again without those who are gone. Pure: see ``effects.py``.

Somebody may die when some have got the result and others have not. So all say whether they have it, and the first who has heard everybody
writes down what follows. They are rare (evaluation, the end of training), so a few looks at the store cost nothing; a step has none.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from gossamer.effects import Claim, Drop, Fly, Look, Pause, Put, Rules
from gossamer.errors import GossamerError

if TYPE_CHECKING:
    from gossamer.member import Member

_BROKEN = 30.0  # seconds for which a collective is tried again though nobody has died
_AGAIN = 0.02  # seconds between two tries


class Ballots:
    def __init__(self, member: Member, prefix: str) -> None:
        self._member, self._prefix = member, prefix
        self._old: list[tuple[str, str]] = []

    def complete(
        self, epoch: int, everyone: tuple[int, ...], number: Callable[[], int], what: str, timeout: float
    ) -> Rules[bool]:
        """All who live have it in the end, or none. ``number()``: of the try that was just made. False if nobody can say any more who
        lives."""
        member, living = self._member, everyone
        deadline = member.clock() + min(_BROKEN, timeout)
        while not member.blind:
            lost: frozenset[int] = yield Fly(epoch, living)
            whole = not lost.intersection(living)
            again = yield from self.commit(epoch, str(number()), whole, living, timeout)
            if again is None:
                return True
            if member.blind:
                break
            names = member.names(epoch)
            if member.place(epoch) not in again:
                me = names[member.place(epoch)]
                raise GossamerError(f"rank {me} was away for too long in {what}, and the others went on without it")
            if again != living:
                deadline = member.clock() + min(_BROKEN, timeout)
            elif member.clock() > deadline:
                shown = ", ".join(str(names[q]) for q in sorted(lost))
                to = f" to rank {shown}" if shown else ""
                me = names[member.place(epoch)]
                raise GossamerError(f"rank {me} in {what}: nobody has died, and yet there is no connection{to}")
            else:
                yield Pause(_AGAIN)  # until the members who are left have agreed on it
            living = again
        return False

    def commit(
        self, epoch: int, name: str, whole: bool, places: tuple[int, ...], timeout: float
    ) -> Rules[tuple[int, ...] | None]:
        members = self._member.members[epoch]
        return (yield from self._decide(f"{epoch}/{name}", whole, {q: members[q] for q in places}, timeout))

    def _decide(self, name: str, whole: bool, places: Mapping[int, int], timeout: float) -> Rules[tuple[int, ...] | None]:
        """``places``: of those who take part, place -> ticket. None if all have it, otherwise the places that do it again."""
        member, at = self._member, f"{self._prefix}/{name}"
        mine, decision = f"{at}/{member.ticket}", f"{at}/decision"
        deadline, pause = member.clock() + timeout, 0.0005
        yield Put(mine, str(int(whole)))
        yield from self._forget(mine, decision)
        while (decided := (yield Look(decision))) is None:
            votes = {}
            for q in places.values():
                votes[q] = yield Look(f"{at}/{q}")
            dead = member.part.roster.dead
            late = [q for q, vote in votes.items() if not vote and q not in dead]
            if not late:
                again = [] if set(votes.values()) == {"1"} else [place for place, q in places.items() if q not in dead]
                yield Claim(decision, json.dumps(again))
            elif member.evicted or member.clock() > deadline:
                ranks = ", ".join(str(member.part.roster.ranks[q]) for q in late)
                what = "it was evicted" if member.evicted else f"rank {ranks} did not come within {timeout:g} s"
                raise GossamerError(f"rank {member.rank} in collective {name}: {what}")
            else:
                yield Pause(pause)
                pause = min(2 * pause, 0.02)
        return tuple(json.loads(decided)) or None

    def _forget(self, vote: str, decision: str) -> Rules[None]:
        """Whoever votes has read the last decision, which all voted on after they had read the one before: nobody needs that."""
        self._old = [*self._old[-2:], (vote, decision)]
        if len(self._old) == 3:
            for key in self._old[0]:
                yield Drop(key)
