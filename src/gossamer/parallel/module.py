"""``DecentralizedDataParallel``: a drop-in for ``torch.nn.parallel.DistributedDataParallel`` in a person's own training loop.

    model = gossamer.DecentralizedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    model.gossip(optimizer)              # averaging happens inside backward() or optimizer.step()
    ...
    with model.consensus():              # parameters and buffers averaged over the workers, and restored afterwards
        evaluate(model)
    model.average_()                     # for good, at the end of training

With a gossip graph rows are in flight from the first training-mode forward after a step to the next ``step()``. Between ``step()`` and
that forward nothing is, so checkpoints, ``load_state_dict`` and EMA swaps are safe there. ``driver.py`` has the moments of a step.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from gossamer.checkpoints.background import Writer, release
from gossamer.errors import GossamerError
from gossamer.graphs import Graph
from gossamer.members.roster import Change
from gossamer.members.store import Seat, open_link
from gossamer.methods import ALL_REDUCE, Averaging, Method, Order
from gossamer.parallel import averaged, checks, policies, state, surroundings
from gossamer.parallel.driver import Driver
from gossamer.parallel.hooks import weakly
from gossamer.parallel.journal import Log, traced
from gossamer.parallel.surroundings import Watch
from gossamer.parallel.uneven import stretch
from gossamer.parallel.wrapper import Wrapper
from gossamer.rows.flat import Flat
from gossamer.rows.profile import Profile
from gossamer.schedules import Schedule, schedule
from gossamer.transport.exchange import Exchange
from gossamer.transport.mixer import Mixer
from gossamer.transport.operation import Traffic
from gossamer.transport.probe import Probe


class DecentralizedDataParallel(Wrapper):
    """Trains as DDP does; with a graph, averages parameters with a few neighbours each step.

    - ``graph``: a name, a Graph or a Schedule over the workers. ``"auto"`` averages gradients over all of them, in 8 bits where the network
      is waited for; ``"all-reduce"`` in float32. A schedule that changes with the epoch (Ada) needs ``epochs`` and ``steps_per_epoch``.
    - ``method``: what a step does, a name with options (``"qgm:beta=0.9"``) or a Method. ``"awc"``, adapt while combine:
      x <- W x - η d(x), the exchange runs under forward and backward; ``"atc"``, adapt then combine: x <- W (x - η d(x)), which waits for
      it. By default the graph's: atc for ``"ada-auto"``, else awc. ``order`` is an older name for the same argument.
    - ``local_steps``: average every that many steps.
    - ``wire``: ``"bfloat16"`` halves what goes to neighbours; one's own copy stays exact.
    - ``send_copy``: send from a copy, so that a slow receiver does not hold a fast sender; costs one pass over the parameters.
    - ``init``: ``"broadcast"`` gives all workers rank 0's values, as DDP does; ``"keep"`` leaves them.
    - ``timeout``: seconds without a word from a worker we wait for, after which it is an error.
    - ``check_finite``: parameters of a worker that are not finite any more are not averaged, and are an error on that worker.

    DDP's other arguments (``find_unused_parameters`` …) are taken where they make no difference; one that would is refused, with a word on
    what to do instead.
    """

    is_copy = False

    def __init__(
        self,
        module: nn.Module,
        graph: str | Graph | Schedule | list[Any] | tuple[Any, ...] | None = "auto",
        *,
        method: str | Method | None = None,
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
        if graph is None or isinstance(graph, (list, tuple)):  # as DDP(model, [device]) has it
            graph, ddps = "auto", {"device_ids": graph} | ddps
        checks.take_ddps(ddps, module)
        if order is not None:
            checks.check_choice("order", order, ("awc", "atc"))
        checks.check_choice("init", init, ("broadcast", "keep"))
        if order is not None and method is not None:
            raise GossamerError(f"order={order!r} and method={method!r} say the same thing; give method alone")
        how = checks.with_graph(Averaging.of(graph, method, wire, local_steps, order))
        checks.refuse_merge(how.method)
        checks.refuse_unfit(module)
        self._show(module)
        self._flat = Flat(self._bare())
        link = open_link(self._flat.device, timeout, joins=True)
        self._exchange = Exchange(link) if link else None
        self._seat = Seat.taken() if self._exchange is not None and self._flat.device.type == "cpu" else None
        self.rank = self._seat.rank if self._seat else link.rank if link else 0
        mixer = self._mixer = Mixer(self._exchange.size if self._exchange else 1, self._exchange, how.wire, send_copy)
        mixer.check_finite = check_finite
        planned = self._seat.size if self._seat else mixer.n
        self.schedule = schedule(how.graph, planned, (ALL_REDUCE,))
        self.local_steps = local_steps
        if self.schedule.by_epoch and not (epochs and steps_per_epoch):
            raise GossamerError(
                f"graph {self.schedule.describe()!r} changes with the epoch, so it must know them: "
                "DecentralizedDataParallel(…, epochs=90, steps_per_epoch=len(loader)), in optimizer steps"
            )
        how.refuse(self.schedule)
        drive = self._driver = Driver(self._flat, mixer, how, self.schedule, self.rank, epochs or 1, steps_per_epoch)
        if self.schedule.watches and self._exchange is not None:
            mixer.probe = Probe(self._exchange, weakly(drive.rate), weakly(drive.learnt))
        self.require_backward_grad_sync = True  # as in torch's DDP: see no_sync()
        self._stretches = 0
        self._also: Mapping[str, Any] = {}
        self._writer = Writer()
        self._watch = Watch(self._driver, alike=init == "broadcast") if self._exchange is not None else None
        # Not as a decorator: that would load the whole compiler when Gossamer is imported.
        self._plainly = torch.compiler.disable(weakly(self._on_forward))
        if self._exchange is not None:
            weakref.finalize(self, release, self._writer, self._exchange).atexit = False
        if self._exchange is not None and not self._joins:
            told = {"wire": wire, "init": init, "epochs": str(epochs), "steps_per_epoch": str(steps_per_epoch)}
            told |= {"send_copy": str(send_copy), "check_finite": str(check_finite)}
            self._agree(state.setup(self) | told)
            self._agree(self._flat.signature())
            if init == "broadcast":
                averaged.broadcast(self._flat, self._exchange)

    def _agree(self, signature: dict[str, str]) -> None:
        if self._exchange is not None and not self._joins and self._driver.survival is None:
            self._exchange.link.agree(signature)

    @property
    def steps(self) -> int:
        """Steps done."""
        return self._driver.steps

    @property
    def method(self) -> Method:
        return self._driver.method

    @property
    def averages_gradients(self) -> bool:
        return all(method.averages == "gradients" for method in self._driver.methods)

    @property
    def order(self) -> str:
        return self.method.describe()

    @property
    def signals(self) -> dict[str, float]:
        """The latest measurements by name, for schedules."""
        return self._driver.signals

    @property
    def profiles(self) -> list[Profile]:
        """What ``gossip(profile_every=…)`` has seen."""
        return self._driver.journal.profiles

    @property
    def size(self) -> int:
        """How many workers take part now."""
        return len(self.members)

    @property
    def members(self) -> tuple[int, ...]:
        """The ranks of the workers that take part now. Under ``gossamer launch`` they may change before any step, and in each collective
        (``mean()``, ``consensus()``, ``average_()``, ``save()``), after which they are the same on all workers that have its result."""
        survival = self._driver.survival
        return survival.members if survival is not None else tuple(range(self._exchange.size if self._exchange else 1))

    @property
    def leads(self) -> bool:
        """Whether this is the first of them: for what one worker does for all, such as saving. Rank 0 may be gone."""
        return self.rank == self.members[0] and not self._joining

    @property
    def changes(self) -> list[Change]:
        """What has happened to the members so far."""
        survival = self._driver.survival
        return survival.changes if survival is not None else []

    @property
    def traffic(self) -> Traffic:
        """Bytes sent and received, and how long communication took and was waited for."""
        return self._exchange.traffic if self._exchange else Traffic()

    @property
    def _joins(self) -> bool:
        """Started by ``gossamer launch`` to join a job that is running."""
        return self._seat is not None and self._seat.joins

    @property
    def _joining(self) -> bool:
        """Whether this worker does not take part, until its next training step: it was just started, or has diverged."""
        survival = self._driver.survival
        return self._joins if survival is None else survival.joining

    # --- The training loop -----------------------------------------------------------------------------------------------

    def gossip(
        self,
        *optimizers: torch.optim.Optimizer,
        scaler: torch.amp.GradScaler | None = None,
        profile_every: int | None = None,
        on_profile: Callable[[Profile], object] | None = None,
        log: Log | None = None,
        also: Mapping[str, Any] | None = None,
        on_change: Callable[[Change], object] | None = None,
    ) -> None:
        """Average inside ``step()`` of these optimizers; with several, call each once per step, in this order.

        ``scaler``: the GradScaler that calls ``step()``, so that a step it skips is averaged all the same. ``profile_every``:
        every so many steps look at all workers (norms, dispersion, consensus distance) just before averaging; the result goes
        to ``model.profiles``, or to ``on_profile``. ``log``: after each step ``log(numbers, step)`` is called on the worker that leads,
        with what the step has cost; distances come with it at the steps of the profile, every 100 unless told otherwise.

        Under ``gossamer launch``: ``also``, what else a worker that joins takes over (LR schedulers …; what has a state_dict, by
        name), and ``on_change``, called with each :class:`Change` of the members just before the step in which it takes effect.
        """
        checks.refuse_moment(self, "gossip()", busy=True)
        optimizers = checks.own_optimizers(optimizers, self._bare(), self._flat.names)
        policies.meet(self._driver, optimizers)
        self._driver.journal.attend(profile_every, on_profile, log)
        self._agree(
            {
                "gossip(): the optimizers": ", ".join(type(optimizer).__name__ for optimizer in optimizers),
                "gossip(): profile_every": str(self._driver.journal.every),
                "gossip(): the scaler": "none" if scaler is None else "given",
            }
            | checks.same_start(self)
        )
        self._driver.attach(optimizers, scaler)
        if self._seat is not None and self._exchange is not None:
            self._also = also or {}
            survival = self._driver.survival or state.survival(self, self._seat, self._exchange)
            self._driver.survival, survival.on_change = survival, on_change

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.training and torch.is_grad_enabled() and not self.is_copy and not self._driver.averaged:
            self._plainly()
        return self.module(*args, **kwargs)

    def _on_forward(self) -> None:
        surroundings.refuse_ddp_around(self)
        if self._watch is not None and not self._driver.optimizers:
            self._watch.forgotten()
        self._driver.on_forward(self.require_backward_grad_sync)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """As DDP's: with ``graph="all-reduce"`` the backwards of forwards in this block do not average gradients, so they add up until one
        outside of it does. A method that averages parameters does so in ``step()`` only; then it makes no difference."""
        before, self.require_backward_grad_sync = self.require_backward_grad_sync, False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before

    def average_gradients(self) -> None:
        """With ``graph="all-reduce"``: average the gradients now, once more; for gradients that no backward has made.
        With any other graph gradients are one's own, and this does nothing; so a loop may always call it."""
        checks.refuse_moment(self, "average_gradients()", uneven=False)
        if self.averages_gradients and self._driver.optimizers:
            self._driver.after_backward()

    def trace(self, folder: Path | str) -> contextlib.AbstractContextManager[None]:
        """In this block, transfers and what this worker waits for are written down, for ``gossamer trace FOLDER`` to show."""
        checks.refuse_moment(self, "trace()", uneven=False)
        return traced(self._exchange, self.rank, Path(folder))

    # --- Means over all workers ------------------------------------------------------------------------------------------

    @torch.no_grad()
    def mean(self, value: Tensor | float) -> Tensor | float:
        """The mean over all workers, of a tensor or a number: for logging and decisions. All of them call it."""
        checks.refuse_moment(self, "mean()")
        if not isinstance(value, Tensor):
            return float(self._mixer.mean(torch.tensor([value], dtype=torch.float64, device=self._flat.device)))
        if not value.dtype.is_floating_point:
            raise GossamerError(f"mean() of a {value.dtype} tensor; convert it to a floating-point one first")
        return self._mixer.mean(value.detach().to(self._flat.device).flatten()).reshape(value.shape).clone()

    @contextlib.contextmanager
    def consensus(self, reestimate: Iterable[Any] | None = None) -> Iterator[DecentralizedDataParallel]:
        """Parameters and floating-point buffers (BatchNorm's statistics) are their mean over the workers, for as long as the
        block lasts; then each worker has its own again. All workers enter it together.

        ``reestimate``: some of this worker's training inputs, batch by batch; BatchNorm's statistics are then estimated anew
        for the averaged model (and averaged over the workers), which is more faithful than their mean.
        """
        checks.refuse_moment(self, "consensus()", averaged=True)
        if not self._driver.busy:
            self._driver.adopt()
        self._flat.check(busy=self._driver.busy and not self._mixer.send_copy)
        touched = self._flat.touched
        with averaged.averaged(self._flat, self._mixer, self.module, reestimate):
            self._driver.averaged = True
            try:
                yield self
            finally:
                self._driver.averaged = False
        if not touched:
            self._flat.settle()  # they are what they were

    def average_(self) -> None:
        """Parameters and floating-point buffers become their mean over the workers, for good. All workers call it."""
        checks.refuse_moment(self, "average_()")
        if self._joins and self._joining:
            raise GossamerError(
                f"rank {self.rank} can't average: it has not joined the others, which it does in its first training step; "
                "the job may have ended without it"
            )
        checks.refuse_moment(self, "average_()", averaged=True, busy=True)
        self._driver.adopt()
        self._flat.check()
        averaged.average_(self._flat, self._mixer)
        if self._watch is not None:
            self._watch.alike_at = self.steps

    @contextlib.contextmanager
    def uneven(self) -> Iterator[None]:
        """In this block workers may do different numbers of steps: one that is done leaves the graph, and the others go on
        without it. At the end all wait for each other; who left early takes over the parameters of one who stayed. All workers
        enter it; ``mean()``, ``consensus()`` and the like have their place outside of it."""
        checks.refuse_moment(self, "uneven()", busy=True)
        driver = self._driver
        if driver.survival is not None:
            raise GossamerError(
                "uneven() under gossamer launch: a worker that ends is left out anyway; let it end, or use torchrun"
            )
        if self._exchange is None:
            yield
            return
        self._stretches += 1
        with stretch(driver, self._exchange, self._stretches):
            yield

    # --- Checkpoints -----------------------------------------------------------------------------------------------------

    def save(self, folder: Path | str, also: Mapping[str, Any] | None = None, *, background: bool = False) -> None:
        """One full checkpoint per worker (model, optimizers, step, method and schedule; call it after ``step()``), and the averaged
        model as ``averaged.safetensors``. ``also``: what else has a state_dict (LR schedulers, a GradScaler), by name.

        All workers call it; it returns when all have written, and keeps the checkpoint before this one until then. ``background``: it
        returns when all has been copied, and a thread writes the copy; without the averaged model (``checkpoints.averaged(folder)``).
        What goes wrong there is an error of the next ``save()``, or of ``close()``, which wait for that thread.
        """
        checks.refuse_moment(self, "save()", averaged=True, busy=True)
        self._driver.adopt()
        self._flat.check()
        if self._joining:
            print(f"gossamer: rank {self.rank} takes no part until its next training step, and saves nothing", flush=True)
            return
        (state.save_in_background if background else state.save)(self, Path(folder), also or {})

    @torch.inference_mode(False)
    def load(self, folder: Path | str, also: Mapping[str, Any] | None = None, *, resize: state.Resize = "refuse") -> bool:
        """Go on from the last step that all workers have on disk. Returns whether there was one. Call it after ``gossip()``.

        ``resize``: of another number of workers, ``"average"`` gives each the mean of all rows (parameters, buffers, momentum and
        moments), ``"copy"`` the row of its number, modulo theirs. Both need a folder with the files of all of them.
        """
        checks.refuse_moment(self, "load()", busy=True)
        checks.check_choice("resize", resize, ("refuse", "average", "copy"))
        if self._driver.survival is not None and self._driver.survival.joining:
            return False  # the others are further: it takes over the state of one of them
        self._agree({"load(): resize": resize})
        return state.load(self, Path(folder), also or {}, resize)

    def export(self, folder: Path | str) -> None:
        """The averaged model, as ``from_pretrained`` loads it: what the module's own ``save_pretrained`` writes, with this state; without
        one, ``model.safetensors``. All workers call it, and it returns when the first of them has written."""
        checks.refuse_moment(self, "export()", averaged=True, busy=True)
        state.export(self, Path(folder))

    def close(self) -> None:
        """This worker takes no part any more: its threads and connections are given back, and the others go on without it under
        ``gossamer launch``; under torchrun all workers close together. The module and its optimizers stay as they are. A model that is
        dropped is closed by itself; at the end of the process there is nothing to do."""
        if self.is_copy:
            return
        self._refuse_busy("close()")
        self._driver.detach()
        self.is_copy, self._watch = True, None
        problem = self._writer.finish()
        if self._exchange is not None:
            self._exchange.drop()
        if problem is not None:
            raise problem

    def _refuse_busy(self, what: str) -> None:
        if not self.is_copy:
            checks.refuse_moment(self, what, uneven=False, busy=True)
