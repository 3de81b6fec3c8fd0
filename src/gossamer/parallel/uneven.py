"""Uneven data: some workers run out of batches before others. They leave the graph, the others go on without them, and at the
end all are together again. See ``leaving.py`` for how they agree on the step at which the graph changes."""

from __future__ import annotations

from collections.abc import Callable

import torch

from gossamer.members.leaving import Change, Leaving
from gossamer.parallel import averaged
from gossamer.rows.flat import Flat
from gossamer.schedules import Schedule, rebuilt
from gossamer.transport.exchange import Exchange
from gossamer.transport.mixer import Mixer


class Stretch:
    """One stretch of training in which workers may do different numbers of steps."""

    def __init__(self, exchange: Exchange, mixer: Mixer, planned: Schedule, number: int, step: int) -> None:
        self.exchange, self.mixer, self.planned = exchange, mixer, planned
        self.schedule = planned
        self._leaving = Leaving(exchange.link, number, step)

    def before(self, step: int) -> None:
        """Before a step begins: change to the graph of those who are left, if this is the step for it."""
        change = self._leaving.before(step)
        if change is not None:
            self._change(change)

    def _change(self, change: Change) -> None:
        if self.exchange.link.rank in change.living:
            self._take_part(change.living, f"step {change.step}: workers {', '.join(map(str, change.living))} go on")

    def _take_part(self, living: tuple[int, ...], reason: str) -> None:
        self.exchange.living = living
        self.mixer.resize()
        self.schedule, note = rebuilt(self.planned, len(living), self.schedule)
        self.planned.note(self.mixer.step, f"{self.schedule.describe()} over {len(living)}", reason + note)

    def leave(self, step: int, exchange_only: Callable[[], int]) -> None:
        self._leaving.leave(step, exchange_only, self._change)

    def rejoin(self, step: int, flat: Flat) -> int:
        """When nobody has data left: all are in the graph again. Who left early takes over the parameters of one who stayed.
        Returns the step that all are at."""
        exchange = self.exchange
        everyone = self._leaving.wait_for_all([step, exchange.collectives])
        self._leaving.end()
        exchange.living = tuple(range(exchange.link.size))
        exchange.link.epoch += 1  # what was left lying around is not taken for something new
        self.mixer.resize()
        last = max(steps for steps, _ in everyone)
        exchange.collectives = max(count for _, count in everyone)
        stayed = [q for q, (steps, _) in enumerate(everyone) if steps == last]
        early = [q for q in range(exchange.size) if q not in stayed]
        with torch.no_grad():
            averaged.hand_over(flat, exchange, stayed[0], early)
        return last

    def abandon(self) -> None:
        self._leaving.end()
