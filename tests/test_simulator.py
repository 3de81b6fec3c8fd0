"""Survival in simulated time: a hundred thousand schedules of kills, pauses, broken connections and orderly leaves, none of which shows a
worker anything that must not be. And the faults that were there once: each, brought back by one line, is found."""

import contextlib
import inspect
import types

import pytest

from gossamer.errors import Evicted
from gossamer.members import collectives, member, roster
from gossamer.members.collectives import Collectives
from gossamer.members.effects import Add, Build, Claim, Fly, Look
from gossamer.members.member import Member
from gossamer.members.roster import Event, written
from gossamer.members.store import ENDED, ENDS, TICKETS
from tests import simulator

SCHEDULES, PARTS = 100_000, 10


@pytest.mark.parametrize("part", range(PARTS))
def test_no_schedule_violates_what_survival_promises(part):
    each = SCHEDULES // PARTS
    assert simulator.search(range(part * each, (part + 1) * each)) == {}


MUTANTS = {
    "D1: the list of a decision is not looked at": (
        (collectives, "Collectives", "complete"),
        'if member.ticket not in decision["living"]:',
        'if not decision["living"]:',
    ),
    "D2: connections that broke are not taken over from a later epoch": (
        (collectives, "Collectives", "_decision"),
        "newer = roster.group > self._group and",
        "newer = False and",
    ),
    "D3: a peer that has lost me is waited for": (
        (member, "Member", "count_losses"),
        "roster.dead.union(*(pair for pair in pairs if me in pair))",
        "roster.dead.union(q for g, q in self.lost if g == group)",
    ),
    "a worker that leaves goes by the step of a later epoch": (
        (roster, "Part", "due"),
        "return step >= self.exit_step",
        "return step >= self.roster.start",
    ),
    "a change comes before a step that some have begun": (
        (roster, "Roster", "_settled"),
        "start=max(step for _, step in open_.at) + open_.lead + 1,",
        "start=min(step for _, step in open_.at) + open_.lead + 1,",
    ),
    "workers that are done stand still until the others have agreed": (
        (member, "Member", "stands"),
        "return part.still or (part.epoch == part.roster.epoch and self.clock() < patience)",
        "return part.epoch == part.roster.epoch",
    ),
    "gradients: a mean that came here is taken to have come everywhere": (
        (collectives, "Collectives", "complete"),
        "if came == Came.EVERYWHERE:",
        "if came == Came.EVERYWHERE or (acknowledged and came):",
    ),
    "gradients: a worker that has passed is waited for": (
        (collectives, "Collectives", "_decide"),
        "if acknowledged and whole else []",
        "if False else []",
    ),
    "a collective waits for a connection that brings nothing, though there is a newer one": (
        (member, "Member", "count_losses"),
        "roster.group > group and",
        "False and",
    ),
    "a worker that was silent uses what came": (
        (member, "Member", "uncertain"),
        "return since > self.lease and",
        "return False and",
    ),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_fault_that_is_brought_back_by_one_line_is_found(name, monkeypatch):
    (module, owner, method), line, changed = MUTANTS[name]
    source = inspect.getsource(module)
    assert source.count(line) == 1
    mutant = types.ModuleType(module.__name__)
    exec(compile(source.replace(line, changed), module.__name__, "exec"), mutant.__dict__)
    monkeypatch.setattr(getattr(module, owner), method, getattr(getattr(mutant, owner), method))
    found = simulator.search(range(10_000), most=1)
    print(name, found)
    assert found
    assert "NameError" not in str(found)  # that would be the mutant's own


class Store:
    """For rules that are resumed by hand, one effect at a time."""

    def __init__(self):
        self.values, self.now = {TICKETS: 2}, 0.0

    def member(self, ticket):
        return Member("job", ticket, ticket, (0, 1), False, 3.0, lambda: self.now)

    def does(self, effect):
        match effect:
            case Look(key):
                return self.values.get(key)
            case Claim(key, value, expected):
                if self.values.get(key, "") == expected:
                    self.values[key] = value
                return self.values[key]
            case Add(key, amount):
                self.values[key] = self.values.get(key, 0) + amount
                return self.values[key]
            case Build():
                return None
        raise AssertionError(effect)

    def run(self, rules, until=lambda effect: False):
        """To the end, or to an effect that is not carried out yet; returns it."""
        result = None
        with contextlib.suppress(StopIteration):
            while not until(effect := rules.send(result)):
                result = self.does(effect)
            return effect
        return None

    def about_to_evict(self, watching, silent):
        """The tick in which one evicts the other, which has said nothing for 4.5 s."""
        for one in (silent, watching):
            self.run(one.tick())
        for self.now in (1.0, 2.0, 3.0):
            self.run(watching.tick())
        self.now = 4.5
        return watching.tick()


def test_a_heartbeat_that_comes_before_an_eviction_prevents_it_however_late_the_eviction_is_written():
    store = Store()
    watching, silent = store.member(0), store.member(1)
    late = store.about_to_evict(watching, silent)
    evicts = store.run(late, lambda effect: isinstance(effect, Claim) and effect.key == watching.beat_key(1))
    assert evicts is not None  # it has looked, and is about to write
    store.run(silent.tick())
    assert silent.lease == 7.5
    with contextlib.suppress(StopIteration):
        result = store.does(evicts)
        while True:
            result = store.does(late.send(result))
    assert not watching.part.roster.dead
    store.run(silent.tick())
    assert not silent.evicted


def test_a_worker_whose_heartbeat_comes_after_its_eviction_knows_it_though_nobody_has_said_so_yet():
    store = Store()
    watching, silent = store.member(0), store.member(1)
    late = store.about_to_evict(watching, silent)
    store.does(store.run(late, lambda effect: isinstance(effect, Claim) and effect.key == watching.beat_key(1)))
    late.close()  # it dies before it can write into the log
    store.run(silent.tick())
    assert silent.evicted
    assert silent.part.roster.why[1] == "no heartbeat for 3 s"


def test_a_newcomer_that_ends_before_its_wish_to_join_was_read_is_dead_all_the_same():
    store = Store()
    member = store.member(0)
    rules = member.tick()
    look = store.run(rules, lambda effect: isinstance(effect, Add))  # the log was read, and it is about to look for ends
    store.values |= {"job/log/0": written(Event("join", 2, rank=2)), f"{ENDED}/2": "was killed", ENDS: 1}
    result = store.does(look)
    with contextlib.suppress(StopIteration):
        while True:
            result = store.does(rules.send(result))
    store.run(member.tick())
    assert member.part.roster.dead == {2}


def test_the_only_voter_has_no_result_if_it_was_evicted_meanwhile():
    store = Store()
    member = store.member(0)
    calls = Collectives(member, "job/votes")
    assert calls.voters == (0, 1)
    calls._voters = (0,)  # the other one is dead, and another has joined
    rules = calls.complete("average_()", 60.0)
    assert isinstance(next(rules), Fly)
    member.part = member.part.heard(Event("dead", 0, why="no heartbeat for 3 s"))
    with pytest.raises(Evicted, match="rank 0 was away for too long"):
        rules.send(True)
