"""``DecentralizedDataParallel``: a drop-in for ``torch.nn.parallel.DistributedDataParallel`` in a person's own training loop.

    model = gossamer.DecentralizedDataParallel(model, graph="one-peer-exponential")
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    model.gossip(optimizer)              # averaging happens inside optimizer.step()
    ...
    with model.consensus():              # parameters and buffers averaged over the workers, and restored afterwards
        evaluate(model)
    model.average_()                     # for good, at the end of training

In "adapt while combine" (the default) the exchange starts at the first training-mode forward after a step, or in ``step()`` if none
came, and ends in ``step()``. Between ``step()`` and that forward nothing is on its way, so checkpoints, ``load_state_dict``, weight
clamping and EMA swaps are safe there. Only ``step()`` advances the one step counter.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import os
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from gossamer.checkpoints import shards
from gossamer.checkpoints import worker as state_of_worker
from gossamer.checkpoints.snapshot import Snapshot
from gossamer.errors import Diverged, GossamerError
from gossamer.graphs import Graph, Mean, Round, plain_name, told_hosts
from gossamer.members.changes import Survival
from gossamer.members.roster import Change
from gossamer.members.store import Seat, open_link
from gossamer.optim import momentum
from gossamer.parallel import averaged, scalers
from gossamer.parallel.checks import check_choice, refuse_ddps, refuse_strangers, refuse_unfit
from gossamer.parallel.gradients import Gradients
from gossamer.parallel.momentum import Shared
from gossamer.parallel.uneven import Stretch
from gossamer.parallel.wrapper import Wrapper
from gossamer.rows import profile
from gossamer.rows.finite import Fault
from gossamer.rows.flat import Flat
from gossamer.rows.profile import Profile
from gossamer.rows.vector import Parameters
from gossamer.schedules import Order, Schedule, schedule
from gossamer.transport.exchange import Exchange
from gossamer.transport.mixer import Mixer
from gossamer.transport.operation import Traffic
from gossamer.transport.probe import Probe
from gossamer.transport.transfer import Transfer

ALL_REDUCE = "all-reduce"


class DecentralizedDataParallel(Wrapper):
    """Averages parameters with a few neighbours each step.

    - ``graph``: a name, a Graph or a Schedule over the workers; ``"all-reduce"`` averages gradients over all of them, as DDP
      does. A schedule that changes with the epoch (Ada) needs ``epochs`` and ``steps_per_epoch``.
    - ``order``: ``"awc"``, adapt while combine: x <- W x - η d(x), the exchange runs under forward and backward; or ``"atc"``,
      adapt then combine: x <- W (x - η d(x)), which waits for it. By default the schedule's: atc for ``"ada-auto"``, else awc.
    - ``local_steps``: average every that many steps.
    - ``wire``: ``"bfloat16"`` halves what goes to neighbours; one's own copy stays exact.
    - ``send_copy``: send from a copy, so that a slow receiver does not hold a fast sender; costs one pass over the parameters.
    - ``init``: ``"broadcast"`` gives everyone rank 0's values, as DDP does; ``"keep"`` leaves them.
    - ``timeout``: seconds without a word from a worker we wait for, after which it is an error.
    - ``check_finite``: parameters of a worker that are not finite any more are not averaged, and are an error on that worker.

    Of DDP's other arguments (``device_ids`` …) each is refused with a word on what to do without it.
    """

    def __init__(
        self,
        module: nn.Module,
        graph: str | Graph | Schedule = "auto",
        *,
        order: Order | None = None,
        local_steps: int = 1,
        wire: str = "float32",
        send_copy: bool = False,
        init: Literal["broadcast", "keep"] = "broadcast",
        epochs: int | None = None,
        steps_per_epoch: int | None = None,
        timeout: float = 300.0,
        check_finite: bool = True,
        **ddps: object,
    ) -> None:
        super().__init__()
        self._survival: Survival | None = None  # under gossamer launch, from gossip() on
        refuse_ddps([*ddps, *(["device_ids"] if isinstance(graph, (list, tuple)) else [])])
        if order is not None:
            check_choice("order", order, ("awc", "atc"))
        check_choice("init", init, ("broadcast", "keep"))
        if local_steps < 1:
            raise GossamerError(f"local_steps={local_steps}: workers average every that many steps, so it is at least 1")
        refuse_unfit(module)
        self.module = module
        self._flat = Flat(self._bare())
        link = open_link(self._device, timeout, joins=True)
        self._exchange = Exchange(link) if link else None
        self._seat = Seat.taken() if self._exchange is not None and self._device.type == "cpu" else None
        self.averages_gradients = isinstance(graph, str) and plain_name(graph) == ALL_REDUCE
        if self._seat is not None and self._seat.joins and self.averages_gradients:
            raise GossamerError("with graph='all-reduce' nobody can come back: all workers need all others in each step")
        self.rank = self._seat.rank if self._seat else link.rank if link else 0
        self._mixer = Mixer(self.size, self._exchange, wire, send_copy)
        self._mixer.check_finite = check_finite
        planned = self._seat.size if self._seat else self.size
        self.schedule = schedule("complete" if self.averages_gradients else _per_host(graph), planned, (ALL_REDUCE, "auto"))
        self.order: Order = order or self.schedule.order
        self.local_steps, self.send_copy = local_steps, send_copy
        self.epochs, self.steps_per_epoch = epochs or 1, steps_per_epoch
        if self.schedule.by_epoch and not (epochs and steps_per_epoch):
            raise GossamerError(
                f"graph {self.schedule.describe()!r} changes with the epoch, so it must know them: "
                "DecentralizedDataParallel(…, epochs=90, steps_per_epoch=len(loader)), in optimizer steps"
            )
        if self.schedule.watches and local_steps > 1:
            raise GossamerError(
                f"local_steps={local_steps}: {self.schedule.describe()!r} decides by itself how often to average; leave it at 1"
            )
        if self.schedule.watches and self._exchange is not None:
            self._mixer.probe = Probe(self._exchange, _weakly(self._rate), _weakly(self._learnt))
        self.steps = 0  # done; the one counter
        self._round: Round = Mean(1)  # of the last averaging
        self.profiles: list[Profile] = []
        self.signals: dict[str, float] = {}
        self._gradients: dict[torch.optim.Optimizer, Gradients] = {}  # of the optimizers, in the order in which they step
        self._undo: list[Callable[[], object]] = []
        self._begun = False  # this step's averaging, if it has one
        self._x = Parameters(self._flat.blocks, in_place=True)
        self._in_flight: Transfer | None = None
        self._stretch: Stretch | None = None  # inside uneven()
        self._stretches = 0
        self._also: Mapping[str, Any] = {}
        self._averaged = False  # inside consensus()
        self._momentum = Shared(self._flat, self._mixer) if self.schedule.shares_momentum else None
        self._warned = False
        # Not as a decorator: that would load the whole compiler when Gossamer is imported.
        self._plainly = torch.compiler.disable(_weakly(self._on_forward))
        self._profile_every = 0
        self._on_profile: Callable[[Profile], object] | None = None
        if self._exchange is not None:
            weakref.finalize(self, self._exchange.drop).atexit = False
        if self._exchange is not None and not self._joins:
            self._agree(
                {**self._setup(), "wire": wire, "init": init, "epochs": str(epochs), "steps_per_epoch": str(steps_per_epoch)}
                | {"check_finite": str(check_finite)}
            )
            self._agree(self._flat.signature())
            if init == "broadcast":
                averaged.broadcast(self._flat, self._exchange)

    def _agree(self, signature: dict[str, str]) -> None:
        if self._exchange is not None and not self._joins and self._survival is None:
            self._exchange.link.agree(signature)

    @property
    def _joins(self) -> bool:
        """Started by ``gossamer launch`` to join a job that is running."""
        return self._seat is not None and self._seat.joins

    @property
    def _joining(self) -> bool:
        """Whether this worker does not take part, until its next training step: it was just started, or has diverged."""
        return self._joins if self._survival is None else self._survival.joining

    @property
    def size(self) -> int:
        """How many workers take part now."""
        if self._survival is not None:
            return len(self._survival.members)
        return self._exchange.size if self._exchange else 1

    @property
    def members(self) -> tuple[int, ...]:
        """The ranks of the workers that take part now. Under ``gossamer launch`` they may change before any step, and in each collective
        (``mean()``, ``consensus()``, ``average_()``, ``save()``), after which they are the same on all workers that have its result."""
        return self._survival.members if self._survival is not None else tuple(range(self.size))

    @property
    def leads(self) -> bool:
        """Whether this is the first of them: for what one worker does for all, such as saving. Rank 0 may be gone."""
        return self.rank == self.members[0] and not self._joining

    @property
    def changes(self) -> list[Change]:
        """What has happened to the members so far."""
        return self._survival.changes if self._survival is not None else []

    @property
    def traffic(self) -> Traffic:
        """Bytes sent and received, and how long communication took and was waited for."""
        return self._exchange.traffic if self._exchange else Traffic()

    # --- The training loop -----------------------------------------------------------------------------------------------

    def gossip(
        self,
        *optimizers: torch.optim.Optimizer,
        scaler: torch.amp.GradScaler | None = None,
        profile_every: int | None = None,
        on_profile: Callable[[Profile], object] | None = None,
        also: Mapping[str, Any] | None = None,
        on_change: Callable[[Change], object] | None = None,
    ) -> None:
        """Average inside ``step()`` of the last of these optimizers; with several, call each once per step, in this order.

        ``scaler``: the GradScaler that calls ``step()``, so that a step it skips is averaged all the same. ``profile_every``:
        every so many steps look at all workers (norms, dispersion, consensus distance) just before averaging; the result goes
        to ``model.profiles``, or to ``on_profile``.

        Under ``gossamer launch``: ``also``, what else a worker that joins takes over (LR schedulers …; what has a state_dict, by
        name), and ``on_change``, called with each :class:`Change` of the members just before the step in which it takes effect.
        """
        self._refuse_alone("gossip()")
        self._refuse_busy("gossip()")
        refuse_strangers(optimizers, self._bare(), self._flat.names)
        for optimizer in optimizers if self.schedule.shares_momentum else ():
            momentum.check(optimizer)
        self._agree(
            {
                "gossip(): the optimizers": ", ".join(type(optimizer).__name__ for optimizer in optimizers),
                "gossip(): profile_every": str(profile_every),
                "gossip(): the scaler": "none" if scaler is None else "given",
            }
        )
        for undo in reversed(self._undo):
            undo()
        self._gradients = {optimizer: Gradients(optimizer, self._mixer, self._flat.names) for optimizer in optimizers}
        last = optimizers[-1]
        self._undo = [optimizer.register_step_pre_hook(self._before_any_step).remove for optimizer in optimizers]
        self._undo += [optimizer.register_step_post_hook(self._after_any_step).remove for optimizer in optimizers]
        self._undo += [
            last.register_step_pre_hook(lambda *_: self._before_step()).remove,
            last.register_step_post_hook(lambda *_: self._after_step()).remove,
        ]
        # With several, the first ones change parameters that are being sent: so a copy is sent, and its change is added.
        self._mixer.send_copy = self.send_copy or len(optimizers) > 1
        if scaler is not None:
            self._undo.append(scalers.watch(scaler, self._scaled_step, self._before_unscaling))
        self._profile_every, self._on_profile = profile_every or 0, on_profile
        if self._seat is not None and self._exchange is not None and not self.averages_gradients:
            self._survive(self._seat, self._exchange, also or {}, on_change)

    def _survive(
        self, seat: Seat, exchange: Exchange, also: Mapping[str, Any], on_change: Callable[[Change], object] | None
    ) -> None:
        if self._survival is None:
            optimizers = ", ".join(type(optimizer).__name__ for optimizer in self._gradients)
            signature = {key: value for key, value in self._setup().items() if key != "workers"} | self._flat.signature()
            self._survival = Survival(
                seat,
                exchange,
                self._mixer,
                self.schedule,
                _weakly(self._captured),
                _weakly(self._take_over),
                {**signature, "wire": self._mixer.wire.name, "the optimizers": optimizers},
                self._fault,
            )
            if seat.joins:
                self.steps = self._survival.position()
        self._also = also
        self._survival.on_change = on_change

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.training and torch.is_grad_enabled() and not self._averaged:
            self._plainly()
        return self.module(*args, **kwargs)

    def _on_forward(self) -> None:
        if not self._gradients and self._exchange is not None and not self._warned:
            self._warned = True
            warnings.warn("model.gossip(optimizer) was not called, so nothing is averaged", stacklevel=3)
        if self.averages_gradients:
            for gradients in self._gradients.values():
                gradients.done()  # what was averaged for a step that did not come is no longer all there is
        if self._survival is not None and self._survival.joining:
            self.steps = self._survival.before(self.steps)  # before the forward pass, in either order: parameters change
        if self.order == "awc" and not self.averages_gradients and self._gradients:
            if self._in_flight is not None and not self._mixer.send_copy:
                self._flat.check(busy=True)
            self._start()

    def _begin(self) -> bool:
        """Whether the step has just begun: it may have several forwards, and several optimizers."""
        if self._begun:
            return False
        self._begun = True
        if self._stretch is not None:
            self._stretch.before(self.steps)
        if self._survival is not None and (step := self._survival.before(self.steps)) != self.steps:
            self.steps = step  # only then: setting an attribute of a module is slow
        return True

    def _start(self) -> None:
        """Parameters set out, if this is a step with averaging."""
        if not self._begin():
            return
        if self._flat.check() and self._momentum is not None:
            self._momentum.jumped = True
        self._flat.adopt()
        self._look()
        if self._exchange is None or (self.steps + 1) % self.local_steps:
            return
        self._round = self._graph().round(self.steps // self.local_steps)
        self._flat.depart()
        with torch.no_grad():
            self._in_flight = self._mixer.start(self._round, self.steps, self._x)

    def _finish(self) -> None:
        if self._in_flight is None:
            return
        self._flat.check(busy=not self._mixer.send_copy)
        with torch.no_grad():
            self._in_flight.into(self._x)
        self._in_flight = None
        if self._mixer.probe is not None and (sight := self._mixer.probe.taken()):
            self._current_schedule.observe(sight)
            self.schedule.succeed(self._current_schedule)
        if self._momentum is not None:
            self._momentum.share(self._gradients, self._round, self.steps)
        if self._mixer.fault is not None:
            self._leave(self._mixer.fault)

    def _leave(self, fault: Fault) -> None:
        """This worker has diverged. Under ``gossamer launch`` it comes back with the state of another one."""
        if self._survival is not None:
            self._survival.leave(fault)
            return
        self._mixer.fault = None
        raise Diverged(
            f"{fault.describe(self.rank)}; the other workers have not taken it over. A smaller learning rate or clipped gradients may "
            "help; with check_finite=False such parameters are averaged like any others"
        )

    def _fault(self) -> Fault | None:
        """What of my parameters is not finite."""
        for block in self._flat.blocks:
            self._mixer.look_for_fault(block, block.x[0])
        return self._mixer.fault

    def _learnt(self) -> tuple[float, ...]:
        return self._current_schedule.learnt()

    def _rate(self) -> float:
        """The learning rate; with several optimizers, or groups, the first one's stands for all."""
        return float(next(iter(self._gradients)).param_groups[0]["lr"])

    @property
    def _current_schedule(self) -> Schedule:
        """``schedule``, or what it has become for the workers that are left."""
        changed = self._survival or self._stretch
        return changed.schedule if changed is not None else self.schedule

    def _graph(self) -> Graph:
        return self._current_schedule.graph(self.steps, min(self._epoch, self.epochs - 1), self.epochs, self.signals)

    @property
    def _epoch(self) -> int:
        return self.steps // self.steps_per_epoch if self.steps_per_epoch else 0

    def _before_any_step(self, optimizer: torch.optim.Optimizer, args: tuple, kwargs: dict) -> None:
        if self._averaged:
            raise GossamerError(f"optimizer.step() inside consensus() (step {self.steps}): its update would be thrown away")
        closure = kwargs.get("closure") is not None or any(a is not None and a is not optimizer for a in args)
        if closure and (self.averages_gradients or self.order == "awc"):
            raise GossamerError(
                "optimizer.step(closure) evaluates the loss inside step(), where adapt-while-combine has already mixed the "
                "parameters and all-reduce has averaged the gradients; use order='atc' with a graph, or step() without a closure"
            )
        if self._momentum is not None:
            self._momentum.notice()
        if self.averages_gradients:
            self._begin()
            self._gradients[optimizer].average()

    def _after_any_step(self, optimizer: torch.optim.Optimizer, args: tuple, kwargs: dict) -> None:
        self._gradients[optimizer].done()

    def _before_step(self) -> None:
        if self.order == "awc" and not self.averages_gradients:
            self._start()
            self._finish()

    def _after_step(self) -> None:
        if self.averages_gradients:
            self._look()
        elif self.order == "atc":
            self._start()
            self._finish()
        self.steps += 1
        self._begun = False
        if self._momentum is not None:
            self._momentum.settle()

    def _scaled_step(self, optimizer: torch.optim.Optimizer, step: Callable[[], Any]) -> Any:
        before = self.steps
        self._before_unscaling(optimizer)  # a fused optimizer's gradients are looked at without unscaling them
        result = step()
        if optimizer in self._gradients:
            self._gradients[optimizer].done()
        if optimizer is next(reversed(self._gradients)) and self.steps == before:  # skipped, and averaged all the same
            if self._momentum is not None:
                self._momentum.notice()
            self._before_step()
            self._after_step()
        return result

    def _before_unscaling(self, optimizer: torch.optim.Optimizer) -> None:
        """Before the check for infinite gradients, so that all workers find the same."""
        if self.averages_gradients and optimizer in self._gradients:
            self._begin()
            self._gradients[optimizer].average()

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """DDP's, for scripts that have it. It does nothing: only ``step()`` exchanges anything, however many backwards came before."""
        return contextlib.nullcontext()

    def average_gradients(self) -> None:
        """With ``graph="all-reduce"``: average the gradients now and not in ``step()``, to clip or look at the averaged ones.
        With any other graph gradients are one's own, and this does nothing; so a loop may always call it."""
        self._refuse_copy("average_gradients()")
        if self.averages_gradients:
            self._begin()
            for gradients in self._gradients.values():
                gradients.average(again=True)

    # --- Looking at all workers ------------------------------------------------------------------------------------------

    def _look(self) -> None:
        if not self._profile_every or self.steps % self._profile_every:
            return
        with torch.no_grad():
            seen = profile.take(self._flat, self.steps, self._epoch, self.traffic.received, self._mixer)
        self.signals["consensus_distance"] = seen.consensus_distance
        self.signals |= {name: float(values.mean()) for name, values in seen.dispersion().items()}
        if self._on_profile is not None:
            self._on_profile(seen)
        else:
            self.profiles.append(seen)

    @torch.no_grad()
    def mean(self, value: Tensor | float) -> Tensor | float:
        """The mean over all workers, of a tensor or a number: for logging and decisions. All of them call it."""
        self._refuse_alone("mean()")
        if not isinstance(value, Tensor):
            return float(self._mixer.mean(torch.tensor([value], dtype=torch.float64, device=self._device)))
        if not value.dtype.is_floating_point:
            raise GossamerError(f"mean() of a {value.dtype} tensor; convert it to a floating-point one first")
        return self._mixer.mean(value.detach().to(self._device).flatten()).reshape(value.shape).clone()

    @contextlib.contextmanager
    def consensus(self, reestimate: Iterable[Any] | None = None) -> Iterator[DecentralizedDataParallel]:
        """Parameters and floating-point buffers (BatchNorm's statistics) are their mean over the workers, for as long as the
        block lasts; then each worker has its own again. All workers enter it together.

        ``reestimate``: some of this worker's training inputs, batch by batch; BatchNorm's statistics are then estimated anew
        for the averaged model (and averaged over the workers), which is more faithful than their mean.
        """
        self._refuse_alone("consensus()")
        self._refuse_averaged("consensus()")
        self._flat.check(busy=self._in_flight is not None and not self._mixer.send_copy)
        touched = self._flat.touched
        with averaged.averaged(self._flat, self._mixer, self.module, reestimate):
            self._averaged = True
            try:
                yield self
            finally:
                self._averaged = False
        if not touched:
            self._flat.settle()  # they are what they were

    def average_(self) -> None:
        """Parameters and floating-point buffers become their mean over the workers, for good. All workers call it."""
        self._refuse_alone("average_()")
        if self._joins and self._joining:
            raise GossamerError(
                f"rank {self.rank} can't average: it has not joined the others, which it does in its first training step; "
                "the job may have ended without it"
            )
        self._refuse_averaged("average_()")
        self._refuse_busy("average_()")
        self._flat.check()
        averaged.average_(self._flat, self._mixer)

    # --- Uneven data -----------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def uneven(self) -> Iterator[None]:
        """In this block workers may do different numbers of steps: one that is done leaves the graph, and the others go on
        without it. At the end all wait for each other; who left early takes over the parameters of one who stayed. All workers
        enter it; ``mean()``, ``consensus()`` and the like have their place outside of it."""
        self._refuse_alone("uneven()")
        self._refuse_busy("uneven()")
        if self._survival is not None:
            raise GossamerError(
                "uneven() under gossamer launch: a worker that ends is left out anyway; let it end, or use torchrun"
            )
        if self._exchange is None:
            yield
            return
        self._stretches += 1
        self._stretch = stretch = Stretch(self._exchange, self._mixer, self.schedule, self._stretches, self.steps)
        try:
            yield
            stretch.leave(self.steps, self._exchange_only)
            self.steps = stretch.rejoin(self.steps, self._flat)
        except BaseException:
            stretch.abandon()
            raise
        finally:
            self._stretch = None

    def _exchange_only(self) -> int:
        """A step without training, for the sake of the others."""
        if self.averages_gradients:
            for optimizer, gradients in self._gradients.items():
                optimizer.zero_grad()
                gradients.average()
                gradients.done()
                optimizer.zero_grad()
        else:
            self._start()
            self._finish()
        self.steps += 1
        self._begun = False
        return self.steps

    # --- Checkpoints -----------------------------------------------------------------------------------------------------

    def save(self, folder: Path | str, also: Mapping[str, Any] | None = None) -> None:
        """One full checkpoint per worker (model, optimizers, step and schedule; call it after ``step()``), and the averaged
        model as ``averaged.safetensors``. ``also``: what else has a state_dict (LR schedulers, a GradScaler), by name.

        All workers call it; it returns when all have written, and keeps the checkpoint before this one until then.
        """
        self._refuse_alone("save()")
        self._refuse_averaged("save()")
        self._refuse_busy("save()")
        self._flat.check()
        if self._joining:
            print(f"gossamer: rank {self.rank} takes no part until its next training step, and saves nothing", flush=True)
            return
        state = self._capture(also or {})
        with self.consensus():
            averaged = {name: t.clone() for name, t in self.state_dict().items() if isinstance(t, Tensor)}
        while True:
            members = self.members
            setup, place = self._setup() | self._signature(), members.index(self.rank)
            shards.write(Path(folder), self.steps, place, len(members), state, setup, None if place else averaged)
            if self._exchange is not None:
                self._exchange.gather(torch.zeros(1), "save()")
            if self.members == members:
                break  # otherwise a worker died meanwhile, and there would be no whole set of files
        shards.prune(Path(folder), self.steps)

    @torch.inference_mode(False)
    def load(self, folder: Path | str, also: Mapping[str, Any] | None = None) -> bool:
        """Go on from the last step that all workers have on disk. Returns whether there was one. Call it after ``gossip()``."""
        self._refuse_alone("load()")
        self._refuse_busy("load()")
        if self._survival is not None and self._survival.joining:
            return False  # the others are further: it takes over the state of one of them
        setup, layout = self._setup() | self._signature(), state_of_worker.LAYOUT
        found = shards.load(
            Path(folder), setup, self._exchange, layout, self._device, functools.partial(self._check, also or {})
        )
        if found is None:
            return False
        self._restore(found.parts, f"the checkpoint in {folder}", also or {})
        self.steps, self._begun = found.step, False
        return True

    def _check(self, also: Mapping[str, Any], found: Snapshot, where: str) -> None:
        state_of_worker.check(found.parts, where, self._bare(), list(self._gradients), also)

    def _signature(self) -> dict[str, str]:
        return {"wire": self._mixer.wire.name, **state_of_worker.signature(self._bare(), list(self._gradients))}

    def _captured(self) -> dict[str, Any]:
        """For a worker that joins."""
        return self._capture(self._also)

    def _take_over(self, state: dict[str, Any]) -> None:
        self._restore(state, "the state of the others", self._also)

    def _capture(self, also: Mapping[str, Any]) -> dict[str, Any]:
        state = state_of_worker.capture(self._bare(), list(self._gradients), self.schedule, self.signals, also)
        now = self._current_schedule.state_dict()
        state["schedule"] |= {key: value for key, value in now.items() if key != "changes"}
        return state | {"means": self._mixer.state_dict(self._flat.blocks)}

    def _restore(self, state: dict[str, Any], where: str, also: Mapping[str, Any]) -> None:
        self.signals = state_of_worker.restore(state, where, self._bare(), list(self._gradients), self.schedule, also)
        self._mixer.load_state_dict(self._flat.blocks, state["means"])

    def _setup(self) -> dict[str, str]:
        graph = ALL_REDUCE if self.averages_gradients else self.schedule.describe()
        return {"graph": graph, "order": self.order, "local_steps": str(self.local_steps), "workers": str(self.size)}

    # --- The end ---------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """This worker takes no part any more: its threads and connections are given back, and the others go on without it under
        ``gossamer launch``; under torchrun all workers close together. The module and its optimizers stay as they are. A model that is
        dropped is closed by itself; at the end of the process there is nothing to do."""
        self._refuse_busy("close()")
        for undo in reversed(self._undo):
            undo()
        self._undo, self._gradients, self._warned, self.is_copy = [], {}, True, True
        if self._exchange is not None:
            self._exchange.drop()

    # --- A copy ----------------------------------------------------------------------------------------------------------

    def __deepcopy__(self, memo: dict[int, Any]) -> DecentralizedDataParallel:
        """The model, but not its place among the workers: for an EMA, or a frozen target network."""
        made = type(self).__new__(type(self))
        nn.Module.__init__(made)
        memo[id(self)] = made
        made.module = copy.deepcopy(self.module, memo)
        made.training = self.training
        made._exchange, made._averaged, made.is_copy = None, True, True  # with _averaged, forward is the module's own
        return made

    is_copy = False

    # --- Refusals --------------------------------------------------------------------------------------------------------

    def _refuse_copy(self, what: str) -> None:
        if self.is_copy:
            raise GossamerError(
                f"{what} on a closed DecentralizedDataParallel, or a copy of one: it takes no part in the averaging"
            )

    def _refuse_alone(self, what: str) -> None:
        """What all workers have to do together."""
        self._refuse_copy(what)
        if self._stretch is not None:
            raise GossamerError(
                f"{what} inside uneven() (step {self.steps}): not all workers may get there; call it after the block"
            )

    def _refuse_busy(self, what: str) -> None:
        if not self.is_copy and self._in_flight is not None:
            raise GossamerError(
                f"{what} after a training-mode forward and before step() (step {self.steps}), while parameters are being sent; "
                "call it after optimizer.step() (also for micro-batches that are left over), or run that forward in eval mode or "
                "under torch.no_grad()"
            )

    def _refuse_averaged(self, what: str) -> None:
        if self._averaged:
            raise GossamerError(f"{what} inside consensus() (step {self.steps}): call it after the block")

    @property
    def _device(self) -> torch.device:
        return self._flat.blocks[0].x.device


def _weakly(method: Callable[..., Any]) -> Callable[..., Any]:
    """A method of the model, for a holder that outlives it, or that the model holds: it must be possible to drop the model."""
    held = weakref.WeakMethod(method)

    def call(*args: Any) -> Any:
        there = held()
        assert there is not None
        return there(*args)

    return call


def _per_host(graph: str | Graph | Schedule) -> str | Graph | Schedule:
    """What torchrun says about hosts decides what ``auto`` is; a graph over hosts takes the workers per host from there too."""
    # Who joins a job has other numbers than those who began it, and must find the same graph: our launcher says what they were.
    env = os.environ
    n = int(env.get("GOSSAMER_WORKERS") or env.get("WORLD_SIZE") or 1)
    local = int(env.get("GOSSAMER_WORKERS_PER_HOST") or env.get("LOCAL_WORLD_SIZE") or 1)
    if isinstance(graph, str) and plain_name(graph) == "auto":
        hosts, rest = divmod(n, local)
        over_hosts = local > 1 and hosts > 1 and not rest and not hosts & (hosts - 1)
        graph = "alternating-exponential-ring" if over_hosts else "one-peer-exponential"
    return told_hosts(graph, local) if "LOCAL_WORLD_SIZE" in env else graph
