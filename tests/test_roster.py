"""All interleavings of a few workers, with deaths, evictions, newcomers and orderly leaves at any point.

A state of the search: the log, and for each worker what it has read, its step, its epoch and the group that it has built. A step can
only be finished when all living members of one's epoch have begun it in the same epoch, as in a complete graph, the strictest of all: so
workers that disagreed about the epoch of a step would wait for each other for ever, and the search would find that.

In an uneven world each worker is done at the last step, and some before. They leave, or all are done; in the end all who live must be
together, at the same step.
"""

from dataclasses import replace
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gossamer.members.roster import Event, Part, Roster, parsed, written
from gossamer.schedules import rebuilt, schedule


class Worker(NamedTuple):
    part: Part
    read: int = 0  # entries of the log
    built: int = -1  # the proposal whose group stands here
    runs: bool = True  # not killed
    done: bool = False  # it has no more data
    stands: bool = False  # it has come to ``part.step``, and not begun it
    back: bool = False  # all were done, and are together


class World(NamedTuple):
    log: tuple[Event, ...]
    workers: tuple[Worker, ...]
    deaths: int  # still to come
    evictions: int
    joins: int
    leaver: int | None  # may be done before the last step; None: no worker is ever done
    first: Roster
    last: int  # step


def start(n, deaths=0, evictions=0, joins=0, last=4, leaver=None, lead=1):
    roster = Roster(dict(enumerate(range(n))), tuple(range(n)), lead=lead)
    roster = _rosters.setdefault(described(roster), roster)
    return World((), tuple(Worker(Part(q, roster)) for q in range(n)), deaths, evictions, joins, leaver, roster, last)


def with_worker(world, q, **changes):
    workers = list(world.workers)
    workers[q] = workers[q]._replace(**changes)
    return world._replace(workers=tuple(workers))


_rosters = {}  # of those that say the same, one
_folded = {}  # (roster, event) -> roster: the same fold happens in many states


def heard(part, event):
    """``part.heard(event)``, remembered."""
    found = _folded.get((id(part.roster), event))
    if found is None:
        made = part.roster.apply(event)
        found = _folded[id(part.roster), event] = _rosters.setdefault(described(made), made)
    return part.knowing(found)


def described(roster):
    lasting = (
        roster.members,
        roster.epoch,
        roster.start,
        roster.group,
        roster.dead,
        roster.asking,
        roster.numbers,
        roster.lead,
    )
    return lasting, roster.proposal, roster.done, roster.leaving, roster.away, roster.together


def caught_up(world, q):
    worker = world.workers[q]
    part = worker.part
    for event in world.log[worker.read :]:
        part = heard(part, event)
    return with_worker(world, q, part=part, read=len(world.log))


def settled(world):
    """Everyone reads on as long as that makes no difference to what it may do: so fewer states have to be told apart."""
    for q, worker in enumerate(world.workers):
        part, read = worker.part, worker.read
        if not worker.runs:
            continue
        while read < len(world.log):
            after = heard(part, world.log[read])
            if bearing(after, worker.built) != bearing(part, worker.built):
                break
            part, read = after, read + 1
        if read != worker.read:
            world = with_worker(world, q, part=part, read=read)
    return world


def bearing(part, built):
    """All that matters for what it does next."""
    assert not (part.quiet and part.held(part.step + 1)), "a step that must not begin would begin unasked"
    proposal = part.roster.proposal
    number = proposal.number if proposal else None
    return (
        part.duty(built),
        part.held(part.step + 1),
        part.roster.epoch,
        part.roster.start,
        part.roster.dead,
        number,
        part.promised,
        part.exit_step,
        part.still,
        part.me in part.roster.done - part.roster.leaving and not part.roster.over,
    )


def finished(world, q):
    """Whether q's step can end: every living member of its epoch has begun it, in that epoch."""
    me = world.workers[q].part
    for other in me.roster.members if me.epoch == me.roster.epoch else before(world, me.epoch):
        worker = world.workers[other]
        begun = worker.part.step - worker.stands
        if worker.runs and other not in me.roster.dead and (begun < me.step or not met(worker.part, me)):
            return False
    return True


def met(other, me):
    """It was in my epoch when it began my step; later it may have gone on, or left."""
    return other.epoch == me.epoch or ((other.epoch > me.epoch or other.epoch < 0) and other.step > me.step)


def before(world, epoch):
    """The members of an epoch that has been replaced: from the log."""
    roster = world.first
    for event in world.log:
        if roster.epoch == epoch:
            break
        roster = roster.apply(event)
    return roster.members


def successors(world):
    for q, worker in enumerate(world.workers):
        part = worker.part
        if not worker.runs:
            continue
        if world.deaths and q == victim(world):
            yield f"{q} dies", with_worker(world, q, runs=False)._replace(deaths=world.deaths - 1)
        if worker.read < len(world.log):
            yield f"{q} reads", caught_up(world, q)
        elif not part.evicted:
            yield from says(world, q)
        if part.evicted:
            continue
        if worker.done:
            yield from does_without_data(world, q)
        elif part.epoch < 0:
            if q in part.roster.members:
                assert part.roster.group <= worker.built, "a newcomer has no group of its epoch"
                yield f"{q} is in", with_worker(world, q, part=part.begun(part.roster.start), back=part.roster.together)
        elif not worker.back and finished(world, q):
            if part.step < world.last and not part.held(part.step + 1):
                begun = part.begun(part.step + 1)
                assert not part.quiet or begun == replace(part, step=part.step + 1), (
                    "a step that begins unasked changes more than its number"
                )
                assert begun.epoch == part.epoch or part.roster.group <= max(0, worker.built), "no group to change to"
                yield f"{q} begins {begun.step}", with_worker(world, q, part=begun)
            if world.leaver is not None and (q == world.leaver or part.step >= world.last):
                yield f"{q} is done", with_worker(world, q, done=True)
    yield from surroundings(world)


def does_without_data(world, q):
    """Steps without training: until the change that is agreed on; a few also while a group is built."""
    worker = world.workers[q]
    part, roster = worker.part, worker.part.roster
    if part.epoch < 0:
        if q in roster.members:
            assert roster.together, "it is in, and not all are done"
            yield f"{q} is back", comes_back(world, q, part.begun(roster.start))
        return
    step = part.step if worker.stands else part.step + 1
    if part.still or part.held(step) or (part.epoch == roster.epoch and step > world.last):
        return
    if worker.stands or finished(world, q):
        begun = part.begun(step)
        if begun.epoch != part.epoch and begun.epoch >= 0 and roster.together:
            yield f"{q} is back", comes_back(world, q, begun)
        else:
            yield f"{q} exchanges {step}", with_worker(world, q, part=begun, stands=begun.epoch != part.epoch)


def comes_back(world, q, part):
    dead = {event.who for event in world.log if event.what == "dead"}
    others = [w for k, w in enumerate(world.workers) if w.runs and not w.back and k not in dead]
    assert all(w.part.step - w.stands < part.roster.start for w in others), "that step was begun before"
    assert part.roster.group <= max(0, world.workers[q].built), "no group to come together"
    return with_worker(world, q, part=part, done=False, stands=False, back=True)


def victim(world):
    """The one who dies or is evicted next. All are alike, so it may be the last one, and then the one before; or the newcomer."""
    hit = {event.who for event in world.log if event.what == "dead"} | {q for q, w in enumerate(world.workers) if not w.runs}
    return max(q for q in range(len(world.workers)) if q not in hit) if len(hit) + 1 < len(world.workers) else None


def says(world, q):
    """What q, which has read all, puts into the log. That its group stands is said at once: until then nobody knows."""
    worker = world.workers[q]
    proposal = worker.part.roster.proposal
    built = worker.built
    if proposal is not None and proposal.builds and q in proposal.members:
        # A group can be built when all its members are at it.
        seen = [world.workers[m].part.roster.proposal for m in proposal.members if world.workers[m].runs]
        if len(seen) == len(proposal.members) and all(p is not None and p.number >= proposal.number for p in seen):
            built = proposal.number
    roster = worker.part.roster
    if worker.done and not (roster.together and q in roster.members):
        if q in roster.members and q not in roster.done:
            yield f"{q} says done", world._replace(log=(*world.log, Event("done", q)))
        elif q in roster.done - roster.leaving and not roster.over:
            yield f"{q} says leave", world._replace(log=(*world.log, Event("leave", q)))
    event = worker.part.duty(built)
    if event is not None:
        part = worker.part.promise(event) if event.what == "at" else worker.part
        yield f"{q} says {event.what}", with_worker(world, q, part=part, built=built)._replace(log=(*world.log, event))


def surroundings(world):
    """Somebody notices a death, is wrong about it, or joins."""
    dead = {event.who for event in world.log if event.what == "dead"}
    for q, worker in enumerate(world.workers):
        if q not in dead and (not worker.runs or (world.evictions and q == victim(world))):
            said = world._replace(log=(*world.log, Event("dead", q)), evictions=world.evictions - worker.runs)
            yield f"{q} is evicted" if worker.runs else f"{q} is said to be dead", said
    if world.joins:
        ticket = len(world.workers)
        newcomer = Worker(Part(ticket, world.first, epoch=-1, step=-1))
        log = (*world.log, Event("join", ticket, rank=ticket))
        yield "somebody joins", world._replace(log=log, workers=(*world.workers, newcomer), joins=0)


def key(world):
    """Entries that all have read are known by what they made of the roster."""
    oldest = min((w.read for w in world.workers if w.runs), default=len(world.log))
    return (world.log[oldest:], tuple(_told(w, oldest) for w in world.workers), world[2:5])


def _told(worker, oldest):
    part = worker.part
    if not worker.runs:
        return part.step
    known = id(part.roster), part.epoch, part.step, part.promised, part.exit_step, worker.read - oldest, worker.built
    return known, worker.done, worker.stands, worker.back


def explore(world):
    """Every reachable state: the epochs of a step agree, and nobody is stuck. Returns how many there were, and who was in at the ends."""
    seen, stack, ends = {key(world)}, [world], set()
    while stack:
        world = stack.pop()
        check_epochs(world)
        following = list(successors(world))
        moves = [name for name, _ in following if "dies" not in name and "evicted" not in name and "joins" not in name]
        if not moves:
            ends.add(check_end(world))
        for _, after in following:
            after = settled(after)
            k = key(after)
            if len(seen) > 3_000_000:
                raise SystemExit("too many")
            if k not in seen:
                seen.add(k)
                stack.append(after)
    return len(seen), ends


def check_epochs(world):
    """Two who are in the same step, and not evicted, are in the same epoch."""
    by_step = {}
    dead = set().union(*(w.part.roster.dead for w in world.workers), {e.who for e in world.log if e.what == "dead"})
    for q, worker in enumerate(world.workers):
        if worker.runs and q not in dead and worker.part.epoch >= 0 and not worker.stands:
            by_step.setdefault(worker.part.step, set()).add(worker.part.epoch)
    assert all(len(epochs) == 1 for epochs in by_step.values()), (world, by_step)


def check_end(world):
    living = [(q, w.part) for q, w in enumerate(world.workers) if w.runs and not w.part.evicted]
    together = [part for q, part in living if world.workers[q].back]
    for q, part in living:
        if world.leaver is not None:
            late = q >= len(world.first.members)  # a newcomer may come when all are together, or nobody is left
            assert world.workers[q].back or late or not part.roster.living, f"{q} is not back: {world}"
            continue
        # A newcomer may come when the others are at the end, and soon leave: then no worker is left to join.
        over = all(m in part.roster.dead or world.workers[m].part.step >= world.last for m in part.roster.members)
        done = part.step >= world.last or (part.epoch < 0 and over)
        assert done, f"{q} is stuck in step {part.step}: {world}"
    assert len({(part.epoch, part.step) for part in together}) <= 1, world
    return tuple(q for q, _ in living)


@pytest.mark.parametrize(
    ("n", "deaths", "evictions", "joins", "last"),
    [(4, 1, 0, 0, 2), (3, 2, 0, 0, 4), (3, 0, 1, 0, 4), (2, 0, 0, 1, 4), (2, 1, 0, 1, 3)],
)
def test_no_interleaving_deadlocks_or_mixes_epochs(n, deaths, evictions, joins, last, no_gc):
    states, ends = explore(start(n, deaths, evictions, joins, last))
    print(n, deaths, evictions, joins, last, states, len(ends))
    assert (not deaths and not evictions) or any(len(end) < n for end in ends)


@pytest.mark.parametrize(
    ("n", "deaths", "evictions", "joins", "last", "leaver"),
    [
        (3, 0, 0, 0, 1, 0),
        (3, 1, 0, 0, 0, 2),
        (2, 1, 0, 0, 3, 0),
        (2, 0, 1, 0, 2, 0),
        (2, 0, 1, 0, 2, 1),
        (2, 0, 0, 1, 0, 0),
        (1, 0, 0, 1, 3, 0),
    ],
)
def test_workers_that_leave_are_together_again_in_every_interleaving(n, deaths, evictions, joins, last, leaver, no_gc):
    states, ends = explore(start(n, deaths, evictions, joins, last, leaver))
    print(n, deaths, evictions, joins, last, leaver, states, len(ends))
    assert tuple(range(n)) in ends or deaths or evictions or joins


def folded(roster, *events):
    for event in events:
        roster = roster.apply(event)
    return roster


def agreed(roster, step=10):
    """All do what the open proposal asks for."""
    number = roster.proposal.number
    roster = folded(roster, *(Event("built", q, number) for q in roster.proposal.members))
    return folded(roster, *(Event("at", q, number, step + q) for q in roster.living))


FIVE = Roster({q: q for q in range(5)}, tuple(range(5)))


def test_a_death_and_a_return():
    without = agreed(FIVE.apply(Event("dead", 2, why="was killed")))
    assert (without.members, without.epoch, without.start, without.left) == ((0, 1, 3, 4), 1, 10 + 4 + 8 + 1, (2,))
    asked = without.apply(Event("join", 7, rank=2))
    assert asked.proposal.members == (0, 1, 7, 3, 4)  # in the order of ranks
    assert asked.newcomers() == (7,)
    assert asked.donor(7) == 3
    with_it = agreed(asked, 40)
    assert (with_it.members, with_it.joined, with_it.start) == ((0, 1, 7, 3, 4), (7,), 53)


def test_a_death_during_a_change_makes_it_void_for_all_at_the_same_place():
    first = FIVE.apply(Event("dead", 2)).apply(Event("built", 0, 1)).apply(Event("dead", 4))
    assert first.proposal.number == 2
    assert first.proposal.members == (0, 1, 3)
    assert first.apply(Event("built", 1, 1)) == first  # too late


def test_broken_connections_between_the_living_are_made_anew():
    lost = FIVE.apply(Event("lost", 1, 0, peer=3))
    assert lost.proposal is None
    assert lost.lost_pairs(0) == {(1, 3)}
    anew = lost.apply(Event("renew", 1, 0))
    assert anew.proposal.members == FIVE.members
    failed = anew.apply(Event("failed", 3, 1))
    assert failed.proposal.number == 2
    again = agreed(failed)
    assert again.members == FIVE.members
    assert not again.lost_pairs(again.epoch)
    assert again.lost_pairs(0) == {(1, 3)}  # some may still be in the old epoch
    assert again.proposal is None


def test_without_anybody_who_knows_something_nobody_can_join():
    gone = folded(FIVE, *(Event("dead", q) for q in range(5)), Event("join", 9, rank=0))
    assert gone.living == ()
    assert gone.members != ()
    assert gone.proposal is None or 9 not in gone.proposal.members


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["join", "dead", "done", "leave", "lost", "renew", "failed", "built", "at"]),
            st.integers(0, 8),
            st.integers(0, 6),
            st.integers(0, 20),
        ),
        max_size=60,
    )
)
@example([("dead", 5, 0, 0), ("join", 5, 0, 0)])
def test_whatever_comes_the_dead_are_not_in_a_proposal_and_steps_only_grow(entries):
    roster = FIVE
    for what, who, epoch, step in entries:
        event = Event(what, who, epoch, step, rank=who % 5, peer=(who + 1) % 5)
        assert parsed(written(event)) == event
        after = roster.apply(event)
        assert after.epoch >= roster.epoch
        assert after.numbers >= roster.numbers
        assert after.dead >= roster.dead
        if after.proposal is not None:
            assert not after.dead.intersection(after.proposal.members)
            assert set(after.proposal.members) >= set(after.living) - after.leaving
            assert after.proposal.number > after.epoch
            assert any(q in after.members for q in after.proposal.members)  # somebody has the state
        assert len(set(after.members)) == len(after.members)
        roster = after


@pytest.mark.parametrize(
    "name", ["one-peer-exponential", "complete", "ring", "base:k=2", "exponential", "torus", "hypercube", "ada"]
)
def test_every_epochs_graph_keeps_the_mean_of_its_members(name):
    planned = schedule(name, 8)
    for n in range(1, 9):
        graph = rebuilt(planned, n)[0].graph(0, 0, 4)
        for t in range(graph.period):
            w = graph.round(t).matrix()
            assert w.shape == (n, n)
            assert np.allclose(w.sum(axis=0), 1)
            assert np.allclose(w.sum(axis=1), 1)
