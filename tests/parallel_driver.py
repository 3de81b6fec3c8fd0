"""What test_parallel.py runs in its workers. One launch runs every case for its number of workers, and says which failed.

python -m tests.parallel_driver FOLDER [NAME …]
"""

import contextlib
import copy
import itertools
import json
import math
import os
import signal
import sys
import threading
import time
import traceback
import warnings
from datetime import timedelta
from pathlib import Path

import pytest
import safetensors.torch
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import gossamer
from gossamer import DecentralizedDataParallel, GossamerError, Recipe, Settings, Trainer, graphs
from gossamer.checkpoints import checkpoint
from gossamer.data.tasks import Task
from gossamer.members.store import open_link
from gossamer.methods import METHODS
from gossamer.optim import momentum
from gossamer.transport import link as links

CASES = {}
TIMEOUT = 10  # seconds: a case that fails on one worker must not hold the others for long


def case(*worlds):
    """A case takes a World. It runs in launches of these numbers of workers."""

    def register(function):
        CASES[function.__name__] = (function, worlds)
        return function

    return register


class World:
    def __init__(self, rank, size, folder):
        self.rank, self.size, self.folder = rank, size, folder

    def model(self, module=None, graph="ring", **options):
        return DecentralizedDataParallel(small() if module is None else module, graph, timeout=TIMEOUT, **options)

    def batch(self, step, rank=None, dtype=torch.float32):
        """This worker's inputs and targets of a step."""
        generator = torch.Generator().manual_seed(1000 * step + (self.rank if rank is None else rank))
        return torch.randn(4, 6, generator=generator, dtype=torch.float64).to(dtype), torch.randint(
            3, (4,), generator=generator
        )

    def gather(self, tensor):
        """Everyone's, by torch's own group."""
        if self.size == 1:
            return tensor.unsqueeze(0)
        parts = [torch.empty_like(tensor) for _ in range(self.size)]
        dist.all_gather(parts, tensor.contiguous())
        return torch.stack(parts)

    def rows(self, model):
        """All workers' parameters, ``[n, D]``."""
        return self.gather(flat(model))

    def gather_objects(self, thing):
        things = [thing] * self.size
        if self.size > 1:
            dist.all_gather_object(things, thing)
        return things

    def same(self, tensor):
        everyone = self.gather(tensor)
        return bool((everyone == everyone[0]).all())


def small(dtype=torch.float32, seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)).to(dtype)


def flat(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def loss_of(model, batch):
    return F.cross_entropy(model(batch[0]).float() if batch[0].dtype != torch.float64 else model(batch[0]), batch[1])


def train(world, model, optimizer, steps, start=0):
    for step in range(start, start + steps):
        optimizer.zero_grad()
        loss_of(model, world.batch(step, dtype=next(model.parameters()).dtype)).backward()
        optimizer.step()


def close(a, b, tolerance=1e-6):
    worst = float((a.detach().double() - b.detach().double()).abs().max())
    assert worst <= tolerance, f"differ by {worst}"


# --- The arithmetic, against a reference by hand ----------------------------------------------------------------------------

STEPS = 10
SGD = {"lr": 0.1, "momentum": 0.9}
SGD_RECIPE = {"lr": 0.1, "options": {"momentum": 0.9}}


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


def graph_names(n):
    per_node = {4: 2, 5: 5}[n]
    return [
        "one-peer-exponential",
        "one-peer-ring",
        "ring",
        "exponential",
        "complete",
        *(["torus"] if n == 4 else []),
        "random-matching:seed=3",
        f"alternating-exponential-ring:per_node={per_node}",
    ]


@case(4, 5)
def every_graph_order_wire_and_number_of_local_steps_gives_what_the_matrices_give(world):
    for name in graph_names(world.size):
        graph = graphs.parse(name, world.size)
        ways = (("float32", False, 1), ("bfloat16", True, 3), ("bfloat16", False, 1), ("float32", True, 3))
        for order, (wire, send_copy, local_steps) in itertools.product(("awc", "atc"), ways if world.size == 4 else ways[:2]):
            model = world.model(
                small(torch.float64), name, order=order, wire=wire, send_copy=send_copy, local_steps=local_steps
            )
            optimizer = torch.optim.SGD(model.parameters(), **SGD)
            model.gossip(optimizer)
            train(world, model, optimizer, STEPS)
            rows = world.rows(model)
            expected = reference(world, graph, order, wire, local_steps)
            worst = float((rows - expected).abs().max())
            assert worst < 1e-9, f"{name} {order} {wire} send_copy={send_copy} local_steps={local_steps}: {worst}"
            assert model.steps == STEPS
            assert name == "complete" or order == "awc" or (rows[0] != rows[1]).any() or world.size == 5


@case(4)
def averaging_alone_keeps_the_mean_and_brings_workers_together(world):
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


@case(4)
def the_library_and_the_trainer_give_the_same_parameters(world):
    generator = torch.Generator().manual_seed(3)
    data = torch.randn(64, 6, generator=generator).double(), torch.randint(3, (64,), generator=generator)
    task = Task("toy", lambda: small(torch.float64), data, data)
    for name, wire in [(name, "float32") for name in sorted(METHODS.makers)] + [("atc", "bfloat16")]:
        kind = METHODS.makers[name]
        recipe = {"lr": SGD_RECIPE["lr"]} if kind.optimizer == "plain SGD" else SGD_RECIPE
        graph = "ring" if kind.static else "directed-random" if kind.sums == "columns" else "one-peer-exponential"
        if (
            name == "choco"
        ):  # in 8 bits, 64 numbers that lie together share an exponent, and biases lie elsewhere in a Trainer's row
            name = "choco:wire=bfloat16"
        settings = Settings(4, 4, 4, algorithm=name, optimizer=Recipe("sgd", **recipe), backend="loop", wire=wire)
        trainer = Trainer(task, settings, graph)
        model = world.model(small(torch.float64), graph, method=name, wire=wire)
        optimizer = torch.optim.SGD(model.parameters(), **(SGD if recipe is SGD_RECIPE else recipe))
        model.gossip(optimizer)
        for step in range(STEPS):
            x, y = trainer.batches.batch(step, world.rank, 1)
            optimizer.zero_grad()
            loss_of(model, (x[0], y[0])).backward()
            optimizer.step()
        trainer.run(until=STEPS)
        views = trainer.replicas.blocks[0].tensors(trainer.replicas.blocks[0].x)
        for parameter, p in model.named_parameters():
            difference = float((p.detach() - views[parameter][world.rank]).abs().max())
            assert difference <= 1e-10, f"{name}, {wire}, {parameter}: differ by {difference}"


def against_ddp(world, steps, make, graph="all-reduce", module=small, tolerance=1e-5, **options):
    """The same loop with DDP and with the library."""
    ours = world.model(module(), graph, **options)
    theirs = nn.parallel.DistributedDataParallel(module())
    optimizer, other = make(ours.parameters()), make(theirs.parameters())
    ours.gossip(optimizer)
    for step in range(steps):
        for model, o in ((ours, optimizer), (theirs, other)):
            o.zero_grad()
            loss_of(model, world.batch(step)).backward()
            o.step()
    close(flat(ours), flat(theirs), tolerance)
    assert world.same(flat(ours)) or graph != "all-reduce"
    assert (flat(ours) != flat(module())).any()


@case(2, 3)
def clipping_and_accumulation_see_what_ddp_shows(world):
    """all-reduce averages when backward ends, except under no_sync()."""
    for quiet in ("no_sync", "attribute", "never"):
        ours, theirs = world.model(small(), "all-reduce"), nn.parallel.DistributedDataParallel(small())
        pairs = [(model, torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)) for model in (ours, theirs)]
        ours.gossip(pairs[0][1])
        for step in range(6):
            norms = []
            for model, o in pairs:
                o.zero_grad()
                for part in range(3):
                    hold = quiet != "never" and part < 2
                    if quiet == "attribute":
                        model.require_backward_grad_sync = not hold
                    with model.no_sync() if quiet == "no_sync" and hold else contextlib.nullcontext():
                        loss_of(model, world.batch(10 * step + part)).backward()
                norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.1)))
                o.step()
            assert abs(norms[0] - norms[1]) < 1e-6, (quiet, step, norms)
        close(flat(ours), flat(theirs), 1e-6)
        assert world.same(flat(ours))
        assert ours.steps == 6
        ours.close()


@case(2)
def under_no_sync_alone_gradients_are_ones_own(world):
    model = world.model(small(), "all-reduce")
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model.gossip(optimizer)
    bare = small()
    with model.no_sync():
        loss_of(model, world.batch(0)).backward()
    loss_of(bare, world.batch(0)).backward()
    close(model.module[0].weight.grad, bare[0].weight.grad)
    model.average_gradients()  # a person may still ask for it
    assert world.same(model.module[0].weight.grad)
    close(model.module[0].weight.grad, world.gather(bare[0].weight.grad).mean(0))


@case(2)
def gradients_that_no_backward_has_made_are_averaged_in_step(world):
    model = world.model(small(), "all-reduce")
    optimizer = torch.optim.SGD(model.parameters(), 1.0)
    model.gossip(optimizer)
    start = flat(model).clone()
    for p in model.parameters():
        p.grad = torch.full_like(p, float(world.rank))
    optimizer.step()
    close(flat(model), start - 0.5)


@case(2)
def several_optimizers_are_refused_by_a_method_that_changes_gradients(world):
    model = world.model(gan(), "ring", method="qgm")
    optimizers = [torch.optim.SGD(part.parameters(), 0.1) for part in (model.critic, model.generator)]
    model.gossip(*optimizers)
    loss_of(model, world.batch(0)).backward()
    optimizers[0].step()
    with pytest.raises(
        GossamerError, match="method 'qgm' changes the gradients of a whole step.*give gossip\\(\\) one optimizer"
    ):
        optimizers[1].step()


@case(2)
def a_methods_own_state_is_in_the_checkpoint(world):
    for name in ("qgm", "tracking", "push-sum", "choco"):
        made = []
        for resumed in (False, True):
            model = world.model(small(torch.float64), "ring", method=name)
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
            model.gossip(optimizer)
            if resumed:
                assert model.load(world.folder / name)
            train(world, model, optimizer, 6 - model.steps, model.steps)
            if not resumed:
                made.append(flat(model))
                model = world.model(small(torch.float64), "ring", method=name)
                optimizer = torch.optim.SGD(model.parameters(), 0.1)
                model.gossip(optimizer)
                train(world, model, optimizer, 3)
                model.save(world.folder / name)
        assert torch.equal(made[0], flat(model)), name
        other = world.model(small(torch.float64), "ring", method="atc")
        other.gossip(torch.optim.SGD(other.parameters(), 0.1))
        with pytest.raises(GossamerError, match="methods/|order"):
            other.load(world.folder / name)


@case(2)
def parameters_that_are_trained_later_get_a_state_too(world):
    model = world.model(small(torch.float64), "ring", method="qgm")
    model.module[2].requires_grad_(False)
    model = world.model(model.module, "ring", method="qgm")
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model.gossip(optimizer)
    train(world, model, optimizer, 2)
    model.module[2].requires_grad_(True)
    before = model.module[2].weight.clone()
    train(world, model, optimizer, 3, 2)
    assert (model.module[2].weight != before).any()
    assert world.same(flat(model))  # two workers: a ring is the mean


@case(3)
def a_complete_graph_that_adapts_then_combines_is_ddp(world):
    for amount in (0.0, 0.9):
        against_ddp(world, 50, lambda p, m=amount: torch.optim.SGD(p, 0.05, momentum=m), "complete", order="atc")


@case(2)
def all_reduce_is_ddp(world):
    against_ddp(world, 50, lambda p: torch.optim.SGD(p, 0.05))
    against_ddp(world, 50, lambda p: torch.optim.SGD(p, 0.05, momentum=0.9, weight_decay=1e-3))
    against_ddp(world, 50, lambda p: torch.optim.Adam(p, 0.01), tolerance=1e-4)


@case(2)
def all_reduce_averages_before_clipping_when_asked(world):
    ours, theirs = world.model(graph="all-reduce"), nn.parallel.DistributedDataParallel(small())
    optimizer, other = (torch.optim.SGD(m.parameters(), 0.5) for m in (ours, theirs))
    ours.gossip(optimizer)
    for step in range(5):
        for model, o in ((ours, optimizer), (theirs, other)):
            o.zero_grad()
            for part in range(2):  # two backwards in a step
                loss_of(model, world.batch(2 * step + part)).backward()
            if model is ours:
                model.average_gradients()
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            o.step()
    close(flat(ours), flat(theirs), 1e-6)


@case(3)
def all_reduce_gives_all_workers_the_same_gradients_when_some_have_none(world):
    """Rank 0 has none for the first layer, rank 1 a zero, rank 2 has none too; nobody has one for the last bias."""
    model = world.model(graph="all-reduce")
    optimizer = torch.optim.SGD(model.parameters(), 0.1, weight_decay=0.5)
    model.gossip(optimizer)
    first, last = model.module[0], model.module[2]
    last.weight.grad = torch.full_like(last.weight, float(world.rank))
    first.weight.grad = torch.zeros_like(first.weight) if world.rank == 1 else None
    bias = last.bias.detach().clone()
    optimizer.step()
    assert world.same(flat(model))
    close(last.weight.grad, torch.ones_like(last.weight))
    assert first.weight.grad is not None
    assert last.bias.grad is None
    assert torch.equal(last.bias, bias)  # no weight decay on what nobody has a gradient for


# --- Optimizers, schedulers, scalers ------------------------------------------------------------------------------------------


@case(2)
def every_elementwise_optimizer_of_torch_works(world):
    for name in (
        "SGD",
        "Adam",
        "AdamW",
        "NAdam",
        "RAdam",
        "RMSprop",
        "Adagrad",
        "Adadelta",
        "Adamax",
        "ASGD",
        "Rprop",
        "Adafactor",
        "AccumAdam",
        "AccumAdamW",
    ):
        model = world.model()
        kind = getattr(gossamer if name.startswith("Accum") else torch.optim, name)
        optimizer = kind(model.parameters(), lr=0.01)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.02, total_steps=20, cycle_momentum=False)
        model.gossip(optimizer)
        for step in range(3):
            train(world, model, optimizer, 1, step)
            scheduler.step()
        rows = world.rows(model)
        assert torch.isfinite(rows).all(), name
        assert (rows[0] != rows[1]).any(), name
        assert (rows[0] - rows[1]).abs().max() < 0.5, name
        assert model.steps == 3


@case(2)
def decentralized_adam_mixes_parameters_and_keeps_moments(world):
    """x <- W x - update(own gradient at the unmixed x), for each worker, here by hand for both of them."""
    for kind, options in ((torch.optim.AdamW, {"betas": (0.974, 0.999)}), (gossamer.AccumAdamW, {"accum_iter": 3})):
        model = world.model(graph="alternating-exponential-ring")  # two workers of one host: the mean
        optimizer = kind(gossamer.decay_groups(model, 0.1), lr=0.01, **options)
        model.gossip(optimizer)
        both = [small(), small()]
        optimizers = [kind(gossamer.decay_groups(m, 0.1), lr=0.01, **options) for m in both]
        for step in range(7):
            train(world, model, optimizer, 1, step)
            for rank, (m, o) in enumerate(zip(both, optimizers, strict=True)):
                o.zero_grad()
                loss_of(m, world.batch(step, rank)).backward()
            with torch.no_grad():
                for pair in zip(*(m.parameters() for m in both), strict=True):
                    mean = torch.stack(pair).mean(0)
                    for p in pair:
                        p.copy_(mean)
            for o in optimizers:
                o.step()
        close(world.rows(model), torch.stack([flat(m) for m in both]), 1e-6)
        assert (flat(both[0]) != flat(both[1])).any()


@case(2, 3)
def accumulated_gradients_count_as_one_step(world):
    for local_steps in (1, 2):
        seen = []
        model = world.model(local_steps=local_steps)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        model.gossip(optimizer, profile_every=1, on_profile=seen.append)
        for step in range(4):
            optimizer.zero_grad()
            for part in range(1 + world.rank):  # not even the same number everywhere
                (loss_of(model, world.batch(10 * step + part)) / (1 + world.rank)).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        assert model.steps == 4
        assert [p.step for p in seen] == [0, 1, 2, 3]
        assert all(p.norms.shape == (world.size, 4) for p in seen)


@case(2)
def two_backwards_are_one_of_the_sum(world):
    made = []
    for halves in (True, False):
        model = world.model(graph="one-peer-exponential")
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        model.gossip(optimizer)
        for step in range(5):
            optimizer.zero_grad()
            x, y = world.batch(step)
            for part in (slice(0, 2), slice(2, 4)) if halves else (slice(0, 4),):
                (loss_of(model, (x[part], y[part])) * (0.5 if halves else 1)).backward()
            optimizer.step()
        made.append(flat(model))
    close(*made, 1e-6)


@case(2, 3)
def a_scaler_that_skips_a_step_on_one_rank_holds_nobody(world):
    for graph, order in (("ring", "awc"), ("ring", "atc"), ("all-reduce", "awc")):
        model = world.model(graph=graph, order=order)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=100)
        model.gossip(optimizer, scaler=scaler)
        for step in range(4):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = F.cross_entropy(model(world.batch(step)[0]).float(), world.batch(step)[1])
            if step == 1 and world.rank == 1 and graph == "all-reduce":
                loss = loss * math.inf  # before gradients are averaged, which is when backward ends
            scaler.scale(loss).backward()
            if step == 1 and world.rank == 1 and graph != "all-reduce":
                model.module[0].weight.grad[0, 0] = math.inf
            if step % 2:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            before = flat(model).clone()
            rows = world.gather(before)
            scaler.step(optimizer)
            if step == 1 and (graph, order) == ("ring", "awc") and world.rank == 1:
                close(flat(model), rows.mean(0), 1e-6)  # n is 2 or 3: a ring is the mean; the update was skipped
            if step == 1 and graph == "all-reduce":
                assert torch.equal(flat(model), before)  # all saw the infinite gradient
            scaler.update()
        assert model.steps == 4
        assert world.same(torch.tensor([model.steps]))
        assert torch.isfinite(flat(model)).all()
        skipped = world.rank == 1 or graph == "all-reduce"
        assert scaler.get_scale() == (2.0 if skipped else 4.0)
        model.gossip(optimizer)  # without the scaler now: it is as it was
        assert "step" not in vars(scaler) or scaler.step.__name__ == "step"


class Gan(nn.Module):
    def __init__(self):
        super().__init__()
        self.generator, self.critic = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x):
        return self.critic(self.generator(x))


def gan():
    torch.manual_seed(0)
    return Gan()


@case(2, 3)
def several_optimizers_average_once_in_the_last_ones_step(world):
    for order in ("awc", "atc"):
        model = world.model(gan(), order=order)
        first = torch.optim.SGD(model.critic.parameters(), 0.1)
        last = torch.optim.SGD(model.generator.parameters(), 0.1)
        model.gossip(first, last)
        bare = [gan() for _ in range(world.size)]
        for step in range(4):
            for o in (first, last):
                o.zero_grad()
                loss_of(model, world.batch(step)).backward()
                o.step()
            # By hand: n is 2 or 3, where a ring is the mean.
            old = torch.stack([flat(m) for m in bare]).mean(0)
            for rank, m in enumerate(bare):
                start = flat(m).clone()
                loss_of(m, world.batch(step, rank)).backward()
                with torch.no_grad():
                    for p in m.critic.parameters():
                        p.sub_(p.grad, alpha=0.1)
                m.zero_grad()
                loss_of(m, world.batch(step, rank)).backward()
                with torch.no_grad():
                    for p in m.generator.parameters():
                        p.sub_(p.grad, alpha=0.1)
                    m.zero_grad()
                    if order == "awc":
                        nn.utils.vector_to_parameters(flat(m) - start + old, m.parameters())
            if order == "atc":
                mean = torch.stack([flat(m) for m in bare]).mean(0)
                for m in bare:
                    nn.utils.vector_to_parameters(mean.clone(), m.parameters())
        close(flat(model), flat(bare[world.rank]), 1e-5)
        assert model.steps == 4


@case(3)
def all_reduce_with_several_optimizers_averages_each_ones_gradients(world):
    model = world.model(gan(), "all-reduce")
    first = torch.optim.Adam(model.critic.parameters(), 0.01)
    last = torch.optim.SGD(model.generator.parameters(), 0.1)
    model.gossip(first, last)
    for step in range(4):
        for o in (first, last):
            o.zero_grad()
            loss_of(model, world.batch(step)).backward()
            o.step()
    assert world.same(flat(model))
    assert model.steps == 4


@case(2)
def a_closure_works_in_atc_and_is_refused_elsewhere(world):
    for order, graph in (("awc", "ring"), ("atc", "all-reduce"), ("atc", "ring")):
        model = world.model(graph=graph, order=order)
        optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)
        model.gossip(optimizer)

        def closure(model=model, optimizer=optimizer):
            optimizer.zero_grad()
            loss = loss_of(model, world.batch(0, rank=0))
            loss.backward()
            return loss

        if (order, graph) == ("atc", "ring"):
            before = closure().item()
            for _ in range(3):
                optimizer.step(closure)
            assert closure().item() < before
            assert world.same(flat(model))  # n=2: a ring is the mean
        else:
            with pytest.raises(GossamerError, match="step\\(closure\\).*atc"):
                optimizer.step(closure)
            with pytest.raises(GossamerError, match="atc"):
                optimizer.step(closure=closure)


# --- Parameters of all kinds --------------------------------------------------------------------------------------------------


class Kinds(nn.Module):
    """Tied, frozen and half-precision parameters, channels_last, buffers of several dtypes."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 3, padding=1).to(memory_format=torch.channels_last)
        self.norm = nn.BatchNorm2d(4)
        self.first = nn.Linear(16, 16, bias=False)
        self.second = nn.Linear(16, 16, bias=False)
        self.second.weight = self.first.weight
        self.rough = nn.Linear(16, 16).to(torch.bfloat16)
        self.fine = nn.Linear(16, 3).double()
        self.frozen = nn.Linear(3, 3)
        self.frozen.requires_grad_(False)
        self.scalar = nn.Parameter(torch.tensor(1.0))
        self.unused = nn.Parameter(torch.randn(3))
        self.register_buffer("mask", torch.rand(5) > 0.5)
        self.register_buffer("table", torch.randint(100, (3, 2)))
        self.register_buffer("spread", torch.randn(1).expand(4))
        self.register_buffer("nothing", None)
        self.register_buffer("empty", torch.zeros(0))
        self.register_buffer("phases", torch.randn(2, dtype=torch.complex64))

    def forward(self, x):
        x = self.norm(self.conv(x.to(memory_format=torch.channels_last))).mean((2, 3)).repeat(1, 4) * self.scalar
        x = self.rough(torch.tanh(self.second(self.first(x))).bfloat16())
        return self.frozen(self.fine(x.double()).float())


def kinds(seed=0):
    torch.manual_seed(seed)
    return Kinds()


def image(world, step):
    generator = torch.Generator().manual_seed(1000 * step + world.rank)
    return torch.randn(4, 2, 5, 5, generator=generator), torch.randint(3, (4,), generator=generator)


@case(1, 2, 3)
def at_the_start_everyone_gets_rank_0s_values(world):
    bare = kinds(seed=world.rank)
    kept = copy.deepcopy(bare).state_dict()
    model = world.model(bare)
    expected = kinds(seed=0).state_dict()
    state = model.state_dict()
    assert list(state) == list(expected)
    for name, value in expected.items():
        assert torch.equal(state[name], value), name
    assert bare.conv.weight.is_contiguous(memory_format=torch.channels_last)
    assert bare.second.weight is bare.first.weight
    other = world.model(kinds(seed=world.rank), init="keep")
    for name, value in kept.items():
        assert torch.equal(other.state_dict()[name], value), name


@case(2, 3)
def parameters_of_all_kinds_are_averaged(world):
    for order in ("awc", "atc"):
        model = world.model(kinds(), order=order)
        optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
        model.gossip(optimizer)
        frozen = model.module.frozen.weight.detach().clone()
        for step in range(6):
            if step == 3:
                model.module.frozen.requires_grad_(True)  # late
                model.module.scalar.requires_grad_(False)
            optimizer.zero_grad()
            x, y = image(world, step)
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            if step == 2:
                assert torch.equal(model.module.frozen.weight, frozen)
        assert (model.module.frozen.weight != frozen).any()
        assert model.module.second.weight is model.module.first.weight
        model.average_()
        for name, p in model.named_parameters():
            assert torch.isfinite(p).all(), name
            assert world.same(p.detach().contiguous().double()), name
        assert model.module.conv.weight.is_contiguous(memory_format=torch.channels_last)


@case(2, 3)
def a_frozen_parameter_that_is_trained_later_is_averaged_from_then_on(world):
    for order in ("awc", "atc"):
        module = small(torch.float64)
        module[0].requires_grad_(False)
        model = world.model(module, order=order)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        model.gossip(optimizer)
        train(world, model, optimizer, 2)
        module[0].requires_grad_(True)
        train(world, model, optimizer, 2, start=2)
        rows = world.gather(module[0].weight.detach())
        bare = [copy.deepcopy(small(torch.float64)) for _ in range(world.size)]
        for step in range(4):  # a ring of 2 or 3 is the mean
            before = torch.stack([flat(m) for m in bare]).mean(0)
            for rank, m in enumerate(bare):
                start = flat(m).clone()
                loss_of(m, world.batch(step, rank, torch.float64)).backward()
                with torch.no_grad():
                    for p in m.parameters() if step >= 2 else m[2].parameters():
                        p.sub_(p.grad, alpha=0.1)
                    m.zero_grad()
                    if order == "awc":
                        nn.utils.vector_to_parameters(flat(m) - start + before, m.parameters())
            if order == "atc":
                mean = torch.stack([flat(m) for m in bare]).mean(0)
                for m in bare:
                    nn.utils.vector_to_parameters(mean.clone(), m.parameters())
        close(rows, torch.stack([m[0].weight.detach() for m in bare]), 1e-9)


@case(2)
def parameters_without_a_gradient_are_averaged_all_the_same(world):
    model = world.model(small(seed=world.rank), init="keep", order="awc")
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model.gossip(optimizer)
    means = world.rows(model).mean(0)
    if world.rank == 0:
        loss_of(model, world.batch(0)).backward()
        model.module[0].weight.grad = None
    optimizer.step()  # rank 1: no forward, no gradient
    close(model.module[0].weight.detach().flatten(), means[:30], 1e-6)
    assert model.steps == 1


# --- Consensus ----------------------------------------------------------------------------------------------------------------


class Norm(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.norm, self.out = nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)

    def forward(self, x):
        return self.out(self.norm(self.inner(x)))


def norm():
    torch.manual_seed(0)
    return Norm()


@case(1, 2, 3)
def consensus_is_the_mean_of_parameters_and_buffers_and_is_restored(world):
    model = world.model(norm(), graph="one-peer-exponential")
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model.gossip(optimizer)
    train(world, model, optimizer, 3)
    own = {name: t.clone() for name, t in model.state_dict().items()}
    means = {name: world.gather(t.double()).mean(0) for name, t in own.items()}
    pointers = [p.data_ptr() for p in model.parameters()]
    with model.consensus() as same:
        assert same is model
        for name, t in model.state_dict().items():
            if t.is_floating_point():
                close(t, means[name], 1e-6)
            differs = world.gather((own[name] != t).any().int())  # one worker's own may be the mean, by chance
            alike = world.same(own[name])
            assert world.size == 1 or "num_batches" in name or differs.any() or alike, name
        with torch.no_grad():
            model.train()
            model(world.batch(9)[0])  # changes the averaged statistics only
            model.eval()
        with pytest.raises(GossamerError, match="inside consensus"):
            optimizer.step()
        with pytest.raises(GossamerError, match="consensus\\(\\) inside"), model.consensus():
            pass
    model.train()
    for name, t in model.state_dict().items():
        assert torch.equal(t, own[name]), name
    assert [p.data_ptr() for p in model.parameters()] == pointers
    assert model.steps == 3
    with contextlib.suppress(ValueError), model.consensus():
        raise ValueError
    assert all(torch.equal(t, own[name]) for name, t in model.state_dict().items())
    train(world, model, optimizer, 2, start=3)
    assert model.steps == 5


@case(2)
def batch_norm_statistics_are_estimated_anew(world):
    model = world.model(norm(), graph="one-peer-exponential")
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model.gossip(optimizer)
    train(world, model, optimizer, 3)
    own = model.module.norm.running_mean.clone()
    batches = [world.batch(50 + k)[0] for k in range(3)]
    with model.consensus(reestimate=batches):
        inner = torch.stack([model.module.inner(b).mean(0) for b in batches]).mean(0).detach()
        close(model.module.norm.running_mean, world.gather(inner).mean(0), 1e-6)
        assert model.training
    assert torch.equal(model.module.norm.running_mean, own)


class Remembering(nn.Module):
    """Keeps its last output, which is nobody else's."""

    local_buffers = frozenset({"last"})

    def __init__(self):
        super().__init__()
        self.inner, self.norm = nn.Linear(6, 3), nn.BatchNorm1d(3)
        self.register_buffer("last", torch.zeros(4, 3))

    def forward(self, x):
        y = self.norm(self.inner(x)) + 0.1 * self.last.clone()
        if self.training:
            self.last.copy_(y.detach())
        return y


@case(2)
def local_buffers_stay_each_workers_own(world):
    torch.manual_seed(0)
    model = world.model(Remembering(), graph="one-peer-exponential")
    optimizer = gossamer.AccumAdam(model.parameters(), 0.1)
    model.gossip(optimizer)
    train(world, model, optimizer, 3)
    own = model.module.last.clone()
    assert not world.same(own)
    mean = world.gather(model.module.norm.running_mean).mean(0)
    with model.consensus():
        assert torch.equal(model.module.last, own)
        close(model.module.norm.running_mean, mean)
    with model.consensus(reestimate=[world.batch(50)[0]]):  # runs it in training mode, which must not reach what is kept
        assert not torch.equal(model.module.last, own)
    assert torch.equal(model.module.last, own)
    model.average_()
    assert torch.equal(model.module.last, own)
    assert world.same(model.module.norm.running_mean)


@case(2)
def average_is_for_good(world):
    model = world.model(norm(), graph="one-peer-exponential")
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model.gossip(optimizer)
    train(world, model, optimizer, 3)
    means = {name: world.gather(t.double()).mean(0) for name, t in model.state_dict().items()}
    model.average_()
    for name, t in model.state_dict().items():
        if t.is_floating_point():
            close(t, means[name], 1e-6)
    bare = norm()
    bare.load_state_dict(model.state_dict())
    x = world.batch(7)[0]
    model.eval()
    assert torch.equal(model(x), bare.eval()(x))


@case(2, 3)
def the_mean_of_a_tensor_may_be_taken_while_rows_are_on_their_way(world):
    for graph in ("one-peer-exponential", "complete"):
        model = world.model(graph=graph)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        model.gossip(optimizer)
        for step in range(3):
            optimizer.zero_grad()
            loss = loss_of(model, world.batch(step))
            loss.backward()
            assert model._driver.busy
            close(model.mean(loss), world.gather(loss.detach()).mean(), 1e-6)
            assert model.mean(float(world.rank)) == (world.size - 1) / 2
            with model.consensus():
                assert world.same(flat(model))
            optimizer.step()
        assert model.mean(torch.ones(2, 3)).shape == (2, 3)
        with pytest.raises(GossamerError, match="int64"):
            model.mean(torch.tensor(3))


# --- When what is on its way ----------------------------------------------------------------------------------------------------


@case(2)
def rows_are_on_their_way_from_the_first_training_forward_to_step_only(world):
    model = world.model()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model.gossip(optimizer)
    x = world.batch(0)[0]
    sent = model.traffic.sent
    model.eval()
    model(x)
    model.train()
    with torch.no_grad():
        model(x)
    assert not model._driver.busy
    assert model.traffic.sent == sent
    model(x).sum().backward()
    assert model.traffic.sent > sent
    for refused in (model.average_, lambda: model.load_state_dict(model.state_dict()), lambda: model.save(world.folder / "no")):
        with pytest.raises(GossamerError, match="before step\\(\\) \\(step 0\\)"):
            refused()
    with pytest.raises(GossamerError, match="gossip\\(\\)"):
        model.gossip(optimizer)
    optimizer.step()
    sent = model.traffic.sent
    assert not model._driver.busy
    with torch.no_grad():  # all of this is allowed now
        for p in model.parameters():
            p.clamp_(-1, 1)
    model.load_state_dict({k: v + 1 for k, v in model.state_dict().items()})
    assert model.traffic.sent == sent
    train(world, model, optimizer, 1)


@case(2)
def a_parameter_that_is_changed_while_it_is_sent_is_noticed(world):
    model = world.model()
    known = torch.optim.SGD(model.module[0].parameters(), 0.1)
    stranger = torch.optim.SGD(model.module[2].parameters(), 0.1)
    model.gossip(known)
    loss_of(model, world.batch(0)).backward()
    stranger.step()
    with pytest.raises(GossamerError, match="'2.weight' was changed between forward and step"):
        model(world.batch(1)[0])
    with pytest.raises(GossamerError, match="send_copy=True"):
        known.step()
    model = world.model(send_copy=True)
    known = torch.optim.SGD(model.module[0].parameters(), 0.1)
    stranger = torch.optim.SGD(model.module[2].parameters(), 0.1)
    model.gossip(known)
    for step in range(3):
        loss_of(model, world.batch(step)).backward()
        stranger.step()
        known.step()


@case(2)
def new_memory_is_mended_and_other_dtypes_or_objects_are_refused(world):
    model = world.model()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model.gossip(optimizer)
    train(world, model, optimizer, 1)
    before = flat(model).clone()
    for p in model.parameters():
        p.data = p.data.clone()
    assert torch.equal(flat(model), before)
    train(world, model, optimizer, 1)
    assert model._flat.blocks[0].x[0, 0] == model.module[0].weight[0, 0]
    model.half()
    with pytest.raises(GossamerError, match="'0.weight', now float16 .*float32.*before DecentralizedDataParallel"):
        model(world.batch(0)[0].half())
    model = world.model()
    model.gossip(torch.optim.SGD(model.parameters(), 0.1))
    model.module.load_state_dict(small().state_dict(), assign=True)
    with pytest.raises(GossamerError, match="'0.weight'.*replaced.*model.load_state_dict"):
        model(world.batch(0)[0])
    model = world.model()
    model.load_state_dict(small(seed=4).state_dict(), assign=True)  # this one is mended
    model.gossip(torch.optim.SGD(model.parameters(), 0.1))
    model(world.batch(0)[0])


# --- Copies, compiled modules, state ------------------------------------------------------------------------------------------


@case(1, 2)
def a_deep_copy_is_a_model_of_its_own(world):
    model = world.model()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model.gossip(optimizer)
    train(world, model, optimizer, 2)
    twin = copy.deepcopy(model)
    ema = torch.optim.swa_utils.AveragedModel(model)
    x = world.batch(0)[0]
    twin.train()
    assert torch.equal(twin(x), model(x))
    optimizer.step()
    train(world, model, optimizer, 2)
    ema.update_parameters(model)
    assert (flat(twin) != flat(model)).any()
    twin.load_state_dict(model.state_dict())
    assert torch.equal(flat(twin), flat(model))
    assert list(twin.state_dict()) == list(small().state_dict())
    for refused in (lambda: twin.gossip(optimizer), twin.average_, lambda: twin.mean(1.0), twin.average_gradients):
        with pytest.raises(GossamerError, match="copy"):
            refused()
    with pytest.raises(GossamerError, match="copy"), twin.consensus():
        pass


@case(2)
def compiled_modules_work_inside_and_outside(world):
    made = []
    for how in ("plain", "inside", "outside", "aot"):
        bare = small()
        inner = {"inside": lambda m: torch.compile(m, backend="eager"), "aot": lambda m: torch.compile(m, backend="aot_eager")}
        model = world.model(inner.get(how, lambda m: m)(bare))
        called = torch.compile(model, backend="eager") if how == "outside" else model
        optimizer = torch.optim.SGD(called.parameters(), 0.1)
        called.gossip(optimizer)
        for step in range(4):
            optimizer.zero_grad()
            loss_of(called, world.batch(step)).backward()
            optimizer.step()
            with model.consensus():
                called.eval()
                consensus = called(world.batch(0)[0]).detach()
                close(
                    consensus, F.linear(torch.tanh(F.linear(world.batch(0)[0], *bare[0].parameters())), *bare[2].parameters())
                )
                called.train()
        assert list(model.state_dict()) == list(bare.state_dict()) == list(small().state_dict())
        model.load_state_dict({k: v.clone() for k, v in model.state_dict().items()})
        made.append(torch.cat([flat(model), consensus.flatten()]))
        assert model.steps == 4
    for other in made[1:]:
        close(other, made[0], 1e-6)


@case(2)
def state_has_the_bare_modules_keys_also_inside_a_larger_module(world):
    model = world.model(seedless := small())
    assert list(model.state_dict()) == list(small().state_dict()) == [name for name, _ in model.named_parameters()]
    other = small(seed=9)
    seedless_before = flat(model).clone()
    other.load_state_dict(model.state_dict())
    assert torch.equal(flat(other), seedless_before)
    model.load_state_dict(small(seed=9).state_dict())
    assert torch.equal(flat(seedless), flat(small(seed=9)))
    with pytest.raises(RuntimeError, match="Missing key"):
        model.load_state_dict({})
    whole = nn.ModuleDict({"net": model, "rest": nn.Linear(2, 2)})
    plain = nn.ModuleDict({"net": small(), "rest": nn.Linear(2, 2)})
    assert list(whole.state_dict()) == list(plain.state_dict())
    whole.load_state_dict(plain.state_dict())
    assert torch.equal(flat(model), flat(plain["net"]))
    with pytest.raises(RuntimeError, match="Unexpected"):
        whole.load_state_dict({**plain.state_dict(), "net.other": torch.zeros(1)})


# --- Checkpoints ----------------------------------------------------------------------------------------------------------------


@case(1, 2, 3)
def a_checkpoint_goes_on_bit_for_bit(world):
    def make():
        model = world.model(norm(), "one-peer-exponential")
        # Saved after 3, 6 and 9 steps, which is inside AccumAdamW's windows of four.
        kind = gossamer.AccumAdamW if world.size == 2 else torch.optim.AdamW
        optimizer = kind(model.parameters(), 0.01)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
        model.gossip(optimizer, profile_every=2)
        return model, optimizer, scheduler

    def go(model, optimizer, scheduler, start, steps):
        for step in range(start, start + steps):
            train(world, model, optimizer, 1, step)
            scheduler.step()

    folder = world.folder / f"checkpoint-{world.size}"
    model, optimizer, scheduler = make()
    assert model.load(folder, also={"scheduler": scheduler}) is False
    for start in (0, 3, 6):
        go(model, optimizer, scheduler, start, 3)
        model.save(folder, also={"scheduler": scheduler})
    on_disk = sorted(path.name for path in folder.glob(f"*.rank-{world.rank}-of-*"))
    assert on_disk == [f"step-{step:09d}.rank-{world.rank}-of-{world.size}.ckpt" for step in (6, 9)]
    everyone = {name: world.gather(t.double()).mean(0) for name, t in model.state_dict().items()}
    averaged = safetensors.torch.load_file(folder / "averaged.safetensors")
    norm().load_state_dict(averaged)
    for name, t in averaged.items():
        if t.is_floating_point():
            close(t, everyone[name], 1e-6)
    go(model, optimizer, scheduler, 9, 3)
    expected, lr = {k: v.clone() for k, v in model.state_dict().items()}, scheduler.get_last_lr()
    world.gather(torch.zeros(1))  # all have looked
    if world.rank == 0 and world.size > 1:  # as if it had been killed before its newest file was written
        (folder / on_disk[1]).unlink()
    start = 6 if world.size > 1 else 9
    model, optimizer, scheduler = make()
    with pytest.raises(GossamerError, match="scheduler"):
        model.load(folder)
    assert model.load(folder, also={"scheduler": scheduler}) is True
    assert model.steps == start
    assert model.signals
    go(model, optimizer, scheduler, start, 12 - start)
    for name, t in model.state_dict().items():
        assert torch.equal(t, expected[name]), name
    assert scheduler.get_last_lr() == lr
    other = world.model(norm(), "complete", order="atc")
    other.gossip(torch.optim.SGD(other.parameters(), 0.1))
    with pytest.raises(GossamerError, match="another set-up.*graph.*order"):
        other.load(folder)


@case(2)
def a_fresh_run_in_the_folder_of_an_older_one_replaces_its_checkpoints(world):
    folder = world.folder / "older"
    for steps in (5, 2):
        model = world.model()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        model.gossip(optimizer)
        train(world, model, optimizer, steps)
        model.save(folder)
    again = world.model()
    again.gossip(torch.optim.SGD(again.parameters(), 0.1))
    assert again.load(folder)
    assert again.steps == 2
    assert torch.equal(flat(again), flat(model))


def saved_twice(world, folder):
    model = world.model()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model.gossip(optimizer)
    for step in range(2):
        train(world, model, optimizer, 1, step)
        model.save(folder)
    dist.barrier()
    return model


@case(2)
def a_checkpoint_that_some_workers_lost_is_an_error(world):
    folder = world.folder / "lost"
    model = saved_twice(world, folder)
    if world.rank == 1:
        for path in folder.glob("*.rank-1-*"):
            path.unlink()
    with pytest.raises(GossamerError, match="rank 0 has 1, 2; rank 1 has none"):
        model.load(folder)

    class Odd:
        def state_dict(self):
            return {"what": object()}

    with pytest.raises(GossamerError, match="state_dict"):
        model.save(folder, also={"odd": Odd()})


@case(2)
def a_damaged_file_is_left_for_the_step_before_it_by_all(world):
    folder = world.folder / "damaged"
    model = saved_twice(world, folder)
    if world.rank == 1:
        path = folder / "step-000000002.rank-1-of-2.ckpt"
        path.write_bytes(path.read_bytes()[:-3] + b"abc")
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        assert model.load(folder)
    assert model.steps == 1
    assert [str(w.message) for w in warned if "checksum" in str(w.message)] if world.rank else not warned
    other = world.model()
    other.gossip(torch.optim.AdamW(other.parameters(), 0.1))
    with pytest.raises(GossamerError, match="the optimizers .SGD there, AdamW here."):
        other.load(folder)


# --- Profiles -----------------------------------------------------------------------------------------------------------------


@case(1, 3)
def profiles_hold_all_workers_norms_and_their_distance(world):
    for graph, order in (("one-peer-ring", "awc"), ("one-peer-ring", "atc"), ("all-reduce", "awc")):
        model = world.model(graph=graph, order=order)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        model.gossip(optimizer, profile_every=2)
        for step in range(4):
            before = world.rows(model).double()
            train(world, model, optimizer, 1, step)
            if step == 2 and order == "awc" and graph != "all-reduce":
                seen = model.profiles[-1]
                distance = (before - before.mean(0)).square().sum(1).mean().sqrt()
                assert abs(seen.consensus_distance - float(distance)) < 1e-6
                norms = torch.stack([row.split([30, 5, 15, 3])[0].norm() for row in before])
                close(seen.norms[:, 0], norms, 1e-5)
                assert (distance > 0) == (world.size > 1)
        assert [p.step for p in model.profiles] == [0, 2]
        assert all(p.norms.shape == (world.size, 4) for p in model.profiles)
        assert graph != "all-reduce" or model.profiles[1].consensus_distance < 1e-6
        assert "gini" in model.signals


@case(3)
def a_link_can_be_closed_when_some_have_closed_it_before(world):
    link = open_link(torch.device("cpu"), timeout=TIMEOUT)
    works = link.post([], [links.Message(2, 5, torch.empty(3))]) if world.rank == 0 else []
    woken = threading.Event()

    def wait():
        with pytest.raises(RuntimeError):
            link.wait(works[0][1])
        woken.set()

    if works:
        threading.Thread(target=wait, daemon=True).start()
    if world.rank == 1:
        link.close()
    dist.barrier()
    assert not woken.is_set()  # rank 2 is there, and silent
    dist.barrier()
    if world.rank == 0:
        link.close()
        assert woken.wait(10)
    dist.barrier()


@case(4)
def ada_thins_out_its_graph(world):
    with pytest.raises(GossamerError, match="steps_per_epoch"):
        world.model(graph="ada")
    model = world.model(graph="ada:reach=0.5", epochs=4, steps_per_epoch=2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model.gossip(optimizer)
    train(world, model, optimizer, 10)
    assert model.schedule.changes[0].graph == "complete"
    assert len(model.schedule.changes) > 1


@case(2, 3, 4)
def means_in_8_bits_take_a_quarter_of_the_bytes_and_are_the_same_for_all(world):
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


@case(2, 3, 4)
def ada_that_decides_by_itself_decides_as_in_one_process(world):
    steps, n = 60, world.size
    generator = torch.Generator().manual_seed(3)
    data = torch.randn(64, 6, generator=generator).double(), torch.randint(3, (64,), generator=generator)

    def toy():  # without biases: they would lie elsewhere in a row, and what is rounded up depends on the place
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 5, bias=False), nn.Tanh(), nn.Linear(5, 3, bias=False)).double()

    task = Task("toy", toy, data, data)
    for order in ("awc", "atc"):
        rate = gossamer.LearningRate(0.1, shape=gossamer.WarmupCosine())
        epochs = math.ceil(steps / (64 // (4 * n)))
        settings = Settings(
            n, epochs, 4, algorithm=f"dsgd-{order}", optimizer=Recipe("sgd", **SGD_RECIPE), learning_rate=rate, backend="loop"
        )
        eager = "ada-auto:tolerance=0.65"  # changes its mind in few steps
        trainer = Trainer(task, settings, eager)
        model = world.model(toy(), eager, order=order)
        optimizer = torch.optim.SGD(model.parameters(), **SGD)
        model.gossip(optimizer)
        for step in range(steps):
            x, y = trainer.batches.batch(step, world.rank, 1)
            optimizer.param_groups[0]["lr"] = trainer.learning_rate.at(step, trainer.steps, n)
            optimizer.zero_grad()
            loss_of(model, (x[0], y[0])).backward()
            optimizer.step()
        trainer.run(until=steps)
        views = trainer.replicas.blocks[0].tensors(trainer.replicas.blocks[0].x)
        for name, p in model.named_parameters():
            close(p, views[name][world.rank], 1e-10)
        assert [(c.step, c.graph) for c in model.schedule.changes] == [(c.step, c.graph) for c in trainer.schedule.changes]
        assert len(model.schedule.changes) > 2
    with pytest.raises(GossamerError, match="local_steps=4: 'ada-auto' decides by itself"):
        world.model(graph="ada-auto", local_steps=4)


def rare(model):
    """ada-auto, as it is late in a training: with averages in every second step."""
    ada = model.schedule
    ada.level, ada.until = 1, 10**9
    assert ada.levels[1].every == 2
    return model


@case(2, 3)
def what_a_person_does_to_parameters_does_not_become_momentum(world):
    for order in ("awc", "atc"):
        model = rare(world.model(graph="ada-auto", order=order))
        optimizer = torch.optim.SGD(model.parameters(), **SGD)
        model.gossip(optimizer)

        def still(model=model, optimizer=optimizer):
            """A step without a gradient."""
            model(world.batch(0)[0])
            for p in model.parameters():
                p.grad = torch.zeros_like(p)
            optimizer.step()

        for _ in range(4):
            still()
        with model.consensus():
            pass
        assert not model._flat.touched  # evaluation is no jump
        with torch.no_grad():
            for p in model.parameters():
                p.add_(1.0)
        there = flat(model).clone()
        assert model._flat.touched
        for _ in range(8):
            still()
        close(flat(model), there, 0.05)  # 1 % of the jump, once; as momentum it would go on for 5 times as far
        nn.utils.vector_to_parameters(there - 1.0, model.parameters())  # gives them other memory
        for _ in range(8):
            still()
        close(flat(model), there - 1.0, 0.05)


@case(2)
def nor_if_a_scaler_skips_the_step_that_follows(world):
    for order in ("awc", "atc"):
        model = rare(world.model(graph="ada-auto", order=order))
        optimizer = torch.optim.SGD(model.parameters(), **SGD)
        scaler = torch.amp.GradScaler("cpu", init_scale=1.0, growth_interval=100)
        model.gossip(optimizer, scaler=scaler)

        def step(value, model=model, optimizer=optimizer, scaler=scaler):
            loss = model(world.batch(0)[0]).sum()
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            for p in model.parameters():
                p.grad = torch.full_like(p, value)
            scaler.step(optimizer)
            scaler.update()

        for _ in range(4):
            step(0.0)
        with torch.no_grad():
            for p in model.parameters():
                p.add_(1.0)
        there = flat(model).clone()
        step(math.inf)
        for _ in range(7):
            step(0.0)
        close(flat(model), there, 0.05)


@case(2, 3)
def good_parameters_can_be_loaded_after_bad_ones(world):
    """With means in 8 bits as with others."""
    for order in ("awc", "atc"):
        model = world.model(graph="ada-auto", order=order, check_finite=False)
        optimizer = torch.optim.SGD(model.parameters(), **SGD)
        model.gossip(optimizer)
        train(world, model, optimizer, 5)
        good = {key: value.clone() for key, value in model.state_dict().items()}
        kept = copy.deepcopy(optimizer.state_dict())
        with torch.no_grad():
            for p in model.parameters():
                p.fill_(math.nan if world.rank == 0 else 1.0)
        train(world, model, optimizer, 3, start=5)
        assert not flat(model).isfinite().any()
        model.load_state_dict(good)
        optimizer.load_state_dict(kept)
        train(world, model, optimizer, 4, start=8)
        assert flat(model).isfinite().all()


@case(2, 3)
def ada_that_decides_by_itself_alone_for_a_while(world):
    """The last one of a stretch has nobody to average with; afterwards all see the same again."""
    model = world.model(graph="ada-auto:tolerance=0.65")
    optimizer = torch.optim.SGD(model.parameters(), **SGD)
    model.gossip(optimizer)
    for _ in range(2):
        with model.uneven():
            train(world, model, optimizer, 14 if world.rank == world.size - 1 else 3, start=model.steps)
        train(world, model, optimizer, 16, start=model.steps)
    assert len(set(world.gather_objects((model.steps, model.schedule.level, model.schedule.patience)))) == 1
    model.schedule.patience += 10 * world.rank  # as if some had seen what others have not
    train(world, model, optimizer, 6, start=model.steps)
    assert len(set(world.gather_objects(model.schedule.patience))) == 1


@case(1, 2)
def momentum_that_can_not_be_shared_is_refused_at_once_and_what_is_none_is_left_alone(world):
    model = world.model(graph="ada-auto")
    with pytest.raises(GossamerError, match="dampening=0.5 would make too small"):
        model.gossip(torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, dampening=0.5))
    weights = [p for p in model.parameters() if p.ndim == 2]
    optimizer = torch.optim.Muon(weights, lr=0.1, momentum=0.9)
    for p in weights:
        p.grad = torch.ones_like(p)
    optimizer.step()
    before = [optimizer.state[p]["momentum_buffer"].clone() for p in weights]
    momentum.share(optimizer, torch.zeros_like)
    assert all(torch.equal(optimizer.state[p]["momentum_buffer"], kept) for p, kept in zip(weights, before, strict=True))


# --- What DDP scripts do ---------------------------------------------------------------------------------------------------------


@case(2)
def evaluation_may_be_in_inference_mode(world):
    for graph in ("one-peer-exponential", "ada-auto"):
        model = world.model(graph=graph, init="keep", module=small(seed=world.rank))
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        model.gossip(optimizer)
        train(world, model, optimizer, 3)
        before = flat(model).clone()
        with torch.inference_mode():
            assert model.mean(float(world.rank)) == 0.5
            score = model.mean(loss_of(model.eval(), world.batch(0)))
            assert world.same(score.clone().reshape(1))
            with model.consensus():
                assert world.same(model(world.batch(0, rank=0)[0]).clone())
        assert torch.equal(flat(model), before)
        with torch.inference_mode():
            model.save(world.folder / f"inference-{graph}")
        train(world, model.train(), optimizer, 2, start=3)
        with torch.inference_mode():
            assert model.load(world.folder / f"inference-{graph}")
        assert torch.equal(flat(model), before)
        train(world, model, optimizer, 2, start=3)
        with torch.inference_mode():
            model.average_()
        assert world.same(flat(model))


@case(2)
def a_fused_optimizer_sees_what_all_see(world):
    """The scaler looks at its gradients without unscaling them."""
    model = world.model(graph="all-reduce")
    optimizer = torch.optim.AdamW(model.parameters(), 0.01, fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=100)
    model.gossip(optimizer, scaler=scaler)
    for step in range(4):
        optimizer.zero_grad()
        loss = loss_of(model, world.batch(step)) * (math.inf if step == 1 and world.rank == 1 else 1.0)
        scaler.scale(loss).backward()
        before = flat(model).clone()
        scaler.step(optimizer)
        scaler.update()
        assert torch.equal(flat(model), before) == (step == 1)
    assert torch.isfinite(flat(model)).all()
    assert world.same(flat(model))
    assert scaler.get_scale() == 2.0


@case(2)
def a_step_that_does_not_come_leaves_nothing_behind(world):
    """With all-reduce: gradients that were averaged and thrown away, and two optimizers that clip in turn."""
    model = world.model(graph="all-reduce")
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model.gossip(optimizer)
    for step in range(4):
        optimizer.zero_grad()
        loss_of(model, world.batch(step)).backward()
        if step == 1:
            model.average_gradients()
            continue
        optimizer.step()
    assert world.same(flat(model))
    model = world.model(graph="all-reduce")
    first, second = (torch.optim.SGD(part.parameters(), 0.1) for part in (model.module[0], model.module[2]))
    model.gossip(first, second)
    for step in range(3):
        for k, optimizer in enumerate((first, second)):
            optimizer.zero_grad()
            loss_of(model.module, world.batch(2 * step + k)).backward()  # not by way of the wrapper
            model.average_gradients()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
    assert world.same(flat(model))


@case(2)
def all_reduce_with_a_scaler_and_clipping_may_be_uneven(world):
    for clips in (False, True):
        model = world.model(graph="all-reduce")
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        scaler = None if clips else torch.amp.GradScaler("cpu", init_scale=4.0)
        model.gossip(optimizer, scaler=scaler)
        with model.uneven():
            for step in range(5 if world.rank == 0 else 60):
                optimizer.zero_grad()
                loss = loss_of(model, world.batch(step))
                if scaler is None:
                    loss.backward()
                    model.average_gradients()
                    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                    optimizer.step()
                else:
                    scaler.scale(loss).backward()
                    scaler.step(optimizer)
                    scaler.update()
                time.sleep(0.002)
        assert world.same(flat(model))


@case(1, 2)
def what_ddp_has_is_there_or_refused_with_advice(world):
    for options, match in (
        ({"device_ids": [0]}, "device_ids is an argument of torch's DDP .*move the module to its device first"),
        ({"find_unused_parameters": True}, "leave it out: a parameter without a gradient is averaged"),
        ({"graph": [0]}, "device_ids is an argument"),
        ({"graph": "allreduce"}, "no graph 'allreduce'; did you mean 'all-reduce'"),
        ({"graph": "ada-autoo"}, "did you mean 'ada-auto'"),
    ):
        with pytest.raises(GossamerError, match=match):
            world.model(**options)
    with pytest.raises(TypeError, match="unexpected keyword argument 'grph'"):
        world.model(grph="ring")
    assert world.model(graph="all_reduce").averages_gradients
    assert world.model(graph="Ada_Auto").schedule.describe() == "ada-auto"
    model = world.model()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model.gossip(optimizer)
    with model.no_sync():
        loss_of(model, world.batch(0)).backward()
    loss_of(model, world.batch(1)).backward()
    if world.size > 1:
        with pytest.raises(GossamerError, match="also for micro-batches that are left over"):
            model.average_()
    optimizer.step()
    assert model.steps == 1
    saved = {f"module.{key}": torch.full_like(value, 0.5) for key, value in model.state_dict().items()}  # by torch's DDP
    model.load_state_dict(saved)
    assert (flat(model) == 0.5).all()
    with pytest.raises(RuntimeError, match="Missing key"):
        model.load_state_dict({"module.0.weight": saved["module.0.weight"]})
    with model.consensus():
        for call in (model.average_, lambda: model.save(world.folder / "no")):
            with pytest.raises(GossamerError, match=r"inside consensus\(\) \(step 1\): call it after the block"):
                call()


# --- Bad input ----------------------------------------------------------------------------------------------------------------


@case(2)
def bad_arguments_are_refused(world):
    for graph, options, match in (
        (graphs.ring(3), {}, "for 3 replicas, but there are 2"),
        ("rong", {}, "no graph 'rong'; did you mean 'ring'"),
        (3, {}, "int is not a graph"),
        ("ring", {"order": "abc"}, "order='abc'"),
        ("ring", {"init": "abc"}, "init='abc'"),
        ("ring", {"wire": "float8"}, "wire='float8'"),
        ("ring", {"local_steps": 0}, "local_steps=0"),
    ):
        with pytest.raises(GossamerError, match=match):
            world.model(graph=graph, **options)
    frozen = small().requires_grad_(False)
    with pytest.raises(GossamerError, match="no trainable parameters"):
        world.model(frozen)
    with pytest.raises(GossamerError, match="'weight' has no shape yet"):
        world.model(nn.LazyLinear(3))
    with pytest.raises(GossamerError, match="meta"):
        world.model(nn.Linear(3, 3, device="meta"))
    with pytest.raises(GossamerError, match="DistributedDataParallel already"):
        world.model(nn.parallel.DistributedDataParallel(small()))


@case(2)
def sharded_modules_are_refused(world):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2,))
    module = small()
    module[0].weight = nn.Parameter(distribute_tensor(module[0].weight.detach(), mesh, [Shard(0)]))
    with pytest.raises(GossamerError, match="'0.weight' is a DTensor.*FSDP"):
        world.model(module)
    try:
        from torch.distributed.fsdp import fully_shard

        sharded = fully_shard(small(), mesh=mesh)
    except (ImportError, RuntimeError, ValueError):
        return
    with pytest.raises(GossamerError, match="DTensor|sharded"):
        world.model(sharded)


@case(3)
def what_differs_between_ranks_is_named_on_every_rank(world):
    odd = world.rank == 1

    def shaped():
        return nn.Sequential(nn.Linear(6, 4 if odd else 5), nn.Linear(4 if odd else 5, 3))

    def formatted():
        return nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last if odd else torch.contiguous_format)

    def frozen():
        module = small()
        module[2].bias.requires_grad_(not odd)
        return module

    who = f"^rank {world.rank}: "
    for module, options, match in (
        (
            shaped(),
            {},
            "parameter '0.weight' differs between ranks: float32 \\[5, 6\\].* on ranks 0, 2; float32 \\[4, 6\\].* on rank 1",
        ),
        (
            small(torch.float64 if odd else torch.float32),
            {},
            "parameter '0.weight' .*float32.* on ranks 0, 2; float64.* on rank 1",
        ),
        (formatted(), {}, "parameter 'weight' .*strides.* on ranks 0, 2; .*strides.* on rank 1"),
        (frozen(), {}, "parameter '2.bias' .*on ranks 0, 2; .*frozen on rank 1"),
        (norm() if odd else small(), {}, "parameter '0.weight' .* on ranks 0, 2; missing on rank 1"),
        (
            small(),
            {"graph": f"random-matching:seed={world.rank % 2}"},
            "graph differs.*seed=0 on ranks 0, 2; .*seed=1 on rank 1",
        ),
        (
            small(),
            {"graph": "ring" if odd else "complete"},
            "graph differs between ranks: complete on ranks 0, 2; ring on rank 1",
        ),
        (small(), {"order": "atc" if odd else "awc"}, "order differs"),
        (small(), {"wire": "bfloat16" if odd else "float32"}, "wire differs"),
    ):
        with pytest.raises(GossamerError, match=who + match):
            world.model(module, **options)
    model = world.model()
    with pytest.raises(GossamerError, match=who + "gossip\\(\\): profile_every differs .*None on ranks 0, 2; 5 on rank 1"):
        model.gossip(torch.optim.SGD(model.parameters(), 0.1), profile_every=5 if odd else None)


@case(2)
def gossip_wants_this_models_optimizers(world):
    model = world.model()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for given, match in (
        ((), "needs the optimizer"),
        ((torch.optim.SGD(small().parameters(), 0.1),), "SGD \\(argument 0\\) trains no parameter of this model"),
        ((optimizer, "adam"), "argument 1 is a str"),
        ((optimizer, optimizer), "twice"),
    ):
        with pytest.raises(GossamerError, match=match):
            model.gossip(*given)
    model.module.append(nn.Linear(3, 3))
    with pytest.raises(GossamerError, match="after it was wrapped"):
        model.gossip(torch.optim.SGD(model.module.parameters(), 0.1))
    del model.module[3]
    model.gossip(optimizer)
    model.gossip(optimizer, profile_every=1)  # in place of the first
    train(world, model, optimizer, 2)
    assert model.steps == 2
    assert len(model.profiles) == 2
    model.gossip(torch.optim.SGD(model.parameters(), 0.1))
    train(world, model, optimizer, 1)  # no longer hooked; and its change is not noticed, as this step was not begun
    assert model.steps == 2


@case(2)
def forgetting_gossip_is_a_warning(world):
    model = world.model()
    with pytest.warns(UserWarning, match="gossip\\(optimizer\\) was not called"):
        model(world.batch(0)[0])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(world.batch(0)[0])  # once is enough


@case(1)
def one_worker_alone_trains_as_the_bare_module_does(world):
    for graph in ("one-peer-exponential", "all-reduce", "ring"):
        model, bare = world.model(graph=graph), small()
        optimizer, other = (torch.optim.SGD(m.parameters(), 0.1, momentum=0.9) for m in (model, bare))
        model.gossip(optimizer)
        train(world, model, optimizer, 5)
        train(world, bare, other, 5)
        assert torch.equal(flat(model), flat(bare))
        assert model.steps == 5
        assert model.mean(3.0) == 3.0
        model.average_()
        assert torch.equal(flat(model), flat(bare))


@case(3)
def consensus_that_one_rank_enters_alone_ends_in_an_error_on_all(world):
    model = world.model()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model.gossip(optimizer)
    train(world, model, optimizer, 2)

    def go():
        if world.rank == 1:
            with model.consensus():
                pass
        train(world, model, optimizer, 3, start=2)

    with pytest.raises(GossamerError, match=f"rank {world.rank} lost rank [012] (at step 2|in consensus)"):
        go()


@case(2)
def a_rank_that_never_arrives_is_named(world):
    if world.rank == 0:
        with pytest.raises(GossamerError, match="rank 0: rank 1 of 2 did not arrive within 1 s"):
            DecentralizedDataParallel(small(), "ring", timeout=1)
    else:
        next(links._opened)  # so that the next model has the same number on both
    dist.barrier()


# --- The end of a process, each in a launch of its own ---------------------------------------------------------------------------


class Lingering:
    """Makes the end of the interpreter last, as large programs do."""

    def __del__(self, sleep=time.sleep):
        sleep(2)


lingering = []


def one_rank_fails(world):
    """Rank 1 raises while rows are on their way. Rank 2 is waiting for it; rank 0 is late and meets a closed connection.

    Rank 1 is long in ending, so that a thread which still waited there would be woken in the middle of it.
    """
    model = world.model()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model.gossip(optimizer)
    train(world, model, optimizer, 3)
    if world.rank == 0:
        time.sleep(1.5)
    loss = loss_of(model, world.batch(3))
    if world.rank == 1:
        lingering.append(Lingering())
        raise ValueError("this worker has had enough")
    loss.backward()
    optimizer.step()


def leave_early(world):
    """Rank 0 hears rank 2 and is heard by rank 1, which is late: it leaves before rank 1 has taken what it sent from a copy."""
    model = world.model(nn.Linear(6, 300_000), "one-peer-exponential", wire="bfloat16")
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model.gossip(optimizer)
    for step in range(3):
        if step == 2 and world.rank == 1:
            time.sleep(1.5)
        model(world.batch(step)[0]).mean().backward()
        optimizer.step()


def resumable(world, folder, until, die_at=None):
    model = world.model(norm(), "one-peer-ring", local_steps=2)
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    model.gossip(optimizer)
    went_on = model.load(folder, {"lr": scheduler})
    if went_on:
        print("went on from", model.steps, flush=True)
    for step in range(model.steps, until):
        train(world, model, optimizer, 1, step)
        scheduler.step()
        if model.steps % 3 == 0:
            if model.steps == die_at and world.rank == 1:
                checkpoint.save = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # when its file would be written
            model.save(folder, {"lr": scheduler})
    return model.state_dict()


def killed(world):
    resumable(world, world.folder / "job", 12, die_at=9)


def resumed(world):
    went_on = resumable(world, world.folder / "job", 12)
    undisturbed = resumable(world, world.folder / "other", 12)
    for name, t in went_on.items():
        assert torch.equal(t, undisturbed[name]), name


ENDS = {f.__name__: f for f in (one_rank_fails, leave_early, killed, resumed)}

# --- Running them ---------------------------------------------------------------------------------------------------------------


def run_all(world, only=()):
    """Which cases failed, and how: ``{name: traceback}``."""
    failed = {}
    for name, (function, worlds) in CASES.items():
        if world.size not in worlds or (only and name not in only):
            continue
        began = time.perf_counter()
        try:
            function(world)
        except (Exception, pytest.fail.Exception):
            failed[name] = traceback.format_exc()
            break  # the others now wait for this one in vain, and torch's own group does not survive that
        print(f"{time.perf_counter() - began:6.2f} s  {name}", flush=True)
    return failed


def main(folder, only):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=TIMEOUT))
    world = World(dist.get_rank(), dist.get_world_size(), folder)
    if only and only[0] in ENDS:
        ENDS[only[0]](world)
        return
    (folder / f"failed-{world.rank}.json").write_text(json.dumps(run_all(world, only)))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
