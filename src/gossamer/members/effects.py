"""What the rules of survival ask of the world: a look at the store, a group, a flight, a pause.

The rules (``member.py``, ``collectives.py``) are generators without threads, sockets or sleep. They *yield* an effect and are resumed
with its result. ``membership.py`` and ``survivors.py`` carry effects out with the real store and the real clock. ``tests/simulator.py``
has a store, links and a clock of its own, so it can run thousands of schedules in a second.
"""

from __future__ import annotations

from collections.abc import Generator
from enum import IntEnum
from typing import Any, NamedTuple, TypeVar

from gossamer.members.roster import Roster


class Look(NamedTuple):
    """The value of a key; None if there is none."""

    key: str


class Put(NamedTuple):
    key: str
    value: str


class Claim(NamedTuple):
    """The first to claim a key gives it its value; or, if there is a value already, the first that knows which one. The result is the
    value that stands."""

    key: str
    value: str
    expected: str = ""


class Add(NamedTuple):
    """To a counter. The result is its value."""

    key: str
    amount: int


class Drop(NamedTuple):
    key: str


class Pause(NamedTuple):
    seconds: float


class Build(NamedTuple):
    """Build the group of the roster's proposal, in the background."""

    roster: Roster


class Came(IntEnum):
    """What a worker knows after one try of a collective: not all of it came; all of it came here; all of it came everywhere."""

    NOT = 0
    HERE = 1
    EVERYWHERE = 2


class Fly(NamedTuple):
    """Do a collective once, with these places of the group's link. The result is what came. ``acknowledged``: workers also tell each other
    whether it came."""

    epoch: int
    places: tuple[int, ...]
    acknowledged: bool = False


Effect = Look | Put | Claim | Add | Drop | Pause | Build | Fly
Result = TypeVar("Result")
Rules = Generator[Effect, Any, Result]


def in_store(store: Any, effect: Look | Put | Claim | Add | Drop) -> Any:
    """Carry out what concerns the store."""
    match effect:
        case Look(key):
            return store.get(key).decode() if store.check([key]) else None
        case Put(key, value):
            store.set(key, value)
        case Claim(key, value, expected):
            return store.compare_set(key, expected, value).decode()
        case Add(key, amount):
            return store.add(key, amount)
        case Drop(key):
            store.delete_key(key)
    return None
