"""Survival in simulated time: a hundred thousand schedules of kills, pauses and broken connections, none of which shows a worker anything
that must not be. And the faults that were there once: each, brought back by one line, is found."""

import inspect
import types

import pytest

from gossamer import collectives, member
from tests import simulator

SCHEDULES, PARTS = 100_000, 10


@pytest.mark.parametrize("part", range(PARTS))
def test_no_schedule_violates_what_survival_promises(part):
    each = SCHEDULES // PARTS
    assert simulator.search(range(part * each, (part + 1) * each)) == {}


MUTANTS = {
    "D1: the list of a decision is not looked at": (
        (collectives, "Collectives", "complete"),
        "if member.ticket not in self._voters:",
        "if not self._voters:",
    ),
    "D2: connections that broke are not taken over from a later epoch": (
        (collectives, "Collectives", "_decision"),
        "newer = roster.epoch > self._group and",
        "newer = False and",
    ),
    "D3: a peer that has lost me is waited for": (
        (member, "Member", "count_losses"),
        "{q for pair in pairs if me in pair for q in pair}",
        "{q for e, q in self.lost if e == epoch}",
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
