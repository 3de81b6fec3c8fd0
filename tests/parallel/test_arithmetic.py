"""The arithmetic of the graphs, against a reference by hand."""

import itertools

import numpy as np
import pytest
import torch
from torch import nn

from gossamer import graphs
from tests.pool import on_workers
from tests.world import SGD, close, flat, loss_of, small, train

STEPS = 10


def reference(world, graph, order, wire, local_steps):
    """n models in one process, mixed with the matrix of each Round."""
    models = [small(torch.float64) for _ in range(world.size)]
    optimizers = [torch.optim.SGD(model.parameters(), **SGD) for model in models]
    for step in range(STEPS):
        for rank, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            optimizer.zero_grad()
            loss_of(model, world.batch(step, rank, torch.float64)).backward()
            if order == "atc":
                optimizer.step()
        if (step + 1) % local_steps == 0:
            mix_by_hand(models, graph.round(step // local_steps), wire)
        if order == "awc":
            for optimizer in optimizers:
                optimizer.step()
    return torch.stack([flat(model) for model in models])


@torch.no_grad()
def mix_by_hand(models, round_, wire):
    x = torch.stack([flat(model) for model in models])
    w = torch.from_numpy(round_.matrix())
    rounded = wire == "bfloat16" and round_.verb(0.25) == "edges"  # a quarter: doubles that travel as bfloat16
    mixed = x + (w - torch.eye(len(x))) @ x.bfloat16().double() if rounded else w @ x
    for model, row in zip(models, mixed, strict=True):
        nn.utils.vector_to_parameters(row, model.parameters())


GRAPHS = ("one-peer-exponential", "one-peer-ring", "ring", "exponential", "complete", "random-matching:seed=3")
PER_NODE = {2: 1, 3: 3, 4: 2, 5: 5}


def graph_names(n):
    """Graphs that there are for n workers."""
    torus = ["torus"] if n == 4 else []  # the other numbers are prime
    return [*GRAPHS, *torus, f"alternating-exponential-ring:per_node={PER_NODE[n]}"]


@pytest.mark.parametrize(("workers", "name"), [(n, name) for n in PER_NODE for name in graph_names(n)])
@on_workers()
def test_every_graph_order_wire_and_number_of_local_steps_gives_what_the_matrices_give(world, name):
    graph = graphs.parse(name, world.size)
    ways = (("float32", False, 1), ("bfloat16", True, 3), ("bfloat16", False, 1), ("float32", True, 3))
    results = []
    for order, (wire, send_copy, local_steps) in itertools.product(("awc", "atc"), ways):
        model = world.model(small(torch.float64), name, order=order, wire=wire, send_copy=send_copy, local_steps=local_steps)
        optimizer = torch.optim.SGD(model.parameters(), **SGD)
        model.gossip(optimizer)
        train(world, model, optimizer, STEPS)
        assert model.steps == STEPS
        results.append((order, wire, send_copy, local_steps, world.rows(model)))
    for order, wire, send_copy, local_steps, rows in results[world.rank :: world.size]:  # each worker compares its share
        worst = float((rows - reference(world, graph, order, wire, local_steps)).abs().max())
        assert worst < 1e-9, f"{order} {wire} send_copy={send_copy} local_steps={local_steps}: {worst}"
        ends_in_mean = order == "atc" and local_steps == 1 and np.allclose(graph.round(STEPS - 1).matrix(), 1 / world.size)
        assert ends_in_mean or (rows != rows[0]).any()


@on_workers(4)
def test_averaging_alone_keeps_the_mean_and_brings_workers_together(world):
    for wire in ("float32", "bfloat16"):
        model = world.model(small(seed=world.rank), "one-peer-exponential", init="keep", wire=wire)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        model.gossip(optimizer)
        before = world.rows(model)
        assert (before[0] != before[1]).any()
        train(world, model, optimizer, 8)
        after = world.rows(model)
        close(after.double().mean(0), before.double().mean(0), 1e-6)
        close(after, after.mean(0).expand_as(after), 1e-6 if wire == "float32" else 5e-3)


@on_workers(2, 3, 4)
def test_means_in_8_bits_take_a_quarter_of_the_bytes_and_are_the_same_for_all(world):
    def wide():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 3))

    eight, before = "periodic:every=1,bits=8", flat(wide())
    x = torch.randn(8, 64, generator=torch.Generator().manual_seed(world.rank))
    for order in ("atc", "awc"):
        received, rows = {}, {}
        for graph, apart in (("complete", False), (eight, False), (eight, True)):
            model = world.model(wide(), graph, order=order, send_copy=apart)
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
            model.gossip(optimizer)
            for _ in range(6):
                so_far = model.traffic.received
                optimizer.zero_grad()
                model(x).square().mean().backward()
                optimizer.step()
                received[graph, apart] = model.traffic.received - so_far  # the first one is a whole mean
            rows[graph, apart] = world.rows(model)
            if graph == eight and order == "atc" and not apart:
                assert world.same(flat(model))
        moved = float((rows["complete", False] - before).abs().max())
        for apart in (False, True):
            close(rows[eight, apart], rows["complete", False], 0.02 * moved)
            assert received[eight, apart] <= 0.27 * received["complete", False]
