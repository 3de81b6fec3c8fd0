"""Failures in a spec: which workers are away when. A pure function of the spec, n and the seed, so it resumes exactly, and all
methods of a seed lose the same workers at the same time."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from pydantic import Field, model_validator

from gossamer.data import seeds
from gossamer.errors import GossamerError
from gossamer.members.outages import Outage
from gossamer.toml_files import Part

NONE = "none"  # the runs in which no worker fails


class EventPart(Part):
    """``workers`` by their numbers, or a ``share`` of all n (one at least, chosen by the seed among those that are there), are away from
    epoch ``at`` until epoch ``back``, or for good."""

    workers: tuple[int, ...] | None = Field(None, strict=False, min_length=1)
    share: float | None = Field(None, gt=0, lt=1)
    at: float = Field(ge=0, allow_inf_nan=False)
    back: float | None = Field(None, allow_inf_nan=False)

    @model_validator(mode="after")
    def _whole(self) -> EventPart:
        if (self.workers is None) == (self.share is None):
            raise GossamerError("give workers = [3, 7] or share = 0.1, one of the two")
        if self.workers is not None and (min(self.workers) < 0 or len(set(self.workers)) < len(self.workers)):
            raise GossamerError(f"workers = {list(self.workers)}: they are counted from 0, each at most once")
        if self.back is not None and self.back <= self.at:
            raise GossamerError(f"back = {self.back:g} is not after at = {self.at:g}; leave it out if they never come back")
        return self

    def count(self, n: int) -> int:
        return len(self.workers) if self.workers is not None else max(1, round((self.share or 0) * n))


class FailuresPart(Part):
    """One way to fail: ``events``, and by chance: in each epoch each worker fails with probability ``per_epoch``, at any moment of it, for
    ``away`` epochs (default: for good). Where there is chance, the last one never fails."""

    events: tuple[EventPart, ...] = Field((), strict=False)
    per_epoch: float | None = Field(None, gt=0, le=1)
    away: float | None = Field(None, gt=0, allow_inf_nan=False)

    @model_validator(mode="after")
    def _whole(self) -> FailuresPart:
        if self.away is not None and self.per_epoch is None:
            raise GossamerError("away is for workers that fail by chance; give per_epoch, too")
        return self

    @property
    def empty(self) -> bool:
        return not self.events and self.per_epoch is None

    def outages(self, n: int, seed: int, epochs: int) -> tuple[Outage, ...]:
        until = np.full(n, -math.inf)  # when each is back from its last outage
        found: list[Outage] = []
        for at, back, index, who in sorted(self._moments(n, seed, epochs), key=lambda moment: moment[:3]):
            here = until < at  # a worker that is back at this very moment can't take over from another yet
            chosen = self._chosen(who, here, index, seed)
            left = here.copy()
            left[chosen] = False
            if not left.any():
                if self.per_epoch is None:
                    raise GossamerError(
                        f"events.{index}: of n={n} nobody is left at epoch {at:g} (seed {seed}); let at least one live"
                    )
                chosen.remove(next(worker for worker in chosen if here[worker]))
            until[chosen] = np.maximum(until[chosen], back)
            found += [Outage(worker, at, None if back == math.inf else back) for worker in chosen]
        return tuple(found)

    def _moments(self, n: int, seed: int, epochs: int) -> Iterator[tuple[float, float, int, tuple[int, ...] | int]]:
        """(at, back, index of the event, who): workers by number, or how many."""
        for index, event in enumerate(self.events):
            yield event.at, math.inf if event.back is None else event.back, index, event.workers or event.count(n)
        if self.per_epoch is not None:
            chance = np.random.default_rng(seeds.derive(seed, -10))
            for epoch in range(epochs):
                moments = epoch + chance.random(n)
                for worker in (chance.random(n) < self.per_epoch).nonzero()[0].tolist():
                    yield float(moments[worker]), float(moments[worker]) + (self.away or math.inf), _CHANCE, (worker,)

    @staticmethod
    def _chosen(who: tuple[int, ...] | int, here: np.ndarray, index: int, seed: int) -> list[int]:
        if isinstance(who, int):
            order = np.random.default_rng(seeds.derive(seed, -9, index)).permutation(len(here))
            return sorted(int(worker) for worker in order[here[order]][:who])
        return [worker for worker in who if index != _CHANCE or here[worker]]

    def describe(self, n: int) -> str:
        """As a sentence would say it."""
        parts = []
        for event in self.events:
            until = "for good" if event.back is None else f"until epoch {event.back:g}"
            parts.append(f"{event.count(n)} of {n} workers away from epoch {event.at:g} {until}")
        if self.per_epoch is not None:
            away = "for good" if self.away is None else f"for {self.away:g} epochs"
            parts.append(f"each worker fails with probability {self.per_epoch:g} per epoch, {away}")
        return "; ".join(parts) or "no worker fails"


_CHANCE = 1 << 30  # after all events, if they are at the same moment


def check(failures: Mapping[str, FailuresPart], replicas: Sequence[int], run_seeds: Sequence[int], epochs: int) -> None:
    """All that can be known before anything runs; the first mistake is named with its key."""
    for name, part in failures.items():
        if (name == NONE) != part.empty:
            raise GossamerError(
                f"failures.{name}: no worker fails in it; give events or per_epoch, or name it {NONE}"
                if part.empty
                else f"failures.{NONE} is the name of the runs in which no worker fails; leave it empty, or give it another name"
            )
        for index, event in enumerate(part.events):
            if event.at >= epochs:
                raise GossamerError(
                    f"failures.{name}.events.{index}.at: epoch {event.at:g} is not before the end of training; task.epochs is {epochs}"
                )
            most = max(event.workers or (0,))
            if most >= min(replicas):
                raise GossamerError(
                    f"failures.{name}.events.{index}.workers: there is no worker {most} with replicas={min(replicas)}; "
                    f"they are 0 to {min(replicas) - 1}"
                )
        if part.per_epoch is None:
            for n, seed in itertools.product(replicas, run_seeds):
                try:
                    part.outages(n, seed, epochs)
                except GossamerError as error:
                    raise GossamerError(f"failures.{name}.{error}") from None
