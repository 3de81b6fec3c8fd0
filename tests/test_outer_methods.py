"""Outer steps and means in few bits, held to their equations, to what they reduce to, and to what they refuse."""

import dataclasses

import pytest
import torch

from gossamer import GossamerError, Recipe, Settings, Trainer, graphs
from gossamer.members.outages import Outage
from gossamer.methods import Averaging, NoLoCo, method
from gossamer.rows.vector import Vector
from gossamer.rows.wires import WIRES
from gossamer.transport.agreed import AgreedMean
from gossamer.transport.mixer import Mixer
from tests.models import mlp, task
from tests.test_methods import COLUMNS, A, H, N, Run, after, close

LR = 0.1


def same_start(rule, count, **options):
    """As ``after``, but all replicas begin as one: outer methods do."""
    run = Run(rule, "complete", **options)
    with torch.no_grad():
        run.block.x.copy_(torch.linspace(-1, 1, COLUMNS, dtype=torch.float64).expand_as(run.x))
    run.rule.begin(run.now)
    for _ in run.steps(count):
        pass
    return run.x.clone()


def local_steps(x, count):
    for _ in range(count):
        x = x - LR * (H * (x - A))
    return x


# --- What they reduce to ------------------------------------------------------------------------------------------------------


def test_every_step_local_is_atc_on_complete():
    assert torch.equal(after(30, "local:H=1", "complete"), after(30, "atc", "complete"))


def test_local_is_averaging_in_every_so_many_steps():
    toy = task(mlp)
    made = []
    for settings in ({"algorithm": "local:H=3"}, {"algorithm": "atc", "local_steps": 3}):
        trainer = Trainer(toy, Settings(4, 2, 8, optimizer=Recipe("sgd", 0.05), backend="loop", **settings))
        trainer.run(until=7)
        made.append((trainer.replicas.blocks[0].x.clone(), trainer.bytes))
    assert torch.equal(made[0][0], made[1][0])
    assert made[0][1] == made[1][1]


@pytest.mark.parametrize("rule", ["diloco:lr=1,momentum=0,H=4", "slowmo:lr=1,beta=0,H=4", "local:H=4,wire=float32"])
def test_without_momentum_outer_steps_are_local(rule):
    close(same_start(rule, 22), same_start("local:H=4", 22), 1e-13)
    close(same_start(f"{rule},delay=3", 22), same_start("local:H=4,delay=3", 22), 1e-13)


# --- Their equations ----------------------------------------------------------------------------------------------------------


def test_diloco_is_nesterov_on_the_mean_movement():
    phi = torch.nn.Parameter(torch.linspace(-1, 1, COLUMNS, dtype=torch.float64))
    outer = torch.optim.SGD([phi], 0.7, momentum=0.9, nesterov=True)
    for _ in range(5):
        phi.grad = phi.detach() - local_steps(phi.detach().expand(N, -1), 4).mean(0)
        outer.step()
    close(same_start("diloco:H=4", 20), phi.detach().expand(N, -1))


def test_a_delayed_outer_step_keeps_what_was_trained_meanwhile():
    x = phi = torch.linspace(-1, 1, COLUMNS, dtype=torch.float64).expand(N, -1)
    momentum = torch.zeros_like(x)
    for outer in range(5):
        x = local_steps(x, 4 if outer == 0 else 2)
        sent = x
        x = local_steps(x, 2)
        moved = (phi - sent).mean(0, keepdim=True)
        momentum = 0.9 * momentum + moved
        phi = phi - 0.7 * (moved + 0.9 * momentum)
        x = phi + x - sent
    close(same_start("diloco:H=4,delay=2", 22), x)


@pytest.mark.parametrize("delay", [0, 1])
def test_each_fragment_takes_outer_steps_of_its_own(delay):
    x = phi = sent = torch.linspace(-1, 1, COLUMNS, dtype=torch.float64).expand(N, -1)
    x, phi, sent, momentum = x.clone(), phi.clone(), sent.clone(), torch.zeros_like(x)
    for t in range(22):
        x = local_steps(x, 1)
        for part, first in ((slice(0, 2), 0), (slice(2, 5), 1), (slice(5, 8), 2)):
            if (t + 1 - first) % 4 == 0:
                sent[:, part] = x[:, part]
            if (t + 1 - first) % 4 == delay and t >= delay:
                moved = (phi - sent)[:, part].mean(0, keepdim=True)
                momentum[:, part] = 0.9 * momentum[:, part] + moved
                phi[:, part] -= 0.7 * (moved + 0.9 * momentum[:, part])
                x[:, part] += phi[:, part] - sent[:, part]
    close(same_start(f"diloco:H=4,delay={delay},fragments=3", 22), x)


def test_slowmo_measures_momentum_in_units_of_the_learning_rate():
    rates = [0.1, 0.05, 0.02, 0.0, 0.1]
    run = Run("slowmo:H=1,beta=0.5", "complete")
    phi, u = torch.ones(N, COLUMNS, dtype=torch.float64), 0.0
    with torch.no_grad():
        run.block.x.fill_(1.0)
    run.rule.begin(run.now)
    for now, rate in zip(run.steps(5, lambda t: rates[t]), rates, strict=True):
        moved = (rate * H * (phi - A)).mean(0, keepdim=True)
        if rate:
            u = 0.5 * u + moved / rate
            phi = phi - rate * u
        close(now.x, phi)


def test_noloco_follows_its_equation_with_the_peers_of_each_step():
    rule = NoLoCo(H=3)
    x = phi = torch.linspace(-1, 1, COLUMNS, dtype=torch.float64).expand(N, -1)
    m = torch.zeros_like(x)
    for outer in range(6):
        x = local_steps(x, 3)
        w = torch.from_numpy(rule.peers(N, 3 * outer + 2).matrix())
        m = 0.5 * m + 0.7 * (w @ (x - phi)) + 0.7 * (w @ phi - phi)
        phi = phi + m
        x = phi
    close(same_start("noloco:H=3", 18), x)


def test_with_two_replicas_noloco_is_an_outer_step_on_the_mean():
    """That of slowmo, whose momentum is the same where the learning rate is."""
    close(same_start("noloco:H=3", 20, n=2), same_start("slowmo:H=3,lr=0.7,beta=0.5", 20, n=2), 1e-12)


@pytest.mark.parametrize("n", [1, 2, 5, 8])
def test_peers_are_pairs_that_all_replicas_know(n):
    drawn = [NoLoCo().peers(n, turn) for turn in range(40)]
    assert drawn == [NoLoCo().peers(n, turn) for turn in range(40)]
    for one in drawn:
        assert all(one.source[one.source[i]] == i for i in range(n))
        assert sum(one.source[i] == i for i in range(n)) == n % 2
    if n > 2:
        assert {one.source[0] for one in drawn} == set(range(n)) if n % 2 else set(range(1, n))
        assert drawn != [NoLoCo(seed=1).peers(n, turn) for turn in range(40)]


# --- Wires --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wire", ["bfloat16", "8bits", "4bits"])
def test_what_a_wire_loses_of_a_movement_comes_with_the_next(wire):
    """The sum of what has arrived is the sum of the movements, but for what the last one has lost."""
    n, columns, generator = 5, 300, torch.Generator().manual_seed(1)
    lost, sent, seen = torch.zeros(n, columns), torch.zeros(n, columns), torch.zeros(n, columns)
    for turn in range(30):
        moved = torch.randn(n, columns, generator=generator)
        sent += moved
        mean = AgreedMean(Mixer(n), [Vector([moved + lost])], WIRES[wire], turn)
        seen += mean.own[0].tensors[0]
        lost = mean.lost[0].tensors[0]
        assert float((sent - seen - lost).abs().max()) < 1e-4
    unit = {"bfloat16": 2**-7, "8bits": 2**-6, "4bits": 2**-2}[wire]
    assert 0 < float(lost.abs().max()) <= 2 * unit * float((moved + lost).abs().max())


@pytest.mark.parametrize(("wire", "units"), [("8bits", 1 / 64), ("4bits", 2 / 7)])
def test_a_mean_in_few_bits_is_alike_unbiased_and_within_its_bound(wire, units):
    n, columns, generator = 4, 64, torch.Generator().manual_seed(2)
    rows = torch.randn(n, columns, generator=generator)
    total = torch.zeros(columns)
    for turn in range(400):
        target = Vector([torch.zeros(n, columns)])
        AgreedMean(Mixer(n), [Vector([rows])], WIRES[wire], turn).into(target)
        made = target.tensors[0]
        assert (made == made[0]).all()
        # Each row is off by a unit at most, which is so much of its largest number; so is their mean, when it is rounded once more.
        bound = units * (rows.abs().amax(1).mean() + (1 + units) * rows.abs().amax(1).mean())
        assert float((made[0] - rows.mean(0)).abs().max()) <= bound
        total += made[0]
    assert float((total / 400 - rows.mean(0)).abs().max()) < 0.03 * float(rows.abs().max())


@pytest.mark.parametrize(("wire", "far"), [("8bits", 0.02), ("4bits", 0.3)])
def test_on_a_coarse_wire_outer_steps_go_where_those_in_full_precision_go(wire, far):
    for rule in ("local:H=4", "diloco:H=4", "slowmo:H=4"):
        whole, coarse = (same_start(f"{rule}{extra}", 400) for extra in ("", f",wire={wire}"))
        assert (coarse == coarse[0]).all()
        assert float((coarse - whole).abs().max()) < far, rule


def test_bytes_are_those_of_the_codes():
    toy, params = task(mlp), sum(p.numel() for p in mlp().parameters())
    found = {}
    for rule in (
        "local:H=4",
        "local:H=4,wire=8bits",
        "local:H=4,wire=4bits",
        "local:H=4,moments=mean",
        "noloco:H=4",
        "all-reduce",
    ):
        trainer = Trainer(toy, Settings(4, 2, 8, algorithm=rule, optimizer=Recipe("adam", 0.01), backend="loop"))
        trainer.run(until=8)
        found[rule] = trainer.bytes / 8 / params / 4
    assert found["all-reduce"] == pytest.approx(1.5)
    assert found["local:H=4"] == pytest.approx(1.5 / 4)
    assert found["local:H=4,wire=8bits"] == pytest.approx(1.5 / 4 * 65 / 256, rel=0.05)
    assert found["local:H=4,wire=4bits"] == pytest.approx(1.5 / 4 * 33 / 256, rel=0.05)
    assert found["local:H=4,moments=mean"] == pytest.approx(4.5 / 4)
    assert found["noloco:H=4"] == pytest.approx(1 / 4)


# --- One peer in 8 bits -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("graph", ["one-peer-exponential", "one-peer-ring"])
def test_on_an_exact_wire_choco_with_a_cycle_of_copies_is_gossip(graph):
    close(after(40, "choco:cycle=3,wire=float32,gamma=1", graph, n=8), after(40, "atc", graph, n=8), 1e-12)


def test_one_peer_in_8_bits_keeps_the_mean_and_agrees():
    run = Run("choco:cycle=3", "one-peer-exponential", n=8, lr=0.0)
    before = run.x.mean(0)
    for _ in run.steps(60):
        close(run.x.mean(0), before, 1e-6)
    assert set(run.now.state) == {"copy", "mixed", "copy.1", "mixed.1", "copy.2", "mixed.2"}
    assert float((run.x - before).abs().max()) < 1e-3
    assert run.now.bytes == 60 * 129  # one code of 128 numbers a step


# --- Moments ------------------------------------------------------------------------------------------------------------------


def adam_after(rule, count, recipe=None, **settings):
    recipe = recipe or Recipe("adamw", 0.01)
    trainer = Trainer(task(mlp), Settings(4, 4, 8, algorithm=rule, optimizer=recipe, backend="loop", **settings))
    trainer.run(until=count)
    (optimizer,) = trainer.optimizer.optimizers
    return trainer, list(optimizer.state.values())


def test_moments_are_kept_averaged_or_begun_anew():
    _, own = adam_after("local:H=4", 4)
    _, mean = adam_after("local:H=4,moments=mean", 4)
    for name in ("exp_avg", "exp_avg_sq"):
        close(mean[0][name], own[0][name].mean(0).expand_as(own[0][name]), 1e-8)
        assert not torch.equal(own[0][name][0], own[0][name][1])
    assert adam_after("local:H=4,moments=reset", 4)[1] in ([], [{}])
    trainer, state = adam_after("local:H=4,moments=reset", 6)
    assert float(state[0]["step"]) == 2
    assert trainer.replicas.blocks[0].x.isfinite().all()


@pytest.mark.parametrize("rule", ["local:H=4,moments=mean", "noloco:H=4,moments=mean"])
def test_moments_are_averaged_wherever_the_optimizer_has_them(rule):
    """Weight decay that spares norms splits the block's rows; momentum is a moment too."""
    one, _ = adam_after(rule, 8, Recipe("adamw", 0.01, {"weight_decay": 0.0}))
    other, _ = adam_after(rule, 8, Recipe("adamw", 0.01, {"weight_decay": 0.0}, spare_norms=True))
    close(one.replicas.blocks[0].x, other.replicas.blocks[0].x, 1e-6)
    trainer, state = adam_after(rule, 4, Recipe("sgd", 0.01, {"momentum": 0.9}))
    buffer = state[0]["momentum_buffer"]
    pairs = trainer.method.peers(4, 3).source if rule.startswith("noloco") else [0] * 4
    for i, j in enumerate(pairs):
        close(buffer[i], buffer[j], 1e-6)


# --- In the Trainer -----------------------------------------------------------------------------------------------------------

CROSSING = [
    "diloco:H=4,delay=2",
    "diloco:H=5,delay=4,wire=8bits",
    "local:H=4,delay=3,wire=4bits",
    "noloco:H=4,delay=3",
    "diloco:H=5,delay=4,wire=8bits,fragments=3",
    "noloco:H=4,delay=2,fragments=2",
    "local:H=5,delay=2,fragments=2,moments=shared",
]


@pytest.mark.parametrize("rule", CROSSING)
@pytest.mark.parametrize("at", [4, 5, 7, 9])
def test_a_resume_in_the_middle_of_a_period_or_an_exchange_is_exact(rule, at, tmp_path):
    settings = Settings(4, 4, 8, algorithm=rule, optimizer=Recipe("adamw", 0.01), backend="loop")
    straight = Trainer(task(mlp), settings)
    straight.run(until=15)
    first, second = Trainer(task(mlp), settings), Trainer(task(mlp), settings)
    first.run(until=at)
    first.save(tmp_path / "checkpoint")
    first.run(until=15)
    assert second.load(tmp_path / "checkpoint")
    second.run(until=15)
    for trainer in (first, second):
        assert torch.equal(trainer.replicas.blocks[0].x, straight.replicas.blocks[0].x)


@pytest.mark.parametrize("rule", CROSSING)
def test_replicas_that_fail_and_come_back_during_an_exchange_begin_at_the_same_point(rule):
    away = (Outage(1, 5, 9), Outage(3, 8, 13))
    trainer = Trainer(
        task(mlp), Settings(4, 4, 8, algorithm=rule, optimizer=Recipe("adamw", 0.01), backend="loop", outages=away)
    )
    for step in range(1, 19):
        trainer.run(until=step)
        anchor = trainer.now.state["anchor"].tensors[0]
        assert len(anchor) == len(trainer.members)
        assert anchor.isfinite().all()
        assert not trainer.method.alike or (anchor == anchor[0]).all(), step


# --- What is refused ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: method("diloco:H=0"), "method 'diloco': H=0 is out of range; it is in \\[1, inf\\)"),
        (lambda: method("local:delay=8"), "method 'local': delay=8 is out of range; it is in \\[0, 8\\)"),
        (lambda: method("diloco:lr=0"), "method 'diloco': lr=0.0 is out of range"),
        (lambda: method("diloco:H=4,fragments=5"), "method 'diloco': fragments=5 is out of range; it is in \\[1, 4\\]"),
        (
            lambda: method("diloco:fragments=2,moments=reset"),
            "'diloco': moments=reset begins all moments anew, and fragments=2",
        ),
        (lambda: method("slowmo:beta=1"), "method 'slowmo': beta=1.0 is out of range"),
        (
            lambda: method("diloco:feedback=true"),
            "'diloco': feedback=true adds what a wire has lost, and float32 loses nothing; add wire=8bits",
        ),
        (lambda: method("all-reduce:feedback=true"), "'all-reduce': feedback=true adds .*add wire=8bits or 4bits"),
        (lambda: method("noloco:wire=8bits"), "method 'noloco:wire=8bits': wire='8bits' is not float32, bfloat16"),
        (lambda: method("noloco:wire=bfloat16,feedback=true"), "'noloco': x travels as .*leave it out"),
        (lambda: method("diloco:delay=1,moments=mean"), "'diloco': moments=mean is done at once, and delay=1 is later"),
        (
            lambda: Averaging.of("all-reduce", "diloco"),
            "graph='all-reduce' and method='diloco' are two methods; give one of them",
        ),
        (lambda: Averaging.of("ring", "diloco"), "graph='ring': method 'diloco' takes no graph; .* Leave the graph out"),
        (lambda: Averaging.of("diloco:H=4", "all-reduce"), "are two methods; give one of them"),
        (
            lambda: Averaging.of("complete", "diloco", every=4),
            "local_steps=4: method 'diloco' has a period of its own; write 'diloco:H=4'",
        ),
        (
            lambda: Averaging.of("complete", "diloco", wire="fp8"),
            "wire='fp8' is not known; rows travel as 'float32' or 'bfloat16' or '8bits' or '4bits'",
        ),
        (
            lambda: Averaging.of("ring", "atc", wire="8bit"),
            "'8bits' is not for these rows.*; rows travel as 'float32' or 'bfloat16'",
        ),
        (lambda: Averaging.of("all-reduce", None, wire="sign"), "wire='sign' is not for these rows"),
        (lambda: method("choco:cycle=2,p=2"), "'choco': cycle=2 is for order=a and p=1"),
        (lambda: method("choco:cycle=2,order=b"), "'choco': cycle=2 is for order=a and p=1"),
        (
            lambda: method("choco").refuse(graphs.parse("one-peer-exponential", 8), ()),
            "'choco' needs the same W in every step, and 'one-peer-exponential' has 3; use ring or exponential, or choco:cycle=3",
        ),
        (lambda: method("diloco + pga").check(graphs.parse("complete", 4)), None),
    ],
)
def test_what_makes_no_sense_is_refused_in_one_line(make, why):
    if why is None:
        assert "leave one out" in make()
        return
    with pytest.raises(GossamerError, match=why) as caught:
        make()
    assert "\n" not in str(caught.value)


def test_replicas_that_start_differently_have_no_common_point():
    settings = Settings(4, 1, 8, algorithm="diloco", init="different")
    with pytest.raises(GossamerError, match="diloco takes outer steps from one point, so replicas must start the same"):
        Trainer(task(mlp), settings)


def test_a_method_without_a_graph_may_stand_in_its_place():
    for made in (Averaging.of("diloco:H=4", None, wire="8bit"), Averaging.parse("diloco:H=4, 8bits")):
        assert made.method == method("diloco:H=4,wire=8bits")
        assert (made.graph, made.wire) == ("complete", "float32")
    assert Averaging.parse("all-reduce, 8bit").method == method("all-reduce:wire=8bits")
    assert dataclasses.replace(method("diloco"), H=4).describe() == "diloco:H=4"
