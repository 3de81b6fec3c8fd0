"""Ada that decides by itself: the frontier of ways to average, what is seen at an average, and what follows from it."""

import itertools
import math
import random
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from gossamer import GossamerError, LearningRate, Recipe, Settings, Task, Trainer, graphs
from gossamer.graphs.rounds import Mean
from gossamer.methods import AdaAuto
from gossamer.methods.policies.frontier import Level, frontier
from gossamer.optim.learning_rates import WarmupCosine
from gossamer.rows import mixing
from gossamer.rows.block import Block
from gossamer.rows.vector import Parameters
from gossamer.schedules import schedule
from gossamer.transport.mixer import Mixer
from gossamer.transport.probe import Probe, Sight, sample, sampled
from tests.models import mlp, stopped_and_loaded, task

# --- Ways to average -------------------------------------------------------------------------------------------------------------


@given(st.integers(2, 40))
def test_each_level_costs_less_and_lets_replicas_further_apart(n):
    levels = frontier(n)
    assert levels[0].graph.round(0) == Mean(n, 8)
    assert levels[0].spread == 0
    for one, next_ in itertools.pairwise(levels):
        assert next_.cost < one.cost
        assert next_.spread > one.spread
    assert all(isinstance(level.graph.rounds[-1], Mean) for level in levels)
    assert all(level.graph.is_doubly_stochastic() for level in levels)


def test_no_way_that_was_left_out_is_better():
    kept = frontier(16)
    everything = [
        graphs.periodic(16, every, gap, bits)
        for every in (2, 4, 8, 64)
        for gap in (0, 1, 2, 4)
        for bits in (8, 32)
        if gap < every
    ]
    for way in everything:
        cost = way.cost(1 << 20) / (1 << 20)
        spread = measured_spread(way, walks=200)
        assert any(level.cost <= cost * 1.01 and level.spread <= spread * 1.15 for level in kept), way.name


def measured_spread(graph, walks, steps=256):
    """Replicas that drift, each in its direction, by 1 in a step, and average, as the graph says."""
    generator = torch.Generator().manual_seed(0)
    drift = torch.randn(graph.n, walks, generator=generator)
    x, y = torch.zeros_like(drift), torch.zeros_like(drift)
    apart = []
    for t in range(steps):
        x += drift
        mixing.mix(graph.round(t), x, y)
        x, y = y, x
        apart.append(float((x - x.mean(0)).square().mean()))
    return sum(apart[64:]) / len(apart[64:])


@pytest.mark.parametrize(
    "name", ["periodic:every=4", "periodic:every=4,gap=1", "periodic:every=8,gap=2", "periodic:every=16,gap=4"]
)
def test_spread_is_what_drifting_replicas_show(name):
    level = Level.of(graphs.parse(name, 64))
    assert level.spread == pytest.approx(measured_spread(level.graph, walks=400), rel=0.1)


def test_another_cost_gives_another_frontier():
    def hidden(graph):  # one row per step is free, a mean in one step is not
        return sum(max(0.0, round_.cost(1 << 20) / (1 << 20) - 1) for round_ in graph.rounds) / graph.period

    names = [level.graph.name for level in frontier(16)]
    assert names[:2] == ["periodic:every=1,bits=8", "periodic:every=2,bits=8"]
    assert not any("gap" in name for name in names)  # a mean of all in 8 bits takes half of what one peer takes
    assert [level.graph.name for level in frontier(16, hidden)] == ["periodic:every=1,bits=8"]  # and can be hidden as well


def test_periodic_graphs():
    graph = graphs.parse("periodic:every=3", 5)
    assert [round_.degree for round_ in graph.rounds] == [0, 0, 4]
    graph = graphs.parse("periodic:every=4,gap=1", 8)
    assert graph.period == 12
    assert [round_.degree for round_ in graph.rounds[:4]] == [1, 1, 1, 7]
    assert graph.rounds[4] == graphs.one_peer_exponential(8).round(4)
    assert graphs.periodic(8, 1).cost(100) == graphs.complete(8).cost(100)
    with pytest.raises(GossamerError, match="every=0 is out of range"):
        graphs.parse("periodic:every=0", 8)
    with pytest.raises(GossamerError, match="gap=-1 is out of range"):
        graphs.parse("periodic:gap=-1", 8)


# --- What is seen ------------------------------------------------------------------------------------------------------------------


def look(x, learnt=()):
    block = Block([("x", nn.Parameter(x[0]), False)], len(x), x.device)
    block.x.copy_(x)
    mixer, rows = Mixer(len(x)), Parameters([block], in_place=False)
    mixer.probe = Probe(None, lambda: 0.25, lambda: learnt)
    mixer.start(Mean(len(x)), 7, rows).into(rows)
    return mixer.probe


def test_a_sight_is_the_distance_to_the_mean_and_its_length():
    x = torch.randn(6, 16) + 3  # few columns, so all are looked at
    probe = look(x, (1.0, 2.0))
    seen = probe.taken()
    mean = x.mean(0)
    assert seen.distance == pytest.approx(float((x - mean).square().sum(1).mean().sqrt()), rel=1e-5)
    assert seen.norm == pytest.approx(float(mean.norm()), rel=1e-5)
    assert (seen.step, seen.rate, seen.carried) == (7, 0.25, (1.0, 2.0))
    assert probe.taken() is None


def test_a_sample_of_many_columns_is_enough():
    scale = torch.rand(200_000) ** 4  # layers differ
    x = scale * (1 + 0.05 * torch.randn(4, 200_000))
    assert sampled(200_000) == sample(x).shape[1] < 5000
    seen, mean = look(x).taken(), x.mean(0)
    whole = float((x - mean).square().sum(1).mean().sqrt() / mean.norm())
    assert seen.distance / seen.norm == pytest.approx(whole, rel=0.1)


# --- What follows -----------------------------------------------------------------------------------------------------------------


class Team:
    """Replicas that a step drives apart by σ(step) times the learning rate, each in a direction of its own (as with much momentum) or in a
    new one each time; and an AdaAuto that sees it. ``unstable``: left alone, they drive each other apart as well."""

    def __init__(self, rate, sigma=lambda t: 1.0, n=16, noise=0.0, straight=True, unstable=0.0, wide=400):
        self.ada, self.rate, self.sigma, self.rng = AdaAuto(n), rate, sigma, random.Random(3)
        self.noise, self.straight, self.unstable = noise, straight, unstable
        self.generator = torch.Generator().manual_seed(3)
        self.x, self.drift, self.rows = torch.zeros(n, wide), self.direction(n, wide), 0.0

    def direction(self, n, wide):
        return torch.randn(n, wide, generator=self.generator) / math.sqrt(wide)

    def run(self, steps, first=0):
        for t in range(first, first + steps):
            round_ = self.ada.graph(t).round(t)
            drift = self.drift if self.straight else self.direction(*self.drift.shape)
            far = self.rate(t) * self.sigma(t) * math.exp(self.noise * self.rng.gauss(0, 1))
            x = self.x + far * drift + self.unstable * (self.x - self.x.mean(0))
            if isinstance(round_, Mean):
                apart = float((x - x.mean(0)).square().sum(1).mean().sqrt())
                self.ada.observe(Sight(t, apart, 1.0, self.rate(t), self.ada.learnt()))
            self.x = mixing.mix(round_, x, torch.empty_like(x))
            self.rows += round_.cost(1 << 20) / (1 << 20)
        return self.ada

    @property
    def every(self):
        return self.ada.levels[self.ada.level].every


def cosine(t, steps):
    return 0.1 * (1 + math.cos(math.pi * t / steps)) / 2


@pytest.mark.parametrize("straight", [True, False])
def test_a_learning_rate_that_falls_needs_fewer_averages(straight):
    team = Team(lambda t: cosine(t, 2000), straight=straight)
    changes = team.run(2000).changes
    assert [change.graph for change in changes] == [level.graph.name for level in team.ada.levels[: len(changes)]]
    assert team.every >= 12
    assert "apart by" in changes[-1].reason
    assert 0.17 < team.rows / 2000 / (2 * 15 / 16) < 0.23  # of what an all-reduce takes: 0.25 with a mean in every step


def test_averages_return_with_the_learning_rate():
    team = Team(lambda t: 0.1 if t < 50 or t >= 500 else 0.001)
    team.run(500)
    sparse = team.every
    assert sparse >= 4
    team.run(2 * sparse, 500)
    assert team.every == 1
    assert 500 <= team.ada.changes[-1].step <= 500 + 2 * sparse


def test_averages_return_with_disagreement():
    team = Team(lambda t: 0.1 if t < 50 else 0.005, lambda t: 1.0 if t < 200 else 2.0)
    team.run(200)
    assert team.every == 2
    team.run(8, 200)
    assert team.every == 1
    assert "disagreement returns" in team.ada.changes[-1].reason
    team.run(100, 208)
    assert team.every == 2  # that is what is usual now


def test_replicas_that_can_not_be_left_alone_are_hardly_ever():
    team = Team(lambda t: 0.1 if t < 50 else 0.005, unstable=3.0)
    team.run(1000)
    assert team.rows / 1000 > 0.9 * 65 / 256 * 2 * 15 / 16
    assert 2 < len(team.ada.changes) < 30


@pytest.mark.parametrize("straight", [True, False])
def test_noise_does_not_make_it_flap(straight):
    quiet, noisy = (Team(lambda t: 0.1 * 0.998**t, noise=noise, straight=straight) for noise in (0.0, 0.2))
    quiet.run(1500)
    noisy.run(1500)
    assert len(noisy.ada.changes) <= len(quiet.ada.changes) + 4
    steady = Team(lambda t: 0.1 if t < 50 else 0.005, noise=0.2, straight=straight)
    assert len(steady.run(1000).changes) <= 6  # with one return


def test_a_warm_up_changes_nothing():
    team = Team(lambda t: 0.001 * t)
    team.run(100)
    assert len(team.ada.changes) == 1


def test_replicas_that_never_differ_are_no_reason_for_anything():
    ada = AdaAuto(8)
    for step in range(3):
        ada.observe(Sight(step, 0.0, 0.0, 0.1, ada.learnt()))
    assert ada.level == 0


def test_what_was_learnt_survives_a_change_of_size_and_a_resume():
    team = Team(lambda t: 0.1 * 0.98**t)
    ada = team.run(300)
    assert ada.level > 2
    smaller = ada.sized(12)
    smaller.succeed(ada)
    assert smaller.level == 0
    assert smaller.learnt() == (0, ada.usual, ada.fastest, ada.patience)
    assert smaller.changes is ada.changes
    again = schedule("ada-auto", 16)
    again.load_state_dict(ada.state_dict())
    assert again.state_dict() == ada.state_dict()
    for twin in (ada, again):
        twin.observe(Sight(2 * 300, 0.5, 1.0, 0.1, ada.learnt()))
    assert again.level == ada.level


def test_as_people_write_it():
    assert schedule("ada-auto", 8).describe() == "ada-auto"
    assert schedule("ada-auto:tolerance=0.25", 8).describe() == "ada-auto:tolerance=0.25"
    with pytest.raises(GossamerError, match="no parameter 'k0'; it takes tolerance"):
        schedule("ada-auto:k0=3", 8)
    with pytest.raises(GossamerError, match="tolerance=0.0 is out of range"):
        schedule("ada-auto:tolerance=0", 8)


# --- In training ------------------------------------------------------------------------------------------------------------------

SETTINGS = Settings(
    8,
    12,
    8,
    optimizer=Recipe("sgd", 0.2, {"momentum": 0.9}),
    learning_rate=LearningRate(0.2, shape=WarmupCosine()),
    backend="loop",
)


@pytest.mark.parametrize("order", ["dsgd-atc", "dsgd-awc"])
def test_training_with_it_resumes_to_the_bit(order, tmp_path):
    def make():
        return Trainer(task(mlp), replace(SETTINGS, algorithm=order), "ada-auto:tolerance=0.65")

    first, second = stopped_and_loaded(make, 67, tmp_path / "a.ckpt")
    second.run()
    assert torch.equal(first.replicas.blocks[0].x, second.replicas.blocks[0].x)
    assert first.schedule.changes == second.schedule.changes
    assert len(first.schedule.changes) > 3
    full = Trainer(task(mlp), SETTINGS, "complete")
    full.run()
    assert first.bytes < 0.8 * full.bytes
    assert first.value() > full.value() - 0.05


@pytest.mark.parametrize("order", ["dsgd-awc", "dsgd-atc"])
def test_parameters_of_two_precisions_are_looked_at_once_in_a_step(order):
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.scale = nn.Linear(4, 300), nn.Parameter(torch.ones(300, dtype=torch.float64))

        def forward(self, x):
            return self.a(x) * self.scale.float()

    generator = torch.Generator().manual_seed(0)
    data = torch.randn(64, 4, generator=generator), torch.randint(3, (64,), generator=generator)
    settings = Settings(4, 1, 4, algorithm=order, optimizer=Recipe("sgd", 0.1), backend="loop")
    trainer = Trainer(Task("two", Two, data, data), settings, "ada-auto")
    assert len(trainer.replicas.blocks) == 2
    looks, finish = [], trainer.mixer.probe.finish
    trainer.mixer.probe.finish = lambda block, step: (looks.append((step, block)), finish(block, step))
    trainer.run(until=3)
    assert looks == [(step, trainer.replicas.blocks[0]) for step in range(3)]


@pytest.mark.parametrize("kind", ["adamw", "rmsprop"])
def test_where_parameters_are_not_to_be_averaged_it_is_all_reduce_in_8_bits(kind, tmp_path):
    settings = Settings(4, 1, 8, optimizer=Recipe(kind, 0.01))
    auto = Trainer(task(mlp), settings, "ada-auto")
    same = Trainer(task(mlp), replace(settings, algorithm="all-reduce:wire=8bits,feedback=true"))
    auto.run(until=5)
    auto.save(tmp_path / "run")
    again = Trainer(task(mlp), settings, "ada-auto")
    assert again.load(tmp_path / "run")
    for trainer in (auto, again, same):
        trainer.run()
    assert torch.equal(auto.replicas.blocks[0].x, same.replicas.blocks[0].x)
    assert torch.equal(auto.replicas.blocks[0].x, again.replicas.blocks[0].x)
    assert auto.bytes == same.bytes
    with pytest.raises(GossamerError, match="all-reduce averages gradients, so replicas must start the same"):
        Trainer(task(mlp), replace(settings, init="different"), "ada-auto")
