"""Jobs that are killed, paused and cut apart, in simulated time: the rules of survival over a store, links and a clock made here.

One seed is one schedule: how many workers, which graph, which faults at which moments, and the order of everything that could happen in
another order. The rules are those that the real threads run (``member.py``, ``collectives.py``, ``waiting.py``, ``roster.py``); what is made up
is the world around them. A :class:`Violation` says what a worker saw that must not be:

- a collective's result is the mean of exactly its voters, the same for all of them, or an error;
- an evicted worker returns no value;
- two members that live, and have lost each other, do not train on apart;
- two members that live are in the same epoch when they begin the same step;
- in an uneven world, in which each worker has another number of steps, those that left are together with the others in the end, at a step
  that none of them had begun;
- every wait ends; and of the workers that finish, exactly one leads.

python -m tests.simulator [SCHEDULES] [FIRST SEED]
"""

from __future__ import annotations

import gc
import heapq
import json
import random
import sys
import time
from collections.abc import Generator
from typing import Any

from gossamer.errors import Evicted, GossamerError
from gossamer.members.collectives import Collectives
from gossamer.members.effects import Add, Build, Came, Claim, Drop, Fly, Look, Pause, Put
from gossamer.members.member import Member
from gossamer.members.roster import Event, Roster, parsed
from gossamer.members.store import ENDED, ENDS, TICKETS
from gossamer.transport import waiting

EVICT_AFTER = 3.0
TIMEOUT = 60.0  # seconds that a wait may take; no fault here lasts as long
APART = 25.0  # seconds for which two members that live may have lost each other
LEAD = 2
GRACE = 0.2


Script = Generator[Any, Any, None]


class Violation(Exception):
    pass


_apply = Roster.apply
_folded: dict[tuple[int, Event], tuple[Roster, Roster]] = {}


def _remembered(self: Roster, event: Event) -> Roster:
    """The same fold happens in all workers, and in many schedules."""
    key = (id(self), event)
    found = _folded.get(key)
    if found is None:
        if len(_folded) > 10_000:
            _folded.clear()
        found = _folded[key] = (self, _apply(self, event))
    return found[1]


_firsts = {n: Roster({q: q for q in range(n)}, tuple(range(n)), lead=LEAD) for n in range(1, 9)}


class Flight:
    """Rows of one worker on their way: what it needs, stage by stage."""

    def __init__(self, worker: Worker, epoch: int, tag: tuple, sends: list[int], needs: list[int], slices: bool) -> None:
        self.worker, self.epoch, self.tag, self.slices = worker, epoch, tag, slices
        self.essential = frozenset(needs) | {worker.member.members[epoch].index(worker.ticket)} if slices else frozenset()
        self.sends, self.needs = sends, needs
        self.stage, self.began = 0, worker.world.now
        self.lost: set[int] = set()
        self.failing: set[int] = set()  # operations with these are about to raise
        self.done = self.graced = False
        self.call = worker.call  # of a collective: what was sent stays as it is until that ends
        member = worker.member
        self.peers = frozenset(needs) | frozenset(sends)
        worker.flight = self
        given_up = waiting.at_start(self.essential, self.peers, member.losses(epoch))
        self.lost |= given_up.lost
        if given_up.in_vain:
            self.done = True
        else:
            self._post()
            self.advance()

    def _post(self) -> None:
        worker, epoch, lost = self.worker, self.epoch, self.lost
        world, me, members = worker.world, worker.member.ticket, worker.member.members[epoch]
        message = (epoch, self.tag, self.stage, me)
        self.expected = [(k, (epoch, self.tag, self.stage, members[k])) for k in self.needs]
        for k in self.peers:
            if k in lost:
                continue
            if not world.connected(epoch, me, members[k]):
                self.failing.add(k)
                world.after(world.rng.random() * 0.1, worker, lambda k=k: self.broke(k))
            elif self.slices or k in self.sends:
                world.send(self, k, members[k], message)

    def waits(self) -> list[int]:
        """Peers whose rows have not come, and are not lost."""
        inbox, lost = self.worker.inbox, self.lost
        missing = [k for k, message in self.expected if message not in inbox and k not in lost]
        return missing + [k for k in self.failing if k not in lost] if self.failing else missing

    def advance(self) -> list[int]:
        """Something has come, broken, or been heard of. What is left to wait for."""
        while not self.done:
            if waits := self.waits():
                return waits
            if self.slices and self.stage == 0 and not self.in_vain:
                self.stage = 1
                self._post()
            else:
                self.done = True
        return []

    @property
    def in_vain(self) -> bool:
        return not self.lost.isdisjoint(self.essential)

    def look(self) -> None:
        """As a waiting process does every now and then: give up what is lost."""
        waits = self.advance()
        losses = self.worker.member.losses(self.epoch)
        if self.done or losses is waiting.NONE:
            return
        overdue = self.tag[0] != "step" and self.worker.world.now - self.began > waiting.OVERDUE_SECONDS
        for peer in waits:
            given_up = waiting.while_waiting(self.essential, self.peers, frozenset(self.lost), peer, losses, overdue)
            if given_up is None:
                continue
            if given_up.in_vain and not self.graced:
                self.graced = True
                self.worker.world.after(GRACE, self.worker, self.worker.poke)
                return
            self.lost |= given_up.lost
            if given_up.in_vain:
                self.done = True
                return
        self.advance()

    def broke(self, peer: int) -> None:
        if not self.done and peer in (*self.needs, *self.sends) and peer not in self.lost:
            self.lost.add(peer)
            self.worker.member.lose(self.epoch, peer, "broke")
            self.worker.tick_at(0.01)
            self.worker.poke()


class Worker:
    """One process: its training loop and its membership thread, each a generator."""

    def __init__(self, world: World, rank: int, ticket: int, joins: bool) -> None:
        self.world, self.rank = world, rank
        n = world.n
        self.member = Member("job", ticket, rank, tuple(range(n)), joins, EVICT_AFTER, world.clock, _firsts[n])
        self.joins = joins
        world.tickets[ticket] = self
        self.calls = Collectives(self.member, "job/votes")
        self.links = set() if joins else {0}
        self.inbox: set[tuple] = set()
        self.torn: set[tuple] = set()
        self.wanted: list[tuple[int, int]] = []  # (newcomer's ticket, number): copies of my state
        self.alive, self.stopped, self.was_stopped = True, False, False
        self.deferred: list[Any] = []
        self.flight: Flight | None = None
        self.parked: Any = None  # a condition that the loop waits for
        self.parked_since = 0.0
        self.pauses = 0.0  # it looks for votes again at this time, or when one is cast
        self.ticking = False
        self.next_tick = 0.0
        self.counts: dict[int, int] = {}  # of each link, collectives that were tried
        self.voters: tuple[int, ...] = ()
        self.call: object = None  # the collective that it is in
        self.step = 0
        self.last = world.rng.randrange(world.last + 1) if world.uneven else world.last
        self.done = -1  # the ticket under which it has said that it has no more data
        self.back = False  # in an uneven world: all are done, and together
        self.apart_since: float | None = None
        self.error: str | None = None
        self.evicted = False
        self.finished = False
        self.leads = False
        self.main = self.script()
        world.after(world.rng.random() * 0.02, self, lambda: self.run(None))
        self.tick_at(world.rng.random() * 0.1)

    @property
    def ticket(self) -> int:
        return self.member.ticket

    # --- The membership thread -------------------------------------------------------------------------------------------

    def tick_at(self, delay: float) -> None:
        at = self.world.now + delay
        if not self.ticking and (self.next_tick <= self.world.now or at < self.next_tick):
            self.next_tick = at
            self.world.after(delay, self, lambda: self.tick(at))

    def tick(self, due: float) -> None:
        if self.alive and not self.ticking and due == self.next_tick and not self.finished:
            self.ticking = True
            self.drive(self.member.tick(), None, self._ticked)

    def _ticked(self, _: Any) -> None:
        self.ticking = False
        self.tick_at(0.005 if self.member.again else 1.0)

    def drive(self, rules: Script, result: Any, then: Any) -> None:
        """Rules of the membership thread, until they must wait."""
        world, member = self.world, self.member
        while True:
            part, losses = member.part, member._losses
            try:
                effect = rules.send(result)
            except StopIteration as end:
                then(end.value)
                self.poke()
                return
            if member.part is not part or member._losses is not losses:
                self.poke()
            if type(effect) is Build:
                world.build(self, effect.roster)
                result = None
                continue
            if world.store_up and world.rng.random() < 0.8:
                result = world.store_does(effect)
                continue
            world.at_store(self, effect, lambda value: self.drive(rules, value, then))
            return

    # --- The training loop -----------------------------------------------------------------------------------------------

    def run(self, result: Any) -> None:
        if not self.alive or self.finished:
            return
        world = self.world
        try:
            while True:
                effect = self.main.send(result)
                result = None
                if callable(effect):
                    if effect():
                        continue
                    self.parked, self.parked_since = effect, world.now
                    world.after(TIMEOUT, self, lambda effect=effect: self.timed_out(effect))
                    return
                if type(effect) is float:
                    world.after(effect, self, lambda: self.run(None))
                    return
                if type(effect) is Pause:  # looking again is no use before a vote is cast, or something is heard
                    self.pauses = until = world.now + 1.0
                    world.after(1.0, self, lambda until=until: self.look_again(until))
                    return
                if world.store_up and world.rng.random() < 0.7:
                    result = world.store_does(effect)
                    continue
                world.at_store(self, effect, self.run)
                return
        except StopIteration:
            self.finished = True
            world.ended(self)
        except GossamerError as error:
            self.error, self.evicted = str(error), isinstance(error, Evicted)
            self.finished = True
            world.failed(self)

    def poke(self) -> None:
        """The loop looks again whether what it waits for has come."""
        if self.pauses and self.alive and not self.stopped:
            self.look_again(self.pauses)
        if self.parked is not None and self.alive and not self.stopped and self.parked():
            self.parked = None
            self.run(None)

    def look_again(self, until: float) -> None:
        if self.pauses == until:
            self.pauses = 0.0
            self.run(None)

    def timed_out(self, condition: Any) -> None:
        if self.parked is condition and self.world.now - self.parked_since >= TIMEOUT:
            raise Violation(f"a wait does not end: rank {self.rank} (ticket {self.ticket}) at step {self.step}")

    def script(self) -> Script:
        world = self.world
        if self.joins:
            yield from self.join()
        while not self.back if world.uneven else self.step < self.last:
            if self.was_stopped and world.impatient and self.ticket in world.dead_in_log():
                break  # its time is up, as on Slurm: it goes to the last collective at once
            try:
                yield from self.once() if self.step < self.last else self.leave()
            except Evicted:
                self.call = None
                if world.impatient:
                    raise  # as in a script that knows nothing of it
        yield from self.collective("average_()")
        self.leads = self.ticket == self.voters[0]

    def once(self) -> Script:
        """A step, and what a script does after it."""
        yield from self.before()
        if not self.back:
            yield from self.exchange()
        if self.step % self.world.every == 0 and self.step < self.last:
            yield from self.collective("mean()")

    def leave(self) -> Script:
        """It has no more data: steps without training until it has left, or all are done; then it waits for all."""
        world, member = self.world, self.member
        if self.done != member.ticket:
            self.done = member.ticket
            member.patience = world.now + world.rng.random() * 0.5
            world.after(member.patience - world.now, self, self.poke)
            self.tick_at(0.01)

        def goes_on() -> bool:
            self.hand_out()
            return not member.stands or member.evicted

        def is_back() -> bool:
            self.hand_out()
            return member.ticket in member.part.roster.members or member.evicted or self.shut_out

        yield goes_on
        yield from self.before()
        if self.back:
            return  # it was evicted, and joined the others when all were done
        if member.part.epoch < 0:
            yield is_back
            if member.evicted:
                yield from self.join()
                return
            if self.shut_out:
                raise GossamerError("can't come back: the job has ended without it")
            self.enter()
            world.reunited(self)
        elif member.part.roster.together and member.part.epoch == member.part.roster.epoch:
            world.reunited(self)
        elif not member.stands:
            yield from self.exchange()

    def exchange(self) -> Script:
        world, member = self.world, self.member
        world.begins(self)
        group, members = member.epochs[member.part.epoch]
        if world.gradients:
            yield world.rng.random() * world.compute
            for _ in range(1 + self.step % 2):
                yield from self.collective("all-reduce", True)
        elif len(members) > 1:
            m, me, link = len(members), members.index(self.ticket), member.members[group]
            tag = ("step", self.step)
            if world.slices:
                others = [link.index(q) for q in members if q != self.ticket]
                flight = Flight(self, group, tag, others, others, True)
            else:
                shift = 1 if world.ring else 2 ** (self.step % max(1, (m - 1).bit_length()))
                to, of = members[(me + shift) % m], members[(me - shift) % m]
                flight = Flight(self, group, tag, [link.index(to)], [link.index(of)], False)
            yield world.rng.random() * world.compute
            yield from self.wait(flight)
            self.check_apart(flight)
        else:
            yield world.rng.random() * world.compute
        self.step += 1

    def before(self) -> Script:
        member = self.member
        self.hand_out()
        member.step = self.step
        if member.part.quiet:
            return
        while member.part.held(self.step) and not member.evicted:
            yield lambda: not member.part.held(self.step) or member.evicted
        if member.evicted:
            yield from self.join()
            return
        if member.part.due(self.step):
            self.counts = {member.part.roster.group: 64}
        member.part = member.part.begun(self.step)

    def join(self) -> Script:
        member = self.member
        member.asks = True
        self.tick_at(0.01)

        def is_in() -> bool:
            roster = member.part.roster
            return (roster.group in self.links and member.ticket in roster.members) or self.shut_out or member.evicted

        while True:
            yield is_in
            if not member.evicted:
                break
            taken: int = yield Add(TICKETS, 1)
            ticket = taken - 1
            yield lambda: not self.ticking  # the thread that ticks takes the new ticket, so it is in no tick meanwhile
            member.renamed(ticket)
            self.world.tickets[ticket] = self
            self.links = set()
            self.tick_at(0.01)
        if self.shut_out:
            raise GossamerError("can't join: the job has ended without it")
        self.back = self.world.reunion is not None or member.part.roster.together
        self.enter()

    def enter(self) -> None:
        member = self.member
        self.step = member.step = member.part.roster.start
        member.part = member.part.begun(self.step)
        self.counts = {member.group: 64}

    @property
    def shut_out(self) -> bool:
        return self.member.log_was_read and not self.member.part.roster.living

    def hand_out(self) -> None:
        for newcomer, number in self.wanted:
            self.world.hand_over(newcomer, number)
        self.wanted = []

    def wait(self, flight: Flight) -> Script:
        def landed() -> bool:
            flight.look()
            if flight.tag[0] != "step" and not flight.done:
                self.hand_out()
            return flight.done

        yield landed
        self.flight = None
        now, member = self.world.now, self.member
        if member.uncertain(now):
            self.tick_at(0.01)
            yield lambda: not member.uncertain(now)
        if member.evicted:
            flight.lost |= flight.peers
            self.world.close(self, flight.epoch)
        elif not flight.in_vain:
            used = [
                (flight.epoch, flight.tag, stage, member.members[flight.epoch][k])
                for k in flight.needs
                if k not in flight.lost
                for stage in range(1 + flight.slices)
            ]
            if not self.torn.isdisjoint(used):
                raise Violation(f"rank {self.rank} uses a torn row at step {self.step}")

    def check_apart(self, flight: Flight) -> None:
        world = self.world
        members = self.member.members[flight.epoch]
        dead = world.dead_in_log()
        apart = any(members[k] not in dead and world.alive(members[k]) for k in flight.lost) and self.ticket not in dead
        if not apart:
            self.apart_since = None
        elif self.apart_since is None:
            self.apart_since = world.now
        elif world.now - self.apart_since > APART and world.now - world.last_fault > APART:
            raise Violation(f"rank {self.rank} trains on alone at step {self.step}, {world.now - self.apart_since:.0f} s now")

    def collective(self, what: str, acknowledged: bool = False) -> Script:
        member, world = self.member, self.world
        rules = self.calls.complete(what, TIMEOUT, acknowledged)
        self.call = rules
        value: frozenset[int] | None = None
        result: Any = None
        while True:
            try:
                effect = rules.send(result)
            except StopIteration as end:
                self.voters = end.value
                break
            if type(effect) is Fly:
                tag = self.counts[effect.epoch] = self.counts.get(effect.epoch, 0) + 1
                me = member.members[effect.epoch].index(member.ticket)
                others = [k for k in effect.places if k != me]
                flight = Flight(self, effect.epoch, ("collective", tag), others, others, True)
                yield from self.wait(flight)
                tickets = frozenset(member.members[effect.epoch][k] for k in effect.places)
                whole = not flight.lost.intersection(effect.places)
                value = tickets if whole else None
                result = Came(whole)
                if effect.acknowledged and (yield from self.acknowledged(whole, effect.epoch, tag, others)):
                    result = Came.EVERYWHERE
            else:
                if type(effect) is Pause:
                    self.hand_out()
                result = yield effect
        self.call = None
        world.returned(self, (self.calls._epoch, self.calls._calls), value)

    def acknowledged(self, whole: bool, epoch: int, tag: int, others: list[int]) -> Generator[Any, Any, bool]:
        """All tell all others whether it came."""
        said, members = self.world.said, self.member.members[epoch]
        said[epoch, tag, self.ticket] = whole
        flight = Flight(self, epoch, ("acknowledged", tag), others, others, False)
        if not whole:
            self.flight = None
            return False
        yield from self.wait(flight)
        return flight.lost.isdisjoint(others) and all(said[epoch, tag, members[k]] for k in others)


class World:
    """The store, the connections, the clock, the launcher, and the faults of one seed."""

    def __init__(self, seed: int) -> None:
        rng = self.rng = random.Random(seed)
        self.now, self._count = 0.0, 0
        self._queue: list[tuple[float, int, Worker | None, Any]] = []
        self.n = rng.choice((2, 2, 3, 3, 3, 4))
        self.slices, self.ring = rng.random() < 0.5, rng.random() < 0.3
        self.last = rng.randrange(2, 7)
        self.every = rng.choice((1, 1, 2, 3, 100))
        self.compute = rng.choice((0.02, 0.3, 1.0))
        self.latency = rng.choice((0.05, 0.05, 0.5))
        self.restarts = rng.choice((0, 0, 2))
        self.impatient = rng.random() < 0.3
        self.uneven = rng.random() < 0.3
        # Gradients are averaged in each step, instead of parameters. (``uneven()`` is not for ``gossamer launch``.)
        self.gradients = random.Random(~seed).random() < 0.3 and not self.uneven
        if self.uneven:
            self.every = 100  # collectives have their place outside
        self.begun: dict[int, dict[int, int]] = {}  # of each step: by epoch, a worker that has begun it
        self.reunion: tuple[int, int, tuple[int, ...]] | None = None
        self.store: dict[str, Any] = {TICKETS: self.n}
        self.store_up = True
        self._waiting: list[Any] = []
        self._dead: set[int] = set()  # by the log
        self.tickets: dict[int, Worker] = {}
        self.broken: set[tuple[int, int, int]] = set()  # (epoch, ticket, ticket)
        self.half: set[tuple[int, int, int]] = set()  # the same, but only the first one notices
        self.stalled: set[tuple[int, int, int]] = set()  # the same, but no one notices: collectives do not get through any more
        self._stalls = random.Random(~seed ^ 1)
        self.builds: dict[int, dict[int, Worker]] = {}
        self.results: dict[Any, frozenset[int]] = {}
        self.said: dict[tuple[int, int, int], bool] = {}  # (epoch, number, ticket): whether a mean of gradients came
        self.last_fault = 0.0
        self.running = self.n
        self.workers = [Worker(self, rank, rank, False) for rank in range(self.n)]
        self._faults()

    def clock(self) -> float:
        return self.now

    # --- Time -------------------------------------------------------------------------------------------------------------

    def after(self, delay: float, worker: Worker | None, act: Any) -> None:
        self._count += 1
        heapq.heappush(self._queue, (self.now + delay, self._count, worker, act))

    def run(self) -> None:
        queue = self._queue
        while queue and self.running:
            self.now, _, worker, act = heapq.heappop(queue)
            if worker is not None:
                if not worker.alive:
                    continue
                if worker.stopped:
                    worker.deferred.append(act)
                    continue
            act()
            if self.now > 400 or self._count > 20_000:
                raise Violation("the job does not end")
        if any(w.alive and not w.finished for w in self.workers):
            raise Violation("a worker waits for ever")
        self._check_end()

    def vanish(self) -> None:
        """Its parts know each other: when they do not any more, the memory is free at once."""
        for worker in self.workers:
            worker.__dict__.clear()
        self.__dict__.clear()

    # --- The store --------------------------------------------------------------------------------------------------------

    def at_store(self, worker: Worker, effect: Any, then: Any) -> None:
        self.after(self.rng.random() * 0.02, worker, lambda: self._at_store(worker, effect, then))

    def _at_store(self, worker: Worker, effect: Any, then: Any) -> None:
        if self.store_up:
            then(self.store_does(effect))
        else:
            self._waiting.append((worker, lambda: self._at_store(worker, effect, then)))

    def store_does(self, effect: Any) -> Any:
        store, kind = self.store, type(effect)
        if kind is Look:
            return store.get(effect.key)
        if kind is Claim:
            key, value, expected = effect
            if store.get(key, "") == expected:
                store[key] = value
                if key.startswith("job/log/"):
                    self._logged(value)
                elif key.startswith("job/votes/"):
                    self._voted()
            return store.get(key, expected)  # as TCPStore answers if there is no such key
        if kind is Put:
            store[effect.key] = effect.value
            if effect.key.startswith("job/votes/"):
                self._voted()
        elif kind is Add:
            store[effect.key] = store.get(effect.key, 0) + effect.amount
            return store[effect.key]
        elif kind is Drop:
            store.pop(effect.key, None)
        return None

    def _voted(self) -> None:
        for worker in self.workers:
            if worker.pauses:
                self.after(self.rng.random() * 0.03, worker, worker.poke)

    def _logged(self, text: str) -> None:
        if text.startswith('{"what": "dead"'):
            self._dead.add(json.loads(text)["who"])
        self.wake_all()

    def wake_all(self) -> None:
        for worker in self.workers:
            if worker.alive and not worker.finished:
                worker.tick_at(self.rng.random() * 0.1)

    def dead_in_log(self) -> set[int]:
        return self._dead

    # --- Connections ------------------------------------------------------------------------------------------------------

    def by_ticket(self, ticket: int) -> Worker | None:
        return self.tickets.get(ticket)

    def alive(self, ticket: int) -> bool:
        worker = self.tickets.get(ticket)
        return worker is not None and worker.member.ticket == ticket and worker.alive and not worker.finished

    def connected(self, epoch: int, a: int, b: int) -> bool:
        """As a sees it."""
        if not self.alive(b):
            return False
        return not (self.broken or self.half) or (
            (epoch, min(a, b), max(a, b)) not in self.broken and (epoch, a, b) not in self.half
        )

    def send(self, flight: Flight, place: int, receiver: int, message: tuple) -> None:
        other, epoch, sender = self.tickets[receiver], flight.epoch, message[3]
        if self.half and (epoch, receiver, sender) in self.half:
            return  # the receiver has closed the connection, and the sender does not know
        if self.stalled and flight.tag[0] != "step" and (epoch, min(sender, receiver), max(sender, receiver)) in self.stalled:
            return

        def arrive() -> None:
            if self.broken and (epoch, min(sender, receiver), max(sender, receiver)) in self.broken:
                return
            other.inbox.add(message)
            # The sender has given the receiver up, and changes its memory. (What it sends in the second stage lies elsewhere.)
            changed = flight.call is None or flight.call != flight.worker.call
            if changed and place in flight.lost and flight.stage == 0 and (epoch, sender, receiver) not in self.half:
                other.torn.add(message)
            if other.parked is not None:
                other.poke()

        self.after(self.rng.random() * self.latency, other, arrive)

    def _errors(self, worker: Worker, epoch: int, ticket: int) -> None:
        """The worker's operations with that peer raise an error."""
        flight = worker.flight
        if flight is not None and flight.epoch == epoch and ticket in worker.member.members[epoch]:
            flight.broke(worker.member.members[epoch].index(ticket))

    def close(self, worker: Worker, epoch: int) -> None:
        """The worker closes all connections of an epoch."""
        me = worker.ticket
        for q in worker.member.members[epoch]:
            pair, other = (epoch, min(me, q), max(me, q)), self.by_ticket(q)
            if q != me and pair not in self.broken:
                self.broken.add(pair)
                if other is not None and other.alive:
                    self.after(self.rng.random() * 0.1, other, lambda o=other: self._errors(o, epoch, me))

    def cut(self, worker: Worker) -> None:
        """Its process has ended: the others' operations with it raise, and what comes later too."""
        ticket = worker.ticket
        for other in self.workers:
            if other is not worker and other.alive:
                for epoch in other.links:
                    self.after(self.rng.random() * 0.1, other, lambda o=other, e=epoch: self._errors(o, e, ticket))

    # --- Groups -----------------------------------------------------------------------------------------------------------

    def build(self, worker: Worker, roster: Roster) -> None:
        proposal = roster.proposal
        assert proposal is not None
        here = self.builds.setdefault(proposal.number, {})
        here[worker.ticket] = worker
        if set(here) == set(proposal.members):
            for w in here.values():
                self.after(self.rng.random() * 0.1, w, lambda w=w: self._stands(w, roster))

    def _stands(self, worker: Worker, roster: Roster) -> None:
        member, proposal = worker.member, roster.proposal
        assert proposal is not None
        number = proposal.number
        if worker.ticket not in proposal.members or member.building != number:
            return
        worker.links.add(number)
        member.members[number] = proposal.members
        member.count_losses()
        donors = member.donors[number]
        if worker.ticket not in donors:
            worker.wanted += [(q, number) for q, donor in donors.items() if donor == worker.ticket]
            member.built = number
            worker.tick_at(0.01)
        worker.poke()

    def hand_over(self, newcomer: int, number: int) -> None:
        worker = self.by_ticket(newcomer)
        if worker is not None and worker.alive:
            self.after(self.rng.random() * 0.2, worker, lambda: self._handed_over(worker, newcomer, number))

    def _handed_over(self, worker: Worker, newcomer: int, number: int) -> None:
        if worker.ticket != newcomer or worker.member.void(number):
            return
        if number not in worker.links:  # its group does not stand yet
            self.after(0.1, worker, lambda: self._handed_over(worker, newcomer, number))
            return
        worker.member.built = number
        worker.tick_at(0.01)

    # --- What the workers saw ---------------------------------------------------------------------------------------------

    def begins(self, worker: Worker) -> None:
        ticket, epoch = worker.ticket, worker.member.part.epoch
        if ticket in self._dead:
            return
        here = self.begun.setdefault(worker.step, {})
        here[epoch] = ticket
        if len(here) > 1 and any(e != epoch and q not in self._dead for e, q in here.items()):
            raise Violation(f"rank {worker.rank} begins step {worker.step} in epoch {epoch}, others in another one: {here}")

    def reunited(self, worker: Worker) -> None:
        worker.back = True
        seen = (worker.member.part.epoch, worker.step, worker.member.part.roster.members)
        if any(q not in self._dead for step, here in self.begun.items() if step >= worker.step for q in here.values()):
            raise Violation(f"all come together at step {worker.step}, which some have begun")
        self.reunion = self.reunion or seen
        if seen != self.reunion:
            raise Violation(f"rank {worker.rank} comes together with others at {seen}, another one at {self.reunion}")

    def returned(self, worker: Worker, call: Any, value: frozenset[int] | None) -> None:
        if value is None:
            raise Violation(f"rank {worker.rank} returns memory that was never filled, in collective {call}")
        if worker.ticket not in worker.voters:
            raise Violation(f"rank {worker.rank} was evicted, and returns a value in collective {call}")
        before = self.results.setdefault(call, value)
        if before != value:
            raise Violation(
                f"collective {call} is the mean of {sorted(value)} on rank {worker.rank}, of {sorted(before)} on another"
            )

    def ended(self, worker: Worker) -> None:
        """It has finished, or ended with an error."""
        self.running -= 1
        self.cut(worker)
        self.after(self.rng.random() * 0.1, None, lambda: self._tell(worker.ticket, "has finished"))

    def failed(self, worker: Worker) -> None:
        """An error is right for a worker that was away, or that came when the others were done; for no other."""
        if not worker.evicted and "ended without it" not in (worker.error or ""):
            raise Violation(f"rank {worker.rank} is lost: {worker.error}")
        self.ended(worker)

    def _check_end(self) -> None:
        done = [w for w in self.workers if w.alive and w.finished and w.error is None]
        if not done and self.uneven and self.lost:
            return
        if not done:
            raise Violation("no worker has finished")
        leaders = [w.rank for w in done if w.leads]
        first = self.by_ticket(done[0].voters[0])
        if len(leaders) != 1 and (first is None or first.alive):  # killed before it could do what the first one does
            raise Violation(f"ranks {leaders} lead, of {[w.rank for w in done]} that have finished")

    # --- Faults -----------------------------------------------------------------------------------------------------------

    def _faults(self) -> None:
        rng = self.rng
        horizon = 0.2 + self.last * self.compute * 0.6
        for _ in range(rng.choice((1, 1, 2))):
            at = rng.random() * horizon
            fault = rng.choice((self.kill, self.kill, self.stop, self.stop_store, self.stop_all, self.glitch))
            self.after(at, None, fault)

    def _victim(self) -> Worker | None:
        """One, if another is left that has the state of training, and runs."""
        dead = self.dead_in_log()
        living = [w for w in self.workers if w.alive and not w.finished and w.member.part.epoch >= 0 and w.ticket not in dead]
        if len(living) <= max(1, self.n - 2) or any(w.stopped for w in self.workers):
            return None
        away = [w for w in self.workers if w.alive and not w.finished and w.member.part.epoch < 0 and not w.member.asks]
        return self.rng.choice(living + away)

    @property
    def lost(self) -> bool:
        """The last members were killed when the others had left."""
        roster = _firsts[self.n]
        for k in range(len(self.store)):
            if (text := self.store.get(f"job/log/{k}")) is not None:
                roster = roster.apply(parsed(text))
        return not roster.living

    def kill(self) -> None:
        worker = self._victim()
        if worker is None:
            return
        self.last_fault = self.now
        worker.alive = False
        self.running -= 1
        self.cut(worker)
        self._stall(worker)
        self.after(self.rng.random() * 0.3, None, lambda: self._tell(worker.ticket, "was killed"))
        if self.restarts:
            self.restarts -= 1
            self.after(0.1 + self.rng.random(), None, lambda: self._restart(worker.rank))

    def _stall(self, killed: Worker) -> None:
        """Beside a death: a connection between two that live brings nothing any more, and does not break."""
        epoch = killed.member.group
        group = sorted(set(killed.member.members.get(epoch, ())) - {killed.ticket})
        if len(group) > 1 and not self.uneven and self._stalls.random() < 0.2:  # members that leave keep their connections
            a, b = self._stalls.sample(group, 2)
            self.stalled.add((epoch, min(a, b), max(a, b)))

    def _tell(self, ticket: int, why: str) -> None:
        """The launcher's word."""
        if not self.store_up:
            self._waiting.append((None, lambda: self._tell(ticket, why)))
            return
        self.store[f"{ENDED}/{ticket}"] = why
        self.store[ENDS] = self.store.get(ENDS, 0) + 1
        self.wake_all()

    def _restart(self, rank: int) -> None:
        if not any(w.alive and not w.finished for w in self.workers):
            return
        self.store[TICKETS] += 1
        self.running += 1
        self.workers.append(Worker(self, rank, self.store[TICKETS] - 1, True))

    def stop(self) -> None:
        worker = self._victim()
        if worker is not None:
            self._stop([worker], self.rng.choice((1.0, 2.9, 3.1, 4.0, 8.0)) + self.rng.random())

    def stop_all(self) -> None:
        self._stop(
            [w for w in self.workers if w.alive and not w.finished], self.rng.choice((2.0, 3.2, 5.0)) + self.rng.random()
        )
        if self.rng.random() < 0.5:
            self._stop_store(5.0)

    def _stop(self, workers: list[Worker], seconds: float) -> None:
        self.last_fault = max(self.last_fault, self.now + seconds)
        for worker in workers:
            worker.stopped = worker.was_stopped = True
            self.after(seconds + self.rng.random() * 0.01, None, lambda w=worker: self._go_on(w))

    def _go_on(self, worker: Worker) -> None:
        worker.stopped = False
        self.last_fault = max(self.last_fault, self.now)
        acts, worker.deferred = worker.deferred, []
        self.rng.shuffle(acts)
        for act in acts:
            self.after(self.rng.random() * 0.01, worker, act)
        self.after(0.005, worker, worker.poke)

    def stop_store(self) -> None:
        self._stop_store(self.rng.choice((1.0, 3.1, 5.0, 8.0)) + self.rng.random())

    def _stop_store(self, seconds: float) -> None:
        self.last_fault = max(self.last_fault, self.now + seconds)
        self.store_up = False

        def up() -> None:
            self.store_up = True
            waiting_, self._waiting = self._waiting, []
            for worker, act in waiting_:
                self.after(self.rng.random() * 0.01, worker, act)

        self.after(seconds, None, up)

    def glitch(self) -> None:
        """A connection between two that live breaks; perhaps only one of them notices."""
        living = [w for w in self.workers if w.alive and not w.finished and w.member.part.epoch >= 0]
        if len(living) < 2:
            return
        self.last_fault = max(self.last_fault, self.now)
        a, b = self.rng.sample(living, 2)
        epoch = a.member.group
        if b.member.group == epoch and b.ticket in a.member.members[epoch] and a.ticket in b.member.members[epoch]:
            self.after(self.rng.random() * 0.1, a, lambda: self._errors(a, epoch, b.ticket))
            if self.rng.random() < 0.4:
                self.half.add((epoch, a.ticket, b.ticket))
            else:
                self.broken.add((epoch, min(a.ticket, b.ticket), max(a.ticket, b.ticket)))
                self.after(self.rng.random() * 0.1, b, lambda: self._errors(b, epoch, a.ticket))


def search(seeds: range, most: int = 10) -> dict[int, str]:
    """The seeds that violate something, and what; stops after ``most`` of them."""
    found: dict[int, str] = {}
    _folded.clear()
    Roster.apply = _remembered  # type: ignore[method-assign]
    gc.collect()
    gc.freeze()
    gc.disable()  # worlds take themselves apart
    try:
        for seed in seeds:
            world = World(seed)
            try:
                world.run()
            except Exception as violation:  # a rule that raises something else is wrong as well
                found[seed] = str(violation) if isinstance(violation, Violation) else repr(violation)
                if len(found) >= most:
                    break
            world.vanish()
    finally:
        gc.enable()
        gc.unfreeze()
        Roster.apply = _apply  # type: ignore[method-assign]
    return found


if __name__ == "__main__":
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 10_000
    first = int(sys.argv[2]) if len(sys.argv) > 2 else 0
    began = time.perf_counter()
    found = search(range(first, first + count), most=count)
    took = time.perf_counter() - began
    for seed, what in list(found.items())[:40]:
        print(seed, what)
    print(f"{count} schedules in {took:.1f} s ({count / took:.0f} per second), {len(found)} violations")
