"""Operations whose peers are lost at any moment, also just when they are given up: with a network made of events, hundreds of times."""

import random
import threading
import time

import pytest
import torch

from gossamer.transport import operation as operations
from gossamer.transport.exchange import poisoned
from gossamer.transport.link import Message, Tag
from gossamer.transport.operation import Operation, Traffic, Waiter
from gossamer.transport.waiting import Losses


class Row:
    """What gloo gives to wait for."""

    def __init__(self):
        self.there, self.broken = threading.Event(), False

    def come(self, broken=False):
        self.broken = broken
        self.there.set()


class Network:
    """The link, the guard and the exchange of worker 0."""

    rank, names, timeout, blind, trace = 0, range(3), 5.0, False, None

    def __init__(self):
        self.guard = self.link = self
        self.lost, self.replaced, self.limbo, self.traffic, self.failed = frozenset(), False, [], Traffic(), False
        self.copies = 0
        self.waiter = Waiter("test")

    def wait(self, row):
        row.there.wait()
        if row.broken:
            raise RuntimeError("connection closed")

    def losses(self, _):
        return Losses(self.lost, replaced=self.replaced)

    def hand_out(self):
        self.copies += 1

    def lose(self, *_):
        pass

    def shut_out(self, _):
        return False

    def say(self, _):
        pass

    def heard(self, _):
        return {}

    def submit(self, operation):
        operation.submitted, operation.waiter = True, self.waiter
        self.waiter.take(operation)


@pytest.mark.parametrize("all_needed", [False, True], ids=["edges", "slices"])
def test_a_peer_that_is_lost_at_any_moment_takes_nothing_else_with_it(all_needed, monkeypatch):
    monkeypatch.setattr(operations, "_GUARDED", 0.0002)
    monkeypatch.setattr(operations, "_GRACE", 0.0005)
    rng, network = random.Random(1), Network()
    for number in range(600):
        rows = {1: Row(), 2: Row()}
        operation = Operation(network, "step", Tag(0, False, number), frozenset({1, 2}) if all_needed else frozenset())
        order = rng.sample(sorted(rows), 2)
        operation.stages.append(lambda rows=rows, order=order: [(peer, rows[peer]) for peer in order])
        network.lost = frozenset()
        network.submit(operation)
        dies = rng.random() < 0.7
        pauses = [rng.uniform(0, 0.001) for _ in range(3)]

        def happen(rows=rows, dies=dies, pauses=pauses):
            time.sleep(pauses[0])
            network.lost = frozenset({2}) if dies else frozenset()
            time.sleep(pauses[1])
            rows[2].come(broken=dies)
            time.sleep(pauses[2])
            rows[1].come()

        world = threading.Thread(target=happen)
        world.start()
        operation.wait()
        if 1 not in operation.lost and not operation.in_vain:
            assert rows[1].there.is_set(), f"operation {number} has landed without the row of 1"
        assert 1 not in operation.lost
        assert dies or not operation.lost
        assert dies == (2 in operation.lost)
        world.join()
    network.waiter.end()
    assert not any(thread.is_alive() for thread in network.waiter._replaced)


@pytest.mark.parametrize("collective", [False, True], ids=["step", "collective"])
def test_a_collective_is_given_up_on_a_silent_connection_once_there_are_newer_ones_and_a_step_is_not(collective, monkeypatch):
    """A row that never comes, from a peer that lives. What is given up is kept: gloo may still write to it."""
    monkeypatch.setattr(operations.waiting, "OVERDUE_SECONDS", 0.1)
    network, row = Network(), Row()
    operation = Operation(network, "mean()", Tag(0, collective, 1), frozenset({0, 1, 2}))
    operation.kept.append(Message(2, 0, torch.empty(1)))
    operation.stages.append(lambda: [(2, row)])
    network.submit(operation)
    waits = threading.Thread(target=operation.wait)
    waits.start()
    waits.join(0.5)
    assert waits.is_alive()  # there is nothing newer to do it again on
    network.replaced = True
    waits.join(0.8)
    assert waits.is_alive() != collective
    if collective:
        assert operation.dirty
        assert network.limbo == [operation]
        assert network.copies  # a newcomer that the newer connections wait for got its state meanwhile
    row.come()
    waits.join()
    assert bool(operation.lost) == collective
    network.waiter.end()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.uint8])
def test_the_room_for_rows_that_are_not_there_yet_can_not_be_taken_for_values(dtype):
    room = poisoned(torch.zeros(5, dtype=dtype), 3)
    assert room.shape == (3, 5)
    assert room.dtype == dtype
    assert room.isnan().all() if dtype.is_floating_point else (room == torch.iinfo(dtype).min).all()
