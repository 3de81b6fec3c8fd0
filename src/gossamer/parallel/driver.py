"""Drives a Method in a person's own loop. Its moments come from the first training forward, the end of backward, and the optimizers' hooks.

What is operational lives here, and a method never sees it: several forwards and several optimizers in a step, gradients that are missing,
a GradScaler that leaves a step out, workers that run out of data, members that change, parameters that were frozen before.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from gossamer.errors import Diverged, Evicted, GossamerError
from gossamer.graphs import Graph
from gossamer.members.changes import Survival
from gossamer.methods import Averaging, Method, Step
from gossamer.optim import momentum
from gossamer.parallel import closures, hooks, policies
from gossamer.parallel.gradients import OwnGradients
from gossamer.parallel.journal import Journal
from gossamer.parallel.policies import Clock
from gossamer.parallel.uneven import Stretch
from gossamer.rows.finite import Fault
from gossamer.rows.flat import Flat
from gossamer.rows.vector import Parameters
from gossamer.schedules import Schedule
from gossamer.transport.mixer import Mixer

Optimizer = torch.optim.Optimizer


class Driver:
    """Of one model. ``epochs``, ``steps_per_epoch``: for schedules."""

    def __init__(
        self,
        flat: Flat,
        mixer: Mixer,
        how: Averaging,
        schedule: Schedule,
        rank: int,
        epochs: int = 1,
        steps_per_epoch: int | None = None,
    ) -> None:
        self.flat, self.mixer, self.how, self.schedule, self.rank = flat, mixer, how, schedule, rank
        self.clock, self.epochs, self.steps_per_epoch = Clock(flat.device), epochs, steps_per_epoch
        self.methods = how.rules(schedule, "awc")  # of all steps
        self.method = how.rule(schedule, "awc")
        self._send_copy = mixer.send_copy
        self.steps = 0  # done; the one counter
        self.optimizers: tuple[Optimizer, ...] = ()  # in the order in which they step
        self.survival: Survival | None = None  # under gossamer launch
        self.stretch: Stretch | None = None  # inside uneven()
        self.averaged = False  # inside consensus(): parameters show their mean
        self.sync = True  # whether the next backward averages gradients, if the method does
        self.signals: dict[str, float] = {}
        self.journal = Journal()
        self.grad = OwnGradients(flat)
        # Weakly: a driver that is in no cycle is gone with its model, and so are its hooks.
        look, share = hooks.weakly(self._look), hooks.weakly(self._share_momentum)
        states = hooks.weakly(self._states)
        self.now = Step(mixer, Parameters(flat.blocks, in_place=True), self.grad, look, share, states)
        self.members_moved = False  # all are together again after uneven(), or some parameters have no state of before
        self._graph: Graph | None = None  # of the last step of this process
        self._resumed: str | None = None  # of the last step before a checkpoint was loaded
        self._group: object = None  # the connections of the last step, and the places that took part
        self._moments: set[str] = set()  # of this step: those that have come
        self._synced = self._held_back = False  # whether a backward of this step has averaged gradients; or was told not to
        self._means, self._last_means = 0, 1  # gradients were averaged so often in this step, and in the last one
        self._queued = False  # the end of this backward is waited for
        self._looked_for_jumps = False  # in this step
        self._jumped = False  # since the last mean of all, parameters were changed by something else than the optimizers
        self._attached = False  # to any optimizers
        self._scaler: torch.amp.GradScaler | None = None
        self._undo: list[Callable[[], object]] = []

    @property
    def busy(self) -> bool:
        """Whether rows are in flight."""
        return bool(self.now.pending)

    # --- Optimizers and their hooks ---------------------------------------------------------------------------------------

    def attach(self, optimizers: Sequence[Optimizer], scaler: torch.amp.GradScaler | None) -> None:
        self.detach()
        self.optimizers, self._scaler = tuple(optimizers), scaler
        self.now.optimizers = self.optimizers
        if not self._attached:  # now, and not when the model was wrapped: parameters have been broadcast since
            self._attached = True
            self.method.begin(self.now)
        # With several, the first ones change parameters that are being sent: so a copy is sent, and its change is added.
        self.mixer.send_copy = self._send_copy or len(optimizers) > 1
        self._undo = hooks.steps(self, optimizers)
        if any(method.does("after_backward") for method in self.methods):
            self._undo += hooks.backward(self, self.flat.parameters())
        if scaler is not None:
            self._undo += hooks.scaler(self, scaler)

    def take(self, method: Method) -> None:
        """Another method, from this step on."""
        if method == self.method:
            return
        self.method = method
        if self._attached:
            with torch.no_grad():
                method.begin(self.now)

    def detach(self) -> None:
        for undo in reversed(self._undo):
            undo()
        self._undo, self.optimizers = [], ()

    # --- The moments of a step --------------------------------------------------------------------------------------------

    def on_forward(self, sync: bool) -> None:
        """Before a training-mode forward. ``sync``: as DDP's ``require_backward_grad_sync``."""
        self.sync, self._queued = sync, False
        if self.survival is not None and self.survival.joining:
            self.steps = self.survival.before(self.steps)  # before the forward, with any method: parameters change
        if self.optimizers:
            if self.busy and not self.mixer.send_copy:
                self.flat.check(busy=True)
            self._begin()

    def _begin(self) -> None:
        """Once in a step: before its first forward, or before the update if none came."""
        if "before_forward" in self._moments:
            return
        if self.stretch is not None:
            self.stretch.before(self.steps)
        if self.survival is not None:
            self.steps = self.survival.before(self.steps)
        self._jumped |= self.flat.check()
        self.adopt()
        now = self.now
        now.t, now.lr = self.steps, self._rate()
        graph = self.current_schedule.graph(now.t, min(self.epoch, self.epochs - 1), self.epochs, self.signals)
        now.graph, now.round = graph, graph.round(now.t, self.how.every)
        policies.follow(self)
        self._notice(graph)
        self.journal.begin(self)
        try:
            self._moment("before_forward")
        finally:
            if self.busy:
                self.flat.depart()

    def _notice(self, graph: Graph) -> None:
        """Whether other members take part than in the step before, or with another graph."""
        exchange = self.mixer.exchange
        group = None if exchange is None else (exchange.link, exchange.living)
        before, self._graph, self._group = (self._graph, self._group), graph, group
        moved = self.members_moved or (before[0] is None and self._resumed not in (None, _shown(graph)))
        self.members_moved = False
        if not moved and group == before[1] and (graph is before[0] or graph == before[0]):
            return
        self.method.refuse(graph, self.optimizers, self.steps)
        joined = self.survival is not None and bool(self.survival.changes)
        if before[0] is not None or moved or joined:  # on all workers alike, a newcomer among them
            with torch.no_grad():
                self.method.members_changed(self.now)

    def on_gradient(self, _: Tensor) -> None:
        """A backward has made the gradient of a parameter."""
        if not self._queued:
            self._queued = True
            torch.autograd.Variable._execution_engine.queue_callback(hooks.weakly(self._on_backward_end))

    def _on_backward_end(self) -> None:
        self._queued = False
        if not self.sync:
            self._held_back = True
        elif self.averaged:
            self._synced = False  # inside consensus(): what was added is averaged in step()
        elif self.optimizers:
            self.after_backward()

    def after_backward(self) -> None:
        self._begin()
        self._synced, self._means = True, self._means + 1
        with self.clock.mean():
            self._run(self.method.after_backward)

    def before_step(self, optimizer: Optimizer, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
        if self.averaged:
            raise GossamerError(f"optimizer.step() inside consensus() (step {self.steps}): its update would be thrown away")
        closure = closures.given(optimizer, args, kwargs)
        if closure is not None and self.method.averages == "gradients":
            return closures.replaced(args, kwargs, closure, closures.then(closure, self._catch_up))
        early = closure and any(map(self.method.does, ("before_forward", "after_backward", "before_update")))
        loss = closures.Early(closure, self.flat, optimizer, self.method.name) if closure and early else None
        self._before_any_update()
        if optimizer is self.optimizers[-1]:
            self._before_update()
        return closures.replaced(args, kwargs, closure, loss) if loss else None

    def _before_any_update(self) -> None:
        if self.method.shares_momentum and not self._looked_for_jumps:
            self._jumped, self._looked_for_jumps = self._jumped or self.flat.touched, True
        self._catch_up()

    def _catch_up(self) -> None:
        """If no backward was seen: gradients were made in another way, or are missing."""
        if self.method.does("after_backward") and not (self._synced or self._held_back):
            self.after_backward()

    def _before_update(self) -> None:
        """Before the last of the optimizers."""
        if "before_update" in self._moments:
            return
        self._begin()
        if self.busy:
            self.flat.check(busy=not self.mixer.send_copy)
        self.now.lr = self._rate()
        self.grad.refused = self._refusal()
        self._moment("before_update")

    def _refusal(self) -> str:
        """Why a method can't have the gradients now."""
        if len(self.optimizers) > 1:
            return (
                f"method {self.method.name!r} changes the gradients of a whole step, and with several optimizers they are not all there; "
                "give gossip() one optimizer (its parameter groups may have settings of their own)"
            )
        if self._scaler is not None and getattr(self.optimizers[0], "_step_supports_amp_scaling", False):
            return (
                f"method {self.method.name!r} changes gradients, and a fused optimizer gets them from the GradScaler as they are, still "
                "scaled; make the optimizer with fused=False"
            )
        return ""

    def after_update(self) -> None:
        """After the last of the optimizers."""
        self._before_any_update()
        self._before_update()
        self._moment("after_update")
        if self.mixer.probe is not None and (sight := self.mixer.probe.taken()):
            self.current_schedule.observe(sight)
            self.schedule.succeed(self.current_schedule)
        self.journal.end(self)
        policies.learn(self)
        self.steps += 1
        self.reset()
        if self.method.shares_momentum:
            self.flat.settle()

    def reset(self) -> None:
        """The next step begins anew."""
        self._last_means, self._means = max(1, self._means), 0
        self._moments.clear()
        self._synced = self._held_back = self._looked_for_jumps = False

    def _moment(self, name: str) -> None:
        """Once in a step, also if it raises."""
        if name in self._moments:
            return
        self._moments.add(name)
        if not self.method.does(name):
            return
        if name == "after_update":
            self._jumped |= self.flat.check()
        self._run(getattr(self.method, name))

    @property
    def last_graph(self) -> str | None:
        return self._resumed if self._graph is None else _shown(self._graph)

    def resume(self, graph: str | None) -> None:
        """The last step was before a checkpoint, with this graph. None: it is not known."""
        self._graph, self._resumed = None, graph

    def adopt(self) -> None:
        """Parameters that were frozen are trained now: their state begins as all did."""
        if not self.flat.adopt() or not self._attached:
            return
        fresh = self.method.state(self.now.x)
        for name, vector in self.now.state.items():
            vector.tensors.extend(fresh[name].tensors[len(vector.tensors) :])
            vector.numels.extend(fresh[name].numels[len(vector.numels) :])
        with torch.no_grad():
            self.method.members_changed(self.now)  # what a method knows of its rows does not fit the new ones
        if any(method.does("after_backward") for method in self.methods):
            self._undo += hooks.backward(self, [p for p in self.flat.parameters() if not p._post_accumulate_grad_hooks])

    def _run(self, moment: Callable[[Step], None]) -> None:
        try:
            # An evicted worker takes over the state of another one with its next step.
            with torch.no_grad(), contextlib.suppress(Evicted):
                moment(self.now)
                self.grad.write_back()
        finally:
            self.grad.forget()
        if self.mixer.fault is not None:
            self._leave(self.mixer.fault)

    def optimizer_state(self) -> list[torch.Tensor]:
        """All tensors of it, in the same order on all workers."""
        states = (
            optimizer.state.get(p, {}) for optimizer in self.optimizers for g in optimizer.param_groups for p in g["params"]
        )
        return [state[key] for state in states for key in sorted(state) if isinstance(state[key], torch.Tensor)]

    def _states(self, rows: Sequence[Tensor]) -> Iterator[tuple[dict[str, Any], Tensor]]:
        """Of each parameter: what an optimizer knows of it, and its place in rows like those of the parameters."""
        views = self.flat.views(rows)
        for optimizer in self.optimizers:
            for parameter, state in optimizer.state.items():
                if id(parameter) in views:
                    yield state, views[id(parameter)]

    def idle_step(self) -> None:
        """A step without training, for the sake of the others."""
        self._without_training(self._last_means if self.method.does("after_backward") else 0)

    def _without_training(self, means: int = 0) -> None:
        self.grad.blank = True
        try:
            for _ in range(means):
                self.after_backward()
            self.after_update()
        finally:
            self.grad.blank = False

    # --- A GradScaler -----------------------------------------------------------------------------------------------------

    def scaled_step(self, optimizer: Optimizer, step: Callable[[], Any]) -> Any:
        before = self.steps
        self.before_unscaling(optimizer)  # a fused optimizer's gradients are looked at without unscaling them
        result = step()
        if optimizer is self.optimizers[-1] and self.steps == before:  # left out, and averaged all the same
            self._without_training()
        return result

    def before_unscaling(self, optimizer: Optimizer) -> None:
        """Before the check for infinite gradients, so that all workers find the same."""
        if optimizer in self.optimizers:
            self._catch_up()

    # --- What a method and the schedule ask for ---------------------------------------------------------------------------

    @property
    def current_schedule(self) -> Schedule:
        """``schedule``, or what it has become for the workers that are left."""
        changed = self.survival or self.stretch
        return changed.schedule if changed is not None else self.schedule

    @property
    def epoch(self) -> int:
        return self.steps // self.steps_per_epoch if self.steps_per_epoch else 0

    def _rate(self) -> float:
        """The learning rate; with several optimizers, or groups, the first one's stands for all."""
        return float(self.optimizers[0].param_groups[0]["lr"]) if self.optimizers else 0.0

    def rate(self) -> float:
        return self.now.lr

    def learnt(self) -> tuple[float, ...]:
        return self.current_schedule.learnt()

    def _share_momentum(self, t: int) -> bool:
        """If all parameters are their mean now, and it was training that moved them."""
        if not self.mixer.averaged_in(t):
            return False
        jumped, self._jumped = self._jumped, False
        moved = [self.mixer.moved(k, t) for k in range(len(self.flat.blocks))]
        if not jumped and any(row is not None for row in moved):
            views = self.flat.views(moved)
            for optimizer in self.optimizers:
                momentum.share(optimizer, lambda parameter: views.get(id(parameter)))
        return True

    def _look(self) -> None:
        self.journal.look(self)

    # --- Parameters that are not finite -----------------------------------------------------------------------------------

    def _leave(self, fault: Fault) -> None:
        """This worker has diverged. Under ``gossamer launch`` it comes back with the state of another one."""
        if self.survival is not None:
            self.survival.leave(fault)
            return
        self.mixer.fault = None
        raise Diverged(
            f"{fault.describe(self.rank)}; the other workers have not taken it over. A smaller learning rate or clipped gradients may "
            "help; with check_finite=False such parameters are averaged like any others"
        )

    def fault(self) -> Fault | None:
        """What of my parameters is not finite."""
        for block in self.flat.blocks:
            self.mixer.look_for_fault(block, block.x[0])
        return self.mixer.fault


def _shown(graph: Graph) -> str:
    return f"{graph.name} over {graph.n}"
