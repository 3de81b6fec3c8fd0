"""ada-auto: averages as rarely as the optimizer, and the replicas' disagreement, allow."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from gossamer.errors import GossamerError
from gossamer.graphs import Graph
from gossamer.methods.base import Method
from gossamer.methods.gossip import AdaptThenCombine
from gossamer.methods.policies.auto import COARSE
from gossamer.methods.policies.base import Policy
from gossamer.methods.policies.frontier import frontier
from gossamer.methods.shared_momentum import SharedMomentum
from gossamer.schedules.base import SCHEDULES, Moment, Schedule
from gossamer.transport.probe import Sight

_TOLERANCE = 0.05  # a mean in every second step, whose spread is 0.5, is allowed when a step is a twelfth of the largest one
_MEMORY = 10  # steps after which what was seen before counts for little
_PATIENCE = 10  # steps with a mean in each before averages become rarer; twice as many if that went wrong soon
_SOON = 5  # times the patience
_AMPLIFIED = 2.0  # times the usual noise (a square) at level 0
_BENT = 2.0  # at most: how much further than in a straight line, as a square, replicas get with momentum
_SLACK = 1.25  # that much beyond or below what is allowed before anything changes, so that it does not flap


class AdaAuto(Policy):
    """Averages as rarely as the replicas' disagreement allows, and needs no setting: see ``docs/decisions/0005-ada-auto.md``.

    With SGD parameters are averaged. A mean of what other optimizers make of each worker's own gradients (Adam divides by the root of a
    mean square, Muon orthogonalizes) is not what they make of the mean gradient. So with those gradients are averaged in each step, in
    8 bits with error feedback.

    At each global average all workers see how far apart the replicas were, the same bits everywhere. From that and the learning rate
    follows the noise: how far one step would drive them apart at a learning rate of 1. ``pace``: how far it does now, as a part of
    what it did at most. Where gradients are taken, replicas may be apart by ``tolerance``, as mean squares, in steps of that
    size: less when the learning rate is smaller, in proportion. Of the frontier of ``frontier.py`` the cheapest level that
    keeps to it is approached. If disagreement returns, so do averages.
    """

    watches = True

    def __init__(self, n: int, tolerance: float = _TOLERANCE, cost: Callable[[Graph], float] | None = None) -> None:
        super().__init__(n)
        if not tolerance > 0:
            raise GossamerError(f"ada-auto: tolerance={tolerance} is out of range; it is above 0")
        self.tolerance = tolerance
        self.cost, self.levels = cost, frontier(n, cost)
        self.level = 0
        self.noise, self.usual = 0.0, 0.0  # squares: now, and at level 0
        self.fastest = 0.0  # the largest learning rate so far
        # At this level: since when; how much further one step drives replicas than one of several in a row, 0 if not known yet.
        self.entered, self.bent = 0, 1.0
        self.patience, self.until = _PATIENCE, 0  # how long, and until when, level 0 is kept
        self._seen: int | None = None  # when; and the learning rate then
        self._rate = 0.0
        self._why = "start"
        self._gradients = False  # whether these are averaged

    def meet(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        kinds = sorted({type(optimizer).__name__ for optimizer in optimizers if not isinstance(optimizer, torch.optim.SGD)})
        self._gradients = bool(kinds)
        self._why = f"{', '.join(kinds)}: gradients of all in each step, in 8 bits" if kinds else "start"

    def method(self, chosen: Method | None = None) -> Method:
        """A mean of all in each step leaves no distance where gradients are taken; while combining it would leave that of a step. What a
        person asked for stands."""
        if self._gradients and chosen in (None, AdaptThenCombine()):
            return COARSE
        return SharedMomentum(chosen or AdaptThenCombine())

    def first(self) -> Graph:
        return self.levels[0].graph

    def decide(self, now: Moment) -> tuple[Graph, str]:
        return self.levels[self.level].graph, self._why

    def learnt(self) -> tuple[float, ...]:
        return self.noise, self.usual, self.fastest, float(self.patience)

    def observe(self, sight: Sight) -> None:
        # What each had learnt travels along and is averaged: so a worker that came later, or missed a sight, learns it too.
        self.noise, self.usual, self.fastest, patience = sight.carried
        self.patience = round(patience)
        before, self._seen = self._seen, sight.step
        rate, self._rate = self._rate, sight.rate
        if before is None:
            self.until = sight.step + self.patience
        if before is None or not sight.rate or not sight.distance:
            return  # it is not known since when replicas have drifted, or they have not
        here, since = self.levels[self.level], sight.step - before
        if since < here.every:
            return  # just changed to it: not what this level does
        square = (rate**2 + rate * sight.rate + sight.rate**2) / 3  # the mean, if the learning rate changed evenly
        self._look(sight.distance**2 / here.apart(before, since) / square, since, here.every)
        self.fastest = max(self.fastest, sight.rate)
        if self.level == 0:
            self.usual = self.noise
        pace = math.sqrt(self.noise / self.usual) * sight.rate / self.fastest
        wanted = self._wanted(pace, sight.step)
        if wanted != self.level:
            apart = math.sqrt(self.noise) * sight.rate / sight.norm if sight.norm else math.inf
            self._change(
                wanted,
                sight.step,
                f"a step drives replicas apart by {apart:.1%} of their length, {pace:.2g} times the most so far",
            )

    def _look(self, fresh: float, since: int, every: int) -> None:
        if not self.bent:  # the first look at this level: the noise is still what it was when it was entered
            self.bent = min(max(1 / _BENT, self.noise / fresh), every)
        self.noise += (min(1.0, since / _MEMORY) if self.noise else 1.0) * (self.bent * fresh - self.noise)

    def _wanted(self, pace: float, step: int) -> int:
        if self.level and self.noise > _AMPLIFIED * self.usual:
            return 0
        spreads = [pace * level.spread for level in self.levels]
        if spreads[self.level] > self.tolerance * _SLACK:
            return max(k for k, spread in enumerate(spreads) if spread <= self.tolerance)
        higher = self.level + 1
        may = step >= self.until and higher < len(spreads) and spreads[higher] <= self.tolerance / _SLACK
        return higher if may else self.level

    def _change(self, level: int, step: int, why: str) -> None:
        if level == 0:
            soon = step - self.entered < _SOON * self.patience
            self.patience = 2 * self.patience if soon else _PATIENCE
            self.until = step + self.patience
            why = f"disagreement returns: {why}"
        if not self.level or not level:
            self.entered = step  # level 0, or the ones above it
        self.level, self.bent, self._why = level, 0.0 if level else 1.0, why

    def sized(self, n: int) -> Schedule:
        made = AdaAuto(n, self.tolerance, self.cost)
        made._gradients, made._why = self._gradients, self._why if self._gradients else made._why
        return made

    def succeed(self, other: Schedule) -> None:
        if isinstance(other, AdaAuto):
            for key in ("usual", "fastest", "patience", "changes"):
                setattr(self, key, getattr(other, key))

    def describe(self) -> str:
        return "ada-auto" if self.tolerance == _TOLERANCE else f"ada-auto:tolerance={self.tolerance}"

    _KEPT = ("level", "noise", "usual", "fastest", "entered", "bent", "patience", "until", "_seen", "_rate", "_why")


SCHEDULES.makers["ada-auto"] = AdaAuto
