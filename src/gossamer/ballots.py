"""Collectives under survival: all who live have the result, or all do it again without those who are gone.

Somebody may die when some have got the result and others have not. So all say whether they have it, and the first who has heard everybody
writes down what follows. They are rare (evaluation, the end of training), so a few looks at the store cost nothing; a step has none.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from gossamer.errors import GossamerError

if TYPE_CHECKING:
    from gossamer.membership import Membership


class Ballots:
    def __init__(self, store: Any, prefix: str) -> None:
        self._store, self._prefix = store, prefix
        self._old: list[tuple[str, str]] = []

    def decide(
        self, name: str, whole: bool, places: Mapping[int, int], timeout: float, membership: Membership
    ) -> tuple[int, ...] | None:
        """``places``: of those who take part, place -> ticket. None if all have it, otherwise the places that do it again."""
        at = f"{self._prefix}/{name}"
        mine, decision = f"{at}/{membership.ticket}", f"{at}/decision"
        deadline, pause = time.monotonic() + timeout, 0.0005
        self._store.set(mine, str(int(whole)))
        self._forget(mine, decision)
        while not self._store.check([decision]):
            votes = {q: self._vote(f"{at}/{q}") for q in places.values()}
            dead = membership.roster.dead
            late = [q for q, vote in votes.items() if not vote and q not in dead]
            if not late:
                again = [] if set(votes.values()) == {"1"} else [place for place, q in places.items() if q not in dead]
                self._store.compare_set(decision, "", json.dumps(again))
            elif membership.evicted or time.monotonic() > deadline:
                ranks = ", ".join(str(membership.roster.ranks[q]) for q in late)
                what = "it was evicted" if membership.evicted else f"rank {ranks} did not come within {timeout:g} s"
                raise GossamerError(f"rank {membership.seat.rank} in collective {name}: {what}")
            else:
                time.sleep(pause)
                pause = min(2 * pause, 0.02)
        return tuple(json.loads(self._store.get(decision))) or None

    def _vote(self, key: str) -> str:
        return self._store.get(key).decode() if self._store.check([key]) else ""

    def _forget(self, vote: str, decision: str) -> None:
        """Whoever votes has read the last decision, which all voted on after they had read the one before: nobody needs that."""
        self._old = [*self._old[-2:], (vote, decision)]
        if len(self._old) == 3:
            for key in self._old[0]:
                self._store.delete_key(key)
