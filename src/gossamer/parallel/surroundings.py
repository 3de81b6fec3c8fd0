"""What else in a process gets at a model's parameters: an optimizer that ``gossip()`` was not given, torch's DDP around the model, and
``torch.distributed.checkpoint``, which takes the replicas to be equal."""

from __future__ import annotations

import functools
import sys
import weakref
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from gossamer.errors import GossamerError, warn

if TYPE_CHECKING:
    from gossamer.parallel.driver import Driver
    from gossamer.parallel.module import DecentralizedDataParallel

_watches: weakref.WeakSet[Watch] = weakref.WeakSet()  # of this process


class Watch:
    """Of one model. ``alike_at``: the step at which all workers had the same parameters."""

    def __init__(self, driver: Driver, alike: bool) -> None:
        self._driver, self._told = driver, False
        self.alike_at = 0 if alike else -1
        self._seen: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        _watches.add(self)
        _attend()

    def forgotten(self) -> None:
        """Training goes on without ``gossip()``."""
        if not self._told:
            self._told = True
            warn("model.gossip(optimizer) was not called, so nothing is averaged")

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """Any optimizer's."""
        driver = self._driver
        if optimizer in driver.optimizers or optimizer in self._seen:
            return
        self._seen.add(optimizer)
        name = next(
            (driver.flat.names.get(id(p)) for g in optimizer.param_groups for p in g["params"] if id(p) in driver.flat.names),
            None,
        )
        if name is None:
            return
        if not driver.optimizers:
            self.forgotten()
            return
        warn(
            f"{type(optimizer).__name__}.step() trains {name!r} of a DecentralizedDataParallel, and gossip() was not given this optimizer: "
            "its steps average nothing; call model.gossip(…) again, with all optimizers of the model"
        )

    def differing(self) -> dict[int, str]:
        """By address: tensors that are not the same on all workers, and how to save them all the same."""
        driver, made = self._driver, dict[int, str]()
        if driver.method.averages == "gradients":
            return made
        made |= {t.data_ptr(): "save it under a key for each rank, or use model.save()" for t in driver.optimizer_state()}
        if driver.steps != self.alike_at and not driver.averaged:  # consensus() shows what all have
            advice = "save inside `with model.consensus():`, or use model.save()"
            made |= {p.data_ptr(): advice for p in driver.flat.parameters()}
        return made


@functools.cache
def _attend() -> None:
    """Once in a process."""
    register_optimizer_step_pre_hook(_on_step)


def _on_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    for watch in list(_watches):
        watch.step(optimizer)


def refuse_ddp_around(model: DecentralizedDataParallel) -> None:
    """In the forward of the model."""
    outer = nn.parallel.DistributedDataParallel._active_ddp_module
    if outer is not None and any(part is model for part in outer.modules()):
        raise GossamerError(
            "torch's DistributedDataParallel is around this DecentralizedDataParallel: it would average the gradients, and Gossamer the "
            "parameters; leave it out (accelerate: don't give the model to prepare())"
        )


# --- torch.distributed.checkpoint ---------------------------------------------------------------------------------------------


def guard_dcp() -> None:
    """If it is in use. Of a tensor that all ranks have it saves one rank's, of the next tensor another one's."""
    planner = sys.modules.get("torch.distributed.checkpoint.default_planner")
    if planner is not None:
        _guard(planner.DefaultSavePlanner)


@functools.cache
def _guard(planner: Any) -> None:
    plan = planner.create_global_plan

    @functools.wraps(plan)
    def create_global_plan(self: Any, all_plans: Sequence[Any]) -> Any:
        _refuse_mixture(self.state_dict, all_plans)
        return plan(self, all_plans)

    planner.create_global_plan = create_global_plan


def _refuse_mixture(state: dict[str, Any], plans: Sequence[Any]) -> None:
    differing = {address: advice for watch in _watches for address, advice in watch.differing().items() if address}
    ranks = Counter(item.index.fqn for plan in plans for item in plan.items)
    for key, value in state.items():
        if ranks[key] > 1 and isinstance(value, Tensor) and value.data_ptr() in differing:
            raise GossamerError(
                f"torch.distributed.checkpoint would save a mixture of replicas: {key!r} is not the same on all {ranks[key]} ranks; "
                f"{differing[value.data_ptr()]}"
            )
