"""Training: the equalities that hold by construction, resume, and what goes wrong."""

import copy
import itertools
import math
from typing import ClassVar

import pytest
import torch
import torch.nn.functional as F

from gossamer import (
    Ada,
    GossamerError,
    LearningRate,
    Metric,
    Recipe,
    Settings,
    StepDecay,
    Task,
    Trainer,
    TrainingDiverged,
    WarmupCosine,
    graphs,
)
from gossamer.checkpoints import checkpoint
from gossamer.data.sampling import Reshuffled
from gossamer.optim import BlockOptimizer
from gossamer.rows.replicas import Replicas
from tests.models import Cnn, Dropout, Lstm, mlp, stopped_and_loaded, task


def settings(**changes):
    return Settings(**{"replicas": 8, "epochs": 5, "batch": 8, "backend": "loop"} | changes)


def rows(trainer):
    return [block.x.clone() for block in trainer.replicas.blocks]


# --- Equalities ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [2, 5, 8])
def test_adapt_then_combine_on_the_complete_graph_is_all_reduce(n):
    both = []
    for name in ("dsgd-atc", "allreduce"):
        trainer = Trainer(task(), settings(replicas=n, algorithm=name, optimizer=Recipe("sgd", 0.2)), "complete")
        trainer.run(until=50)
        both.append(trainer.replicas.blocks[0].x)
    assert trainer.step == 50
    torch.testing.assert_close(both[0], both[1], rtol=0, atol=1e-6)


RECIPES = [
    Recipe("sgd", 0.1),
    Recipe("sgd", 0.1, {"momentum": 0.9, "nesterov": True, "weight_decay": 1e-3}),
    Recipe("adam", 1e-3, {"weight_decay": 1e-2}),
    Recipe("adamw", 1e-3, clip=0.5),
    Recipe("rmsprop", 1e-3),
]


def plain_training(build, recipe, data, steps, batch, seed):
    """Ordinary PyTorch: one module, its optimizer, its loop."""
    module = Replicas(build, 1, seed=seed).template  # the same start
    module = copy.deepcopy(module).train()
    optimizer = recipe.kind()(module.parameters(), lr=recipe.lr, **recipe.options)
    order = Reshuffled(data, 1, batch, seed)
    for t in range(steps):
        x, y = (tensor[0] for tensor in order.batch(t))
        optimizer.zero_grad()
        F.cross_entropy(module(x), y).backward()
        if recipe.clip is not None:
            torch.nn.utils.clip_grad_norm_(module.parameters(), recipe.clip)
        optimizer.step()
    return module


@pytest.mark.parametrize("algorithm", ["dsgd-atc", "dsgd-awc", "allreduce"])
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda r: f"{r.name}{len(r.options)}")
@pytest.mark.parametrize("build", [mlp, Cnn, Lstm])
def test_one_replica_is_plain_pytorch_bit_for_bit(build, recipe, algorithm):
    data = task(build)
    trainer = Trainer(data, settings(replicas=1, algorithm=algorithm, optimizer=recipe, batch=16, seed=4), "ring")
    trainer.run(until=30)
    module = plain_training(build, recipe, data.train, 30, 16, 4)
    with trainer.replicas.replica(0) as mine:
        for name, value in module.state_dict().items():
            assert torch.equal(mine.state_dict()[name], value), name


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("build", [mlp, Cnn, Lstm])
def test_loop_and_vmap_agree_over_a_run(build):
    results = []
    for backend in ("loop", "vmap:3"):
        trainer = Trainer(task(build), settings(replicas=4, backend=backend, optimizer=Recipe("sgd", 0.05)), "ring")
        trainer.run(until=20)
        results.append(trainer)
    a, b = results
    torch.testing.assert_close(a.replicas.blocks[0].x, b.replicas.blocks[0].x, rtol=1e-5, atol=1e-5)
    for name, stacked in a.replicas.buffers.items():
        torch.testing.assert_close(stacked, b.replicas.buffers[name], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("graph", ["ring", "one-peer-exponential", "ada"])
@pytest.mark.parametrize("name", ["dsgd-awc", "dsgd-atc"])
def test_both_orders_follow_their_formula(name, graph):
    """x <- W_t x - η_t g(x) and x <- W_t (x - η_t g(x)), written out with the dense matrix, the graph of the moment and the
    learning rate of the moment."""
    rate = LearningRate(0.3, WarmupCosine(warmup=0.2), scaling="sqrt", reference=4)
    made = settings(
        replicas=5, epochs=4, batch=32, algorithm=name, optimizer=Recipe("sgd", 9.0), learning_rate=rate, init="different"
    )
    trainer = Trainer(task(), made, graph)
    assert trainer.batches.steps_per_epoch == 4
    x = trainer.replicas.blocks[0].x.double().clone()
    shadow = Replicas(mlp, 5, backend="loop")
    ada = Ada(5)
    for t in range(14):
        k = ada.k(t // 4, 4)
        now = graphs.parse(graph if graph != "ada" else "complete" if k == 4 else f"lattice:k={k}", 5)
        w, lr = torch.from_numpy(now.matrix(t)), 0.3 * math.sqrt(5 / 4) * WarmupCosine(warmup=0.2).factor(t, 16)
        shadow.blocks[0].x.copy_(x)
        shadow.gradients(task().loss, trainer.batches.batch(t), t)
        g = shadow.blocks[0].grad.double()
        x = w @ x - lr * g if name == "dsgd-awc" else w @ (x - lr * g)
    trainer.run(until=14)
    torch.testing.assert_close(trainer.replicas.blocks[0].x.double(), x, rtol=1e-5, atol=1e-5)
    if graph == "ada":
        assert [(c.step, c.graph) for c in trainer.schedule.changes] == [
            (0, "complete"),
            (8, "lattice:k=3"),
        ]


def test_schedules_see_the_latest_signals_also_after_a_resume(tmp_path):
    class Watcher(Ada):
        seen: ClassVar[list] = []

        def decide(self, now):
            self.seen.append((now.step, dict(now.signals)))
            return super().decide(now)

    made = settings(replicas=4, profile_every=2)
    first = Trainer(task(), made, Watcher(4))
    first.run(until=5)
    first.save(str(tmp_path / "a.ckpt"))
    assert Watcher.seen[0] == (0, {})
    assert Watcher.seen[1][1]["consensus_distance"] > 0
    assert set(Watcher.seen[1][1]) == {"consensus_distance", "gini", "iod", "cv", "qcd"}
    assert Watcher.seen[4][1] != Watcher.seen[2][1]
    second = Trainer(task(), made, Watcher(4))
    second.load(str(tmp_path / "a.ckpt"))
    second.run(until=6)
    assert Watcher.seen[-1] == (5, first.signals)


def test_half_precision_parameters_move():
    for dtype in (torch.bfloat16, torch.float64):
        replicas = Replicas(lambda dtype=dtype: mlp().to(dtype), 4)
        replicas.blocks[0].grad.fill_(1)
        before = replicas.blocks[0].x.clone()
        BlockOptimizer(Recipe("sgd", 0.5), replicas).step()
        assert (replicas.blocks[0].x - before).abs().max() > 0.4


def test_a_nan_gradient_with_a_finite_loss_never_reaches_a_checkpoint(tmp_path):
    def loss(model, x, y):
        value = F.cross_entropy(model(x), y)
        return value + 0 * torch.sqrt(model[1].weight.sum() * (y.sum() < 0))  # sqrt(0) has an infinite slope: 0 · inf = nan

    broken = Task("broken", mlp, task().train, task().test, loss)
    trainer = Trainer(broken, settings(), "ring")
    with pytest.raises(TrainingDiverged, match="parameters of replica 0 are not finite after step 0"):
        trainer.run(save=tmp_path / "a.ckpt", save_every=1)
    assert not (tmp_path / "a.ckpt").exists()


def test_weight_decay_acts_on_the_mixed_parameters_in_adapt_while_combine():
    made = settings(replicas=4, algorithm="dsgd-awc", init="different", optimizer=Recipe("adamw", 0.1, {"weight_decay": 0.5}))
    trainer = Trainer(task(), made, "complete")
    before = trainer.replicas.blocks[0].x.clone()
    trainer.replicas.gradients = lambda loss, batch, step: torch.zeros(4)  # no gradient: only mixing and decay are left
    trainer.run(until=1)
    torch.testing.assert_close(trainer.replicas.blocks[0].x, (1 - 0.1 * 0.5) * before.mean(0).expand(4, -1))


# --- Optimizers on a block -----------------------------------------------------------------------------------------------

ELEMENTWISE = ["sgd", "adam", "adamw", "nadam", "radam", "rmsprop", "adagrad", "adadelta", "adamax", "rprop"]
ELEMENTWISE += ["accumadam", "accumadamw"]


@pytest.mark.parametrize("spare", [False, True])
@pytest.mark.parametrize("name", [*ELEMENTWISE, "adafactor"])
def test_a_block_optimizer_equals_one_optimizer_per_replica(name, spare):
    options = {} if name == "rprop" else {"weight_decay": 0.1}
    recipe = Recipe(name, 0.01, options, clip=1.0, spare_norms=spare and name != "rprop")
    replicas = Replicas(Cnn, 3, init="different")
    modules = []
    for i in range(3):
        with replicas.replica(i) as module:
            modules.append(copy.deepcopy(module))
    mine = BlockOptimizer(recipe, replicas)
    theirs = []
    for module in modules:
        weights = [p for p in module.parameters() if p.ndim > 1]
        rest = [p for p in module.parameters() if p.ndim <= 1]
        groups = [{"params": weights}, {"params": rest} | ({"weight_decay": 0.0} if recipe.spare_norms else {})]
        theirs.append(recipe.kind()(groups, lr=0.01, **options))
    for step in range(8):
        for i, (module, optimizer) in enumerate(zip(modules, theirs, strict=True)):
            for k, (parameter_name, p) in enumerate(module.named_parameters()):
                p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(1000 * step + 10 * i + k))
                replicas.blocks[0].tensors(replicas.blocks[0].grad)[parameter_name][i].copy_(p.grad)
            torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
            optimizer.step()
        mine.clip()
        mine.step()
    for i, module in enumerate(modules):
        with replicas.replica(i) as row:
            for parameter_name, p in module.named_parameters():
                torch.testing.assert_close(row.get_parameter(parameter_name), p, rtol=1e-5, atol=1e-6)


def test_weight_decay_spares_biases_and_norms_only_when_asked():
    for spare in (False, True):
        replicas = Replicas(Cnn, 3, init="different")
        before = replicas.blocks[0].x.clone()
        BlockOptimizer(Recipe("sgd", 1.0, {"weight_decay": 0.5}, spare_norms=spare), replicas).step()
        block = replicas.blocks[0]
        for name, value in block.tensors(block.x).items():
            decays = not spare or name in ("conv.weight", "out.weight")
            torch.testing.assert_close(value, block.tensors(before)[name] * (0.5 if decays else 1.0))


def test_clipping_is_per_replica():
    replicas = Replicas(mlp, 3)
    block = replicas.blocks[0]
    for i, size in enumerate((0.01, 1.0, 100.0)):
        for t in block.rows(block.grad)[i]:
            t.fill_(size)
    BlockOptimizer(Recipe("sgd", 1.0, clip=2.0), replicas).clip()
    norms = block.grad.norm(dim=1)
    torch.testing.assert_close(norms, torch.tensor([0.01 * math.sqrt(block.numel), 2.0, 2.0]))


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        (Recipe("lbfgs"), "'lbfgs' can't run on a block.*several times"),
        (Recipe("muon"), "'muon' can't run on a block.*matrices"),
        (Recipe("sparseadam"), "sparse"),
        (Recipe("sgdd"), "not in torch.optim; use one of sgd, adam"),
        (Recipe("sgd", 0.1, {"momentun": 0.9}), "does not take these options.*momentun"),
        (Recipe("sgd", 0.1, {"momentum": -1}), "does not take these options"),
        (Recipe("sgd", clip=0.0), "clip=0.0"),
    ],
)
def test_optimizers_that_cannot_run_are_refused(recipe, message):
    with pytest.raises(GossamerError, match=message) as caught:
        BlockOptimizer(recipe, Replicas(mlp, 2))
    assert "\n" not in str(caught.value)


# --- Checkpoint and resume -----------------------------------------------------------------------------------------------

RESUME = [
    ("dsgd-atc", "ada", Recipe("sgd", 0.1, {"momentum": 0.9}), Cnn, "auto"),
    ("dsgd-awc", "one-peer-exponential", Recipe("adam", 1e-3, clip=1.0), mlp, "vmap:4"),
    ("allreduce", "complete", Recipe("adamw", 1e-3, {"weight_decay": 0.1}, spare_norms=True), Dropout, "loop"),
    ("dsgd-atc", "torus", Recipe("adafactor", 1e-2), mlp, "tape"),
    ("dsgd-awc", "one-peer-exponential", Recipe("accumadamw", 1e-3, {"accum_iter": 4}, spare_norms=True), Cnn, "loop"),
]


@pytest.mark.parametrize("stop", [1, 7, 10, 23])
@pytest.mark.parametrize(("algorithm", "graph", "recipe", "build", "backend"), RESUME)
def test_a_stopped_run_goes_on_bit_for_bit(tmp_path, algorithm, graph, recipe, build, backend, stop):
    made = settings(algorithm=algorithm, optimizer=recipe, backend=backend, epochs=3, profile_every=3, replicas=8)
    first, second = stopped_and_loaded(lambda: Trainer(task(build), made, graph), stop, tmp_path / "a.ckpt")
    assert second.step == stop
    second.run()
    assert second.step == first.step == 30
    assert second.replicas.backend == first.replicas.backend
    for a, b in zip(rows(first), rows(second), strict=True):
        assert torch.equal(a, b)
    for name, stacked in first.replicas.buffers.items():
        assert torch.equal(stacked, second.replicas.buffers[name])
    assert second.bytes == first.bytes
    assert second.schedule.changes == first.schedule.changes
    for a, b in itertools.zip_longest(first.history, second.history):
        assert (a.value, a.train_loss, a.graph, a.consensus_distance) == (b.value, b.train_loss, b.graph, b.consensus_distance)


def test_checkpoints_of_another_run_or_no_run_are_refused(tmp_path):
    path = tmp_path / "a.ckpt"
    trainer = Trainer(task(), settings(), "ring")
    trainer.save(path)
    with pytest.raises(GossamerError, match="other settings: replicas .8 there, 4 here"):
        Trainer(task(), settings(replicas=4), "ring").load(path)
    with pytest.raises(GossamerError, match="schedule .'ring' there, 'torus' here"):
        Trainer(task(), settings(), "torus").load(path)
    with pytest.raises(GossamerError, match="no checkpoint at"):
        trainer.load(tmp_path / "missing")
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(GossamerError, match="damaged or not a checkpoint"):
        trainer.load(path)
    path.write_bytes(b"hello")
    with pytest.raises(GossamerError, match="damaged or not a checkpoint"):
        trainer.load(path)


def test_a_failed_save_keeps_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "a.ckpt"
    checkpoint.save(path, {"x": torch.ones(3)}, {"v": 1})
    monkeypatch.setattr(checkpoint.os, "replace", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(GossamerError, match="can't be written: disk full; the one before it is kept"):
        checkpoint.save(path, {"x": torch.zeros(3)}, {"v": 2})
    assert checkpoint.load(path)[1] == {"v": 1}
    assert list(tmp_path.iterdir()) == [path]


def test_a_nan_on_one_replica_is_named_and_the_checkpoint_kept(tmp_path):
    made = settings(epochs=2)
    trainer = Trainer(task(), made, "ring")
    path = tmp_path / "a.ckpt"
    trainer.run(until=10, save=path)
    good = [x.clone() for x in rows(trainer)]
    original = trainer.batches.batch
    poisoned = original(12)[0].clone()
    poisoned[5, 0] = float("nan")
    trainer.batches.batch = lambda t, *rows: (poisoned, original(t)[1]) if t == 12 else original(t)
    with pytest.raises(TrainingDiverged, match="replica 5 is nan at step 12 .epoch 1."):
        trainer.run(save=path)
    resumed = Trainer(task(), made, "ring")
    resumed.load(path)
    assert resumed.step == 10
    for a, b in zip(good, rows(resumed), strict=True):
        assert torch.equal(a, b)


# --- The loop itself -----------------------------------------------------------------------------------------------------


def test_it_learns_and_reports_every_epoch():
    seen, profiles = [], []
    made = settings(optimizer=Recipe("sgd", 0.2, {"momentum": 0.9}), backend="auto", profile_every=5)
    trainer = Trainer(task(), made, Ada(8), on_epoch=seen.append, on_profile=profiles.append)
    history = trainer.run()
    assert history == seen
    assert [record.epoch for record in history] == [0, 1, 2, 3, 4]
    assert history[-1].value > 0.9
    assert history[-1].train_loss < history[0].train_loss
    assert [p.step for p in profiles] == list(range(0, 50, 5))
    assert profiles[0].norms.shape == (8, 4)
    result = trainer.evaluate()
    assert result.worst <= result.mean <= 1
    assert history[-1].bytes == 50 * round(1.75 * trainer.replicas.row_bytes)  # every lattice at n=8 goes by slices
    assert [record.degree for record in history] == [7, 6, 4, 4, 2]
    one_peer = Trainer(task(), settings(epochs=1), "one-peer-exponential")
    assert one_peer.run()[-1].bytes == 10 * one_peer.replicas.row_bytes


def test_all_replicas_are_evaluated_or_some_and_those_that_are_alike_once(monkeypatch):
    ring = Trainer(task(), settings(epochs=2), "ring")
    ring.run()
    values = []
    for i in range(8):
        with ring.replicas.replica(i) as model:
            values.append(ring.task.metric.of(model, ring.test))
    assert len(set(values)) > 2
    assert ring.evaluate().mean == pytest.approx(sum(values) / 8)
    assert ring.evaluate(3).worst == min(values[0], values[2], values[5])
    assert ring.evaluate(99).worst == min(values)
    complete = Trainer(task(), settings(epochs=2), "complete")
    complete.run()
    asked, of = [], Metric.of
    monkeypatch.setattr(Metric, "of", lambda self, *a: asked.append(1) or of(self, *a))
    result = complete.evaluate()
    assert len(asked) == 3  # one for all replicas, the averaged model, and that on training data
    assert result.worst == result.value == pytest.approx(result.mean)


def test_the_worst_replica_is_the_worst():
    assert Metric("accuracy", None).worst([0.3, 0.1, 0.2]) == 0.1
    assert Metric("perplexity", None, higher_is_better=False).worst([3.0, 1.0, 2.0]) == 3.0
    with pytest.raises(GossamerError, match="test set is empty"):
        Metric("accuracy", None).of(mlp(), (torch.zeros(0, 8, 8), torch.zeros(0)))


def test_profile_is_taken_before_averaging():
    """On the complete graph all replicas are equal after averaging, and differ before it."""
    profiles = []
    for name in ("dsgd-atc", "dsgd-awc", "allreduce"):
        trainer = Trainer(task(), settings(algorithm=name, profile_every=1), "complete", on_profile=profiles.append)
        trainer.run(until=3)
    atc, awc, centralized = (profiles[k + 2].consensus_distance for k in (0, 3, 6))
    assert atc > 0
    assert awc > 0
    assert centralized == 0
    assert all(float(v.max()) == 0 for v in profiles[8].dispersion().values())


@pytest.mark.parametrize("n", [1, 2, 3, 7])
def test_any_number_of_replicas_trains(n):
    for graph in ("ring", "one-peer-exponential", "base:k=1", "ada", "one-peer-ring"):
        trainer = Trainer(task(), settings(replicas=n, epochs=1), graph)
        trainer.run(until=3)
        assert all(torch.isfinite(x).all() for x in rows(trainer))


def test_data_order_is_a_pure_function_of_seed_and_step():
    data = (torch.arange(100),)
    a, b = Reshuffled(data, 4, 5, seed=1), Reshuffled(data, 4, 5, seed=1)
    assert a.steps_per_epoch == 5
    late = a.batch(7)[0]
    for t in range(10):
        b.batch(t)
    assert torch.equal(late, b.batch(7)[0])
    assert sorted(torch.cat([a.batch(t)[0].flatten() for t in range(5)]).tolist()) == list(range(100))
    assert not torch.equal(a.batch(0)[0], a.batch(5)[0])
    assert not torch.equal(a.batch(0)[0], Reshuffled(data, 4, 5, seed=2).batch(0)[0])
    assert torch.equal(a.batch(3, first=1, rows=2)[0], a.batch(3)[0][1:3])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Trainer(task(), settings(replicas=0)), "replicas=0"),
        (lambda: Trainer(task(), settings(epochs=0)), "epochs=0"),
        (lambda: Trainer(task(), settings(batch=0)), "batch=0"),
        (lambda: Trainer(task(), settings(batch=100)), "640 samples do not split over 8 replicas × batch 100.*at most 80"),
        (lambda: Trainer(task(), settings(replicas=1000)), "640 samples do not split over 1000 replicas; use at most 640"),
        (
            lambda: Trainer(task(), settings(algorithm="newton")),
            "there is no method 'newton'; known are adagossip, all-reduce, atc, awc",
        ),
        (lambda: Trainer(task(), settings(algorithm="allreduce", init="different")), "replicas must start the same"),
        (lambda: Trainer(task(), settings(), graphs.ring(5)), "for 5 replicas, but there are 8"),
        (lambda: Trainer(task(), settings(), "rnig"), "did you mean 'ring'"),
        (lambda: Reshuffled((torch.zeros(4), torch.zeros(5)), 1, 1, 0), r"\[4, 5\] samples"),
    ],
)
def test_mistakes_are_named_in_one_line(make, message):
    with pytest.raises(GossamerError, match=message) as caught:
        make()
    assert "\n" not in str(caught.value)


def test_learning_rate_shapes_and_scaling():
    cosine = WarmupCosine(warmup=0.1, start=0.1, final=0.01)
    assert cosine.factor(0, 100) == pytest.approx(0.1)
    assert cosine.factor(10, 100) == pytest.approx(1)
    assert cosine.factor(100, 100) == pytest.approx(0.01)
    decay = StepDecay((0.5, 0.75), 0.1)
    assert [decay.factor(t, 100) for t in (0, 49, 50, 75)] == pytest.approx([1, 1, 0.1, 0.01])
    assert LearningRate(0.1, scaling="linear", reference=4).peak(16) == pytest.approx(0.4)
    assert LearningRate(0.1, scaling="sqrt").peak(16) == pytest.approx(0.4)
    assert LearningRate(0.1).at(5, 10, 16) == pytest.approx(0.1)
    with pytest.raises(GossamerError, match="scaling='cubic'"):
        LearningRate(0.1, scaling="cubic")
    with pytest.raises(GossamerError, match="learning rate -1"):
        LearningRate(-1)


def test_replicas_are_also_held_to_the_labels_of_their_own_data():
    """Spread, and the metric on data like their own: by hand, from each replica's answers."""
    toy = task(mlp)
    trainer = Trainer(toy, settings(replicas=4, partition="classes:k=3"), "ring")
    trainer.run(until=6)
    found = trainer.evaluate()
    x, y = toy.test
    values, owns = [], []
    for i, shard in enumerate(trainer.batches.shards):
        with trainer.replicas.replica(i) as model, torch.no_grad():
            right = (model(x).argmax(-1) == y).double()
        values.append(float(right.mean()))
        held = toy.train[1][shard]
        share = {label: float((held == label).double().mean()) for label in held.unique().tolist() if (y == label).any()}
        owns.append(sum(part * float(right[y == label].mean()) for label, part in share.items()) / sum(share.values()))
    assert found.mean == pytest.approx(sum(values) / 4)
    assert found.spread == pytest.approx(float(torch.tensor(values, dtype=torch.float64).std(unbiased=False)))
    assert found.own == pytest.approx(sum(owns) / 4)
    assert Trainer(toy, settings(replicas=4), "ring").evaluate().own is None
