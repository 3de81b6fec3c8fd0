"""What a logger is told after each step, what torch.profiler sees, and the trace of who waited for whom."""

import json
import time

import torch

from gossamer.runtime import traces
from tests.pool import on_workers
from tests.world import SGD, train

EACH = {"step_ms", "exposed_wait_ms", "bytes_sent", "bytes_received", "members", "connections"}
LOOKED = {"consensus_distance", "gini", "iod", "cv", "qcd"}


def numbers_of(world, steps, profile_every=2, **options):
    model, told = world.model(**options), []
    optimizer = torch.optim.SGD(model.parameters(), **SGD)
    model.gossip(optimizer, profile_every=profile_every, log=lambda numbers, step: told.append((step, numbers)))
    train(world, model, optimizer, steps)
    assert all(key.startswith("gossamer/") for _, numbers in told for key in numbers)
    return model, [(step, {key.removeprefix("gossamer/"): value for key, value in numbers.items()}) for step, numbers in told]


@on_workers(1, 3)
def test_the_worker_that_leads_is_told_what_each_step_has_cost(world):
    model, told = numbers_of(world, 4, graph="one-peer-exponential")
    if world.rank:
        assert told == []
        return
    assert [step for step, _ in told] == [0, 1, 2, 3]
    for step, numbers in told:
        looked = LOOKED if step % 2 == 0 else set()
        assert set(numbers) == EACH | looked | ({"graph"} if step == 0 else set())
        assert numbers["members"] == world.size
    assert told[0][1]["graph"] == "one-peer-exponential"
    assert "gini" in model.profiles[0].signals()
    assert told[2][1]["consensus_distance"] == model.profiles[1].consensus_distance
    row = 4 * model._flat.blocks[0].x.shape[1]
    sent = [numbers["bytes_sent"] for _, numbers in told]
    assert sent == ([0] * 4 if world.size == 1 else [row] * 4), (sent, row)  # without those of the looks
    assert all(numbers["exposed_wait_ms"] <= numbers["step_ms"] for _, numbers in told)


@on_workers(2)
def test_waiting_for_a_slow_worker_is_seen_in_the_step_in_which_it_was(world):
    model, told = world.model(graph="complete", method="atc"), []
    optimizer = torch.optim.SGD(model.parameters(), **SGD)
    model.gossip(optimizer, log=lambda numbers, step: told.append(numbers))
    for step in range(3):
        if world.rank == 1 and step == 1:
            time.sleep(0.3)
        train(world, model, optimizer, 1, step)
        if world.rank == 1 and step == 2:
            time.sleep(0.3)  # and now it is late for mean(), which is no part of a step
        model.mean(1.0)
    if world.rank == 0:
        waits = [numbers["gossamer/exposed_wait_ms"] for numbers in told]
        assert waits[1] > 200
        assert waits[2] < 200
    assert not model.profiles  # the first look goes to the logger alone


@on_workers(2)
def test_a_level_of_ada_auto_and_what_a_method_notes_are_told(world):
    _, told = numbers_of(world, 2, graph="ada-auto")
    _, other = numbers_of(world, 2, graph="ring", method="atc + control")
    if world.rank == 0:
        assert [numbers["level"] for _, numbers in told] == [0, 0]
        assert {"control_target", "control_reached", "control_rounds"} <= set(other[1][1])


@on_workers(2)
def test_the_profiler_sees_sends_waits_and_mixes_by_name(world):
    for options, names in (
        ({"graph": "ring"}, {"gossamer::send", "gossamer::mix"}),
        ({"graph": "all-reduce"}, {"gossamer::mean"}),
    ):
        model = world.model(**options)
        optimizer = torch.optim.SGD(model.parameters(), **SGD)
        model.gossip(optimizer)
        train(world, model, optimizer, 1)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
            if world.rank == 1:
                time.sleep(0.1)  # so that rank 0 waits
            train(world, model, optimizer, 2, 1)
        found = {event.key: event.count for event in seen.key_averages() if event.key.startswith("gossamer::")}
        assert names <= set(found), found
        assert world.rank == 1 or "gossamer::wait" in found
        assert all(found[name] == 2 for name in names), found


@on_workers(3)
def test_the_trace_says_which_worker_waited_for_which(world):
    model = world.model(graph="ring")
    optimizer = torch.optim.SGD(model.parameters(), **SGD)
    model.gossip(optimizer)
    train(world, model, optimizer, 1)
    sent = model.traffic.sent
    with model.trace(world.folder / "trace"):
        if world.rank == 2:
            time.sleep(0.3)
        train(world, model, optimizer, 2, 1)
    sent = model.traffic.sent - sent
    train(world, model, optimizer, 1, 3)  # in no trace
    model.mean(1.0)
    if world.rank:
        return
    path, waits = traces.merge(world.folder / "trace")
    assert waits[0, 2] > 0.2
    assert waits[1, 2] > 0.2
    assert waits.get((2, 0), 0) < 0.1
    events = json.loads(path.read_text())["traceEvents"]
    begun = [event for event in events if event["ph"] == "b"]
    assert {(event["pid"], event["name"]) for event in begun} == {
        (rank, f"step {step}") for rank in range(3) for step in (1, 2)
    }
    assert begun[0]["args"]["step"] == 1
    assert sum(sum(event["args"]["to"].values()) for event in begun if event["pid"] == 0) == sent
    assert set(begun[0]["args"]["from"]) == {"1", "2"}
    assert all(event["dur"] >= 0 for event in events if event["ph"] == "X")
    assert len([event for event in events if event["ph"] == "e"]) == len(begun)
    late = next(event["ts"] for event in events if event["pid"] == 2 and event["ph"] == "b")
    mine = next(event for event in events if event["pid"] == 0 and event["name"] == "wait for rank 2")
    assert mine["ts"] < late < mine["ts"] + mine["dur"] + 1e5  # one clock
