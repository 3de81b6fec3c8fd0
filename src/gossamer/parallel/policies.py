"""What a policy needs of a person's own loop: how long steps take, what all workers have measured, and another method from some step on."""

from __future__ import annotations

import contextlib
import copy
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from gossamer.checkpoints.checkpoint import Unreadable
from gossamer.errors import Evicted, GossamerError
from gossamer.methods import Policy
from gossamer.transport.mixer import Mixer

if TYPE_CHECKING:
    from gossamer.parallel.driver import Driver


class Clock:
    """Seconds of a step on this worker, and of its means of gradients. ``runs``: whether a policy wants to know them."""

    def __init__(self, device: torch.device) -> None:
        self.runs, self._device = False, device
        self._means, self._ended = 0.0, time.perf_counter()

    @contextlib.contextmanager
    def mean(self) -> Iterator[None]:
        began = self._now() if self.runs else 0.0
        yield
        self._means += self._now() - began if self.runs else 0.0

    def step(self) -> tuple[float, float]:
        before, self._ended = self._ended, self._now()
        means, self._means = self._means, 0.0
        return self._ended - before, means

    def _now(self) -> float:
        if self.runs and self._device.type == "cuda":  # what was asked for is done
            torch.cuda.synchronize(self._device)
        return time.perf_counter()


def meet(driver: Driver, optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """A policy may choose by them. An error if the method, or one that it may choose, can't work with them."""
    for policy in (driver.schedule, driver.current_schedule):
        if isinstance(policy, Policy):
            policy.meet(optimizers)
            driver.methods = driver.how.rules(policy, "")
            driver.take(driver.how.rule(policy, ""))
    for method in driver.methods:
        method.refuse(driver.schedule.first(), optimizers, driver.steps)


def follow(driver: Driver) -> None:
    """At the begin of a step: the method that the policy has chosen for it."""
    policy = driver.current_schedule
    if isinstance(policy, Policy):
        driver.clock.runs = policy.times(driver.steps)
        driver.take(driver.how.rule(policy, ""))


def learn(driver: Driver) -> None:
    """At the end of a step."""
    policy, (seconds, mean) = driver.current_schedule, driver.clock.step()
    if not driver.clock.runs or not isinstance(policy, Policy):
        return
    mine = policy.timed(driver.steps, seconds, mean)
    if not mine:
        return
    with contextlib.suppress(Evicted):  # with its next step it takes over what the others have learnt
        said = policy.agree(driver.steps, everyone(driver.mixer, mine, driver.flat.device))
        if said and not driver.mixer.rows.start:
            print(f"gossamer: {said}", flush=True)


def everyone(mixer: Mixer, mine: Sequence[float], device: torch.device) -> list[list[float]]:
    """The numbers of all workers, the same on all of them to the bit; none if they can't agree."""
    exchange = mixer.exchange
    if exchange is None:
        return [list(mine)]
    rows = torch.zeros(exchange.size, len(mine), dtype=torch.float64, device=device)
    rows[exchange.rank] = torch.tensor(mine, dtype=torch.float64)
    mean = mixer.mean(rows.flatten(), "what steps cost", acknowledged=True)
    found: list[list[float]] = (mean.reshape(rows.shape) * len(rows)).tolist()
    return found if mixer.agrees else []


@contextlib.contextmanager
def method_of(driver: Driver, parts: dict[str, Any], where: str) -> Iterator[None]:
    """With the method of a checkpoint, or of the worker whose state this is: a policy may have chosen another one there than here. If
    these turn out not to fit, the method and its state are as before."""
    now, before = driver.now, (driver.method, driver.now.state, driver.now.part)
    try:
        if isinstance(driver.schedule, Policy):
            there = copy.deepcopy(driver.schedule)
            try:
                there.load_state_dict(parts["schedule"])
            except (KeyError, TypeError, ValueError, AttributeError) as error:
                why = f"{type(error).__name__}: {error}"
                raise Unreadable(f"{where} is damaged: its part 'schedule' makes no sense ({why})") from None
            driver.take(driver.how.rule(there, ""))
        yield
    except GossamerError:
        driver.method, now.state, now.part = before
        raise
