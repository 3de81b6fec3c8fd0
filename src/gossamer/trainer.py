"""Front door 1: the loop over n replicas in p processes. DBench stands on it.

It owns the one step counter; everything else is a pure function of it, the seed and the state it saves.
"""

from __future__ import annotations

import contextlib
import functools
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import nn

from gossamer.checkpoints import shards, snapshot
from gossamer.checkpoints import trainer as trainer_state
from gossamer.checkpoints.snapshot import Snapshot
from gossamer.checkpoints.trainer import EpochRecord as EpochRecord
from gossamer.data import seeds
from gossamer.data.sampling import sampler
from gossamer.data.sources import Draw, source
from gossamer.data.tasks import Evaluation, Task
from gossamer.errors import GossamerError, TrainingDiverged
from gossamer.graphs import Graph
from gossamer.members.outages import Attendance, Outage, donors
from gossamer.methods import Averaging, Policy, Step
from gossamer.optim import BlockOptimizer, Recipe
from gossamer.optim.learning_rates import LearningRate
from gossamer.rows import batch_norm, profile
from gossamer.rows.backends import Batch
from gossamer.rows.batch_norm import BatchNorm
from gossamer.rows.profile import Profile
from gossamer.rows.replicas import Replicas
from gossamer.rows.vector import Gradients, Parameters
from gossamer.schedules import Resized, Schedule, schedule
from gossamer.transport.exchange import Exchange
from gossamer.transport.mixer import Mixer
from gossamer.transport.probe import Probe
from gossamer.transport.progress import Progress, StepLoss

_REESTIMATE, _REESTIMATE_BATCH = 2048, 128  # training samples with which BatchNorm's statistics are estimated anew


@dataclass(frozen=True)
class Settings:
    """How to train a task on n replicas. ``algorithm``: the method, such as awc, atc or all-reduce. ``batch`` is per replica."""

    replicas: int
    epochs: int
    batch: int
    algorithm: str = "dsgd-atc"
    optimizer: Recipe = field(default_factory=Recipe)
    learning_rate: LearningRate | None = None  # default: constant, the recipe's lr
    seed: int = 0
    partition: str = "reshuffled"  # or shards, or dirichlet:alpha=0.3 (see sampling.py)
    init: Literal["same", "different"] = "same"
    backend: str = "auto"
    vmap_randomness: bool = False
    profile_every: int = 0  # steps; 0: never
    device: str = "cpu"
    batch_norm: BatchNorm = "reestimate"  # how the averaged model gets its running statistics (see batch_norm.py)
    wire: str = "float32"  # bfloat16: rows that travel by edges are rounded (see mixer.py)
    local_steps: int = 1  # average every that many steps
    outages: tuple[Outage, ...] = ()  # workers that fail and perhaps come back (see outages.py); in one process only


class Trainer:
    """``graph``: a name, a Graph or a Schedule. ``allreduce`` needs none. ``exchange``: if the replicas are spread over several
    processes; every one of them makes the same Trainer and calls the same methods."""

    def __init__(
        self,
        task: Task,
        settings: Settings,
        graph: str | Graph | Schedule = "complete",
        *,
        exchange: Exchange | None = None,
        on_profile: Callable[[Profile], None] | None = None,
        on_epoch: Callable[[EpochRecord], None] | None = None,
        on_step: Callable[[int, float], None] | None = None,
    ) -> None:
        n = settings.replicas
        if n < 1:
            raise GossamerError(f"replicas={n}: at least one replica is needed")
        if settings.epochs < 1:
            raise GossamerError(f"epochs={settings.epochs}: at least one epoch is needed")
        how = Averaging.of(graph, settings.algorithm, settings.wire, settings.local_steps)
        self.task, self.settings = task, settings
        self.step = 0  # steps done
        self.device = torch.device(settings.device)
        self.on_profile, self.on_epoch, self.on_step = on_profile, on_epoch, on_step
        self.schedule = planned = schedule(how.graph, n)
        how.refuse(self.schedule)
        self._every, self._wire = how.every, how.wire
        if settings.outages:
            if exchange is not None:
                raise GossamerError("failures: workers can leave and come back in one process only; run this without torchrun")
            self.schedule = Resized(self.schedule)
        self.exchange = exchange
        self.mixer = self._new_mixer(n)
        self.replicas = Replicas(
            task.build,
            len(self.mixer.rows),
            first=self.mixer.rows.start,
            init=settings.init,
            seed=settings.seed,
            device=settings.device,
            backend=settings.backend,
            vmap_randomness=settings.vmap_randomness,
        )
        self.optimizer = BlockOptimizer(settings.optimizer, self.replicas)
        x = Parameters(self.replicas.blocks, in_place=False)
        grad, states = Gradients(self.replicas.blocks), self.optimizer.states
        self.now = Step(self.mixer, x, grad, self._look, self._share_momentum, states)
        if isinstance(planned, Policy):
            planned.meet(self.optimizer.optimizers)
        self.method = how.rule(planned, settings.algorithm)
        if settings.init == "different" and (why := self.method.starts_alike):
            raise GossamerError(f"{self.method.name} {why}, so replicas must start the same; init='different' can't work")
        self.method.begin(self.now)
        self._graph: str | None = None  # of the last step
        self.method.refuse(self.schedule.first(), self.optimizer.optimizers)
        self.learning_rate = settings.learning_rate or LearningRate(settings.optimizer.lr)
        self.train = source(task.train).to(self.device)
        self.batches = sampler(settings.partition, self.train, n, settings.batch, settings.seed)
        self.test = source(task.test).to(self.device)
        self.attendance = Attendance(n, settings.outages, self.batches.steps_per_epoch)
        self.members: tuple[int, ...] = tuple(range(n))  # who takes part now
        self.steps = self.batches.steps_per_epoch * settings.epochs
        self.history: list[EpochRecord] = []
        self.signals: dict[str, float] = {}
        self._epoch_loss, self._epoch_degree = torch.zeros((), dtype=torch.float64), 0
        self.seconds = 0.0
        self._progress = Progress(exchange)
        if exchange is not None:
            exchange.link.agree({key: str(value) for key, value in trainer_state.fingerprint(self).items()})

    @property
    def bytes(self) -> int:
        """Received by each replica so far."""
        return self.now.bytes

    @property
    def epoch(self) -> int:
        return self.step // self.batches.steps_per_epoch

    def run(
        self,
        until: int | None = None,
        save: Path | str | None = None,
        save_every: int | None = None,
        stop: Callable[[], bool] | None = None,
    ) -> list[EpochRecord]:
        """Train up to step ``until`` (default: the end), or until ``stop()`` after some step. With ``save``, a checkpoint
        there after each epoch (or every ``save_every`` steps)."""
        end = self.steps if until is None else min(until, self.steps)
        per_epoch = self.batches.steps_per_epoch
        stopping = stop is not None and self.agreed(stop())
        while self.step < end and not stopping:
            began = time.perf_counter()
            self._train_one_step()
            last = self.step == end or self.step % per_epoch == 0 or (save_every is not None and self.step % save_every == 0)
            if last or self._progress.due:
                stopping = self._report(stop)
            self.seconds += time.perf_counter() - began
            if self.step % per_epoch == 0:
                self._end_epoch()
            if save is not None and self.step % (save_every or per_epoch) == 0:
                self.save(save)
        return self.history

    def agreed(self, stop: bool) -> bool:
        """All processes stop after the same step: when the first one says so."""
        return bool(self.mixer.gather(torch.tensor([float(stop)]), "stop?")[0])

    def _train_one_step(self) -> None:
        t, epoch = self.step, self.epoch
        if t in self.attendance.turns:
            self._take_part(self.attendance.members(t))
        graph = self.schedule.graph(t, epoch, self.settings.epochs, self.signals)
        now, rule = self.now, self.method
        now.t, now.lr = t, self.learning_rate.at(t, self.steps, len(self.members))
        now.graph, now.round, now.optimizers = graph, graph.round(t, self._every), self.optimizer.optimizers
        self._notice(graph)
        self.optimizer.set_lr(now.lr)
        rule.before_forward(now)
        losses = self.replicas.gradients(self.task.loss, self._batch(t), t)
        if self.exchange is None:
            StepLoss(t, losses, now.bytes).check(self.members, epoch)
        self._progress.add(t, losses, now.bytes)
        rule.after_backward(now)
        self.optimizer.clip()
        rule.before_update(now)
        self.optimizer.step()
        rule.after_update(now)
        if self.mixer.probe is not None and (sight := self.mixer.probe.taken()):
            self.schedule.observe(sight)
        self._epoch_degree += now.round.degree
        self.step += 1

    def _report(self, stop: Callable[[], bool] | None) -> bool:
        """Take in the losses of all replicas since the last report. Returns whether to stop."""
        seen, stopping = self._progress.report(stop)
        for one in seen:
            try:
                if self.exchange is not None:  # in one process it was checked before the update
                    one.check(self.members, one.step // self.batches.steps_per_epoch)
            except TrainingDiverged:
                self.step, self.now.bytes = one.step, one.bytes
                raise
            loss = one.losses.double().mean().cpu()
            self._epoch_loss += loss
            if self.on_step is not None:
                self.on_step(one.step + 1, float(loss))
        return stopping

    def _notice(self, graph: Graph) -> None:
        """Whether other replicas take part than in the step before, or with another graph."""
        some = f": {self.members}" if len(self.members) < self.settings.replicas else ""
        before, self._graph = self._graph, f"{graph.name} over {graph.n}{some}"
        if before != self._graph:
            self.method.refuse(graph, self.optimizer.optimizers, self.step)
        if before not in (None, self._graph):
            self.method.members_changed(self.now)

    def _batch(self, t: int) -> Batch:
        """What my rows see. The samples of replicas that are away are not seen at all."""
        if len(self.members) < self.settings.replicas:
            return tuple(tensor[list(self.members)] for tensor in self.batches.batch(t))
        return self.batches.batch(t, self.mixer.rows.start, len(self.mixer.rows))

    def _take_part(self, members: tuple[int, ...]) -> None:
        """Before a step begins: some have left, or come back with the state of another."""
        if members == self.members:
            return
        source = {worker: worker for worker in self.members} | donors(self.members, members)
        rows = [self.members.index(source[worker]) for worker in members]
        self.replicas.take(rows, members)
        self.optimizer.take(rows)
        index = torch.tensor(rows, device=self.device)
        self.now.state = {name: vector.take(index) for name, vector in self.now.state.items()}
        self.mixer = self.now.mixer = self._new_mixer(len(members))
        assert isinstance(self.schedule, Resized)
        self.schedule.resize(len(members))
        self.members = members

    def _new_mixer(self, n: int) -> Mixer:
        mixer = Mixer(n, self.exchange, self._wire)
        if self.schedule.watches and n > 1:
            mixer.probe = Probe(self.exchange, lambda: self.now.lr, self.schedule.learnt)
        return mixer

    def _share_momentum(self, t: int) -> bool:
        moved = {id(block): self.mixer.moved(k, t) for k, block in enumerate(self.replicas.blocks)}
        return self.optimizer.share_momentum(moved)

    def check_parameters(self) -> None:
        """A gradient that is not a number with a loss that is one: found before it can reach a checkpoint."""
        for block in self.replicas.blocks:
            bad = (~torch.isfinite(self.mixer.gather(block.x.sum(dim=1)))).nonzero().flatten().tolist()
            if bad:
                raise TrainingDiverged(
                    f"the parameters of replica {self.members[bad[0]]} are not finite after step {self.step - 1} "
                    f"(epoch {self.epoch}), though its loss was; the last checkpoint is kept"
                )

    def _look(self) -> None:
        every = self.settings.profile_every
        if every and self.step % every == 0:
            seen = profile.take(self.replicas, self.step, self.epoch, self.bytes, self.mixer)
            self.signals |= seen.signals()
            if self.on_profile is not None:
                self.on_profile(seen)

    def _end_epoch(self) -> None:
        per_epoch = self.batches.steps_per_epoch
        self.check_parameters()
        if self.step == self.steps and self.method.does("merge"):
            self.method.merge(self.now)
            with self.averaged():
                self.replicas.share_buffers()
        value = self.value()
        if not math.isfinite(value):
            raise TrainingDiverged(f"the {self.task.metric.name} of the averaged model is {value} after epoch {self.epoch - 1}")
        record = EpochRecord(
            epoch=self.epoch - 1,
            step=self.step,
            lr=self.learning_rate.at(self.step - 1, self.steps, len(self.members)),
            train_loss=float(self._epoch_loss) / per_epoch,
            value=value,
            graph=self.schedule.changes[-1].graph,
            degree=self._epoch_degree / per_epoch,
            bytes=self.bytes,
            consensus_distance=profile.consensus_distance(self.replicas, self.mixer),
            seconds=self.seconds,
        )
        self._epoch_loss.zero_()
        self._epoch_degree = 0
        self.history.append(record)
        if self.on_epoch is not None:
            self.on_epoch(record)

    # --- How good is it? -------------------------------------------------------------------------------------------------

    def value(self) -> float:
        """The metric of the averaged model on the test data."""
        with self.averaged() as model:
            return self.task.metric.of(model, self.test)

    def evaluate(self, singles: int | None = None) -> Evaluation:
        """The averaged model, and every single replica, or so many of them, evenly spread. One that differs from the one before
        takes as long as :meth:`value`."""
        result = self.evaluate_unless(lambda: False, singles)
        assert result is not None
        return result

    def evaluate_unless(self, stop: Callable[[], bool], singles: int | None = None) -> Evaluation | None:
        """The same; None if ``stop()`` says so meanwhile. Several processes can't agree on that here, so they go on."""
        replicas, metric, start, n = self.replicas, self.task.metric, self.mixer.rows.start, self.mixer.n
        some = n if singles is None else max(1, min(singles, n))
        chosen = {k * n // some for k in range(some)}
        mine, own, last = [math.nan] * replicas.r, [math.nan] * replicas.r, -1
        shares = self.batches.label_counts() if self.test.classes is not None else None
        for i in range(replicas.r):
            if start + i in chosen:
                if self.exchange is None and stop():
                    return None
                if last >= 0 and replicas.alike(i, last):
                    mine[i] = mine[last]
                elif shares is None:
                    with replicas.replica(i) as model:
                        mine[i] = metric.of(model, self.test)
                else:
                    with replicas.replica(i) as model:
                        mine[i], means = metric.by_label(model, self.test)
                if shares is not None:
                    own[i] = metric.of_labels(means, shares[self.members[start + i]])
                last = i
        both = self.mixer.gather(torch.tensor([mine, own], dtype=torch.float64).T.contiguous(), "evaluate")
        values, owns = both[sorted(chosen)].T.tolist()
        with self.averaged() as model:
            value, seen = metric.of(model, self.test), metric.of(model, self.train, len(self.test))
        personal = None if shares is None else float(np.mean(owns))
        return Evaluation(value, sum(values) / len(values), metric.worst(values), seen, float(np.std(values)), personal)

    @contextlib.contextmanager
    def averaged(self) -> Iterator[nn.Module]:
        """The averaged model, in evaluation mode, for as long as the block lasts. All processes take part."""
        with self.replicas.averaged(self.mixer.mean) as model:
            if self.settings.batch_norm == "reestimate" and batch_norm.layers(model):
                with seeds.undisturbed(self.device):  # dropout may draw
                    batch_norm.reestimate(model, self._passes(model))
            yield model

    def _passes(self, model: nn.Module) -> Iterator[Callable[[], object]]:
        """Some training data, the same ones each time and in every process."""
        seed = self.settings.seed
        some = torch.randperm(len(self.train), generator=seeds.generator(seed, -7))[:_REESTIMATE]
        parts = [part for part in some.split(_REESTIMATE_BATCH) if len(part) > 1 or len(some) == 1]
        for k, part in enumerate(parts):
            seeds.set_default(seeds.derive(seed, -8, k), self.device)
            (batch,) = zip(*self.train.draw(part.unsqueeze(0), Draw(seed, -1 - k, 0)), strict=True)
            yield functools.partial(self.task.loss, model, *batch)

    # --- Checkpoint and resume -------------------------------------------------------------------------------------------

    def save(self, path: Path | str) -> None:
        """Everything needed to go on. Refuses to replace a good checkpoint by parameters that are not numbers. With several
        processes ``path`` is a folder, with a file for each of them."""
        self.check_parameters()
        parts = trainer_state.capture(self)
        if self.exchange is None:
            snapshot.save(Path(path), Snapshot(self.step, trainer_state.fingerprint(self), parts))
        else:
            shards.save(Path(path), self.step, parts, trainer_state.fingerprint(self), None, self.exchange)

    def load(self, path: Path | str, trusted: Callable[[dict[str, Any]], bool] = lambda progress: True) -> bool:
        """Go on exactly where :meth:`save` was called. The settings must be the same; the replicas may be spread over another number of
        processes. ``trusted`` may look at the progress and say no; returns whether it was loaded."""
        path = Path(path)
        found = trainer_state.load(self, path)
        good = found is not None and trusted(found.parts["progress"])
        if self.exchange is not None:
            good = bool(self.exchange.share(good)) and found is not None  # the first one decides
        if good and found is not None:
            trainer_state.restore(self, found, str(path))
        return good
