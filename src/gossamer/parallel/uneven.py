"""Uneven data: some workers run out of batches before others. They leave the graph, the others go on without them, and at the
end all are together again. See ``members/roster.py`` for how they agree on the step at which the graph changes."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gossamer.errors import GossamerError
from gossamer.members.changes import Participation
from gossamer.members.membership import Membership, Turn
from gossamer.members.store import GivenSeat
from gossamer.parallel import averaged
from gossamer.transport.exchange import Exchange

if TYPE_CHECKING:
    from gossamer.parallel.driver import Driver

_NEVER = 1e9  # more steps than any worker misses
_GRACE = 0.3  # seconds (and two steps) that are given to the others to finish as well


class Stretch(Participation):
    """One stretch of training in which workers may do different numbers of steps. Every worker makes one at the same step."""

    def __init__(self, driver: Driver, exchange: Exchange, number: int) -> None:
        super().__init__(exchange, driver.mixer, driver.schedule)
        self._driver, link = driver, exchange.link
        seat = GivenSeat("", 0, link.rank, link.rank, link.size, link.timeout, link.store)
        self._membership = Membership(seat, f"uneven/{number}", link, link.timeout)
        self._step, self._step_began, self._step_seconds = driver.steps, time.monotonic(), 0.0
        self._reunion: Turn | None = None
        self._idle = 0  # steps that the others did while this worker had no more data

    def before(self, step: int) -> None:
        """Before a step begins: change to the graph of the workers that are left, if this is the step for it."""
        now = time.monotonic()
        if step > self._step:
            self._step, self._step_seconds, self._step_began = step, now - self._step_began, now
        turn = self._membership.before(step)
        if turn is not None and self._membership.roster.together:
            self._reunion = turn
        elif turn is not None:
            self._take_part(turn)

    def leave(self) -> None:
        """This worker has no more data. Returns when the others go on without it, or no worker goes on."""
        membership, driver = self._membership, self._driver
        membership.done(_GRACE + 2 * self._step_seconds)
        while True:
            membership.stand(driver.steps)
            self.before(driver.steps)
            if self._reunion is not None or membership.member.part.epoch < 0:
                return
            if not membership.member.stands:
                driver.idle_step()
                self._idle += 1

    def rejoin(self) -> None:
        """When no worker has data left: all are in the graph again, at the same step. Who left early takes over the parameters of one
        who stayed."""
        exchange, flat = self.exchange, self._driver.flat
        change, link, places = self._reunion or self._membership.reunion()
        link.epoch += 1  # what was left lying around is not taken for something new
        exchange.change(link, places)
        exchange.collectives = 0  # alike on all
        self.mixer.resize()
        donors, also = change.joined, list[Tensor]()
        if self._driver.method.averages == "gradients":
            donors, also = self._all_alike(donors)
        elif self._driver.method.alike:
            also = [tensor for vector in self._driver.now.state.values() for tensor in vector.tensors]
        with torch.no_grad():
            averaged.hand_over(flat, exchange, donors, also)
        self._membership.close(orderly=True)
        exchange.gather(flat.blocks[0].x.new_zeros(1), "uneven()")  # all know it: now the process that holds the store may end
        self._driver.steps, self._driver.members_moved = change.step, True

    def _all_alike(self, joined: dict[int, int]) -> tuple[dict[int, int], list[Tensor]]:
        """Where gradients are averaged all replicas are the same, so those that missed updates take over all of one that did not: its
        optimizers' state too."""
        exchange, state = self.exchange, self._driver.optimizer_state()
        missed = self._idle + (_NEVER if exchange.rank in joined else 0)
        everyone = exchange.gather(torch.tensor([missed, len(state)], dtype=torch.float64), "uneven()")
        least = int(everyone[:, 0].argmin())
        if bare := [q for q in range(exchange.size) if everyone[q, 1] != everyone[least, 1]]:
            raise GossamerError(
                f"uneven() with all-reduce: the optimizer of rank {exchange.link.names[exchange.living[bare[0]]]} has no state, "
                "because that worker had no batch at all; give each worker at least one"
            )
        return {q: least for q in range(exchange.size) if everyone[q, 0] > everyone[least, 0]}, state

    def abandon(self) -> None:
        self._membership.close(orderly=False)


@contextlib.contextmanager
def stretch(driver: Driver, exchange: Exchange, number: int) -> Iterator[None]:
    """The block of ``uneven()``."""
    driver.stretch = here = Stretch(driver, exchange, number)
    try:
        yield
        here.leave()
        here.rejoin()
    except BaseException:
        here.abandon()
        raise
    finally:
        driver.stretch = None
