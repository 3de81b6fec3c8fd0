"""A Schedule says which Graph to use now. It sees the step, the epoch and what was last measured, and logs each change."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Literal

from gossamer import graphs
from gossamer.errors import GossamerError
from gossamer.graphs import Graph
from gossamer.schedules.frontier import frontier

Order = Literal["awc", "atc"]  # adapt while combine, adapt then combine


@dataclass(frozen=True)
class Moment:
    """When a schedule is asked: step and epoch count from 0; ``signals`` holds the latest measurements by name."""

    step: int
    epoch: int
    epochs: int
    signals: Mapping[str, float]


@dataclass(frozen=True)
class Change:
    """One change of graph, and why."""

    step: int
    epoch: int
    graph: str
    reason: str


@dataclass(frozen=True)
class Sight:
    """At a global average in ``step``: how far replicas were from their mean (root of the mean square), the mean's own length, and the
    learning rate; and the mean of the numbers that each worker gave."""

    step: int
    distance: float
    norm: float
    rate: float
    carried: tuple[float, ...] = ()


class Schedule(ABC):
    watches = False  # whether it wants to be told what is seen at global averages
    shares_momentum = False  # whether workers share it at global averages (see momentum.py)
    by_epoch: ClassVar[bool] = False  # whether it depends on the epoch
    order: ClassVar[Order] = "awc"  # in which the library averages, unless it is told

    def __init__(self, n: int) -> None:
        self.n = n
        self.changes: list[Change] = []
        self._current: Graph | None = None

    def graph(self, step: int, epoch: int = 0, epochs: int = 1, signals: Mapping[str, float] | None = None) -> Graph:
        """The Graph for this step. Logs to ``changes`` when it is another than before."""
        graph, reason = self.decide(Moment(step, epoch, epochs, signals or {}))
        if self._current is None or graph.name != self._current.name:
            if self._last_logged() != graph.name:
                self.changes.append(Change(step, epoch, graph.name, reason))
            self._current = graph
        return graph

    def note(self, step: int, graph: str, reason: str) -> None:
        """Log a change that was decided elsewhere."""
        self.changes.append(Change(step, self.changes[-1].epoch if self.changes else 0, graph, reason))

    @abstractmethod
    def decide(self, now: Moment) -> tuple[Graph, str]:
        """The Graph, and the reason that goes to the log if it is a change."""

    def observe(self, sight: Sight) -> None:  # noqa: B027  (most have no use for it)
        """What was seen at a global average; the same on every worker."""

    def learnt(self) -> tuple[float, ...]:
        """Numbers that are averaged over all workers with each Sight."""
        return ()

    def succeed(self, other: Schedule) -> None:  # noqa: B027
        """Take over what another one has learnt, which was for more workers, or fewer."""

    @abstractmethod
    def describe(self) -> str:
        """The schedule as a person would write it."""

    def sized(self, n: int) -> Schedule:
        """The same for n workers."""
        return schedule(self.describe(), n)

    def _last_logged(self) -> str | None:
        return self.changes[-1].graph if self.changes else None

    def state_dict(self) -> dict[str, Any]:
        return {"changes": [asdict(change) for change in self.changes]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.changes = [Change(**change) for change in state["changes"]]


class Fixed(Schedule):
    """The same Graph from beginning to end."""

    def __init__(self, graph: Graph) -> None:
        super().__init__(graph.n)
        self.fixed = graph

    def decide(self, now: Moment) -> tuple[Graph, str]:
        return self.fixed, "fixed"

    def describe(self) -> str:
        return self.fixed.name


_REACH = 0.8
_TOLERANCE = 0.05  # a mean in every second step, whose spread is 0.5, is allowed when a step is a twelfth of the largest one
_MEMORY = 10  # steps after which what was seen before counts for little
_PATIENCE = 10  # steps with a mean in each before averages become rarer; twice as many if that went wrong soon
_SOON = 5  # times the patience
_AMPLIFIED = 2.0  # times the usual noise (a square) at level 0
_BENT = 2.0  # at most: how much further than in a straight line, as a square, replicas get with momentum
_SLACK = 1.25  # that much beyond or below what is allowed before anything changes, so that it does not flap


class Ada(Schedule):
    """A ring lattice that starts dense and thins out: k = max(k0 - int(gamma·epoch), k_min).

    k0 defaults to n-1, the complete graph. Give ``gamma``, the decrease per epoch, or ``reach``, the fraction of the epochs
    after which k_min is reached: gamma = (k0 - k_min)/(reach·epochs). The formula is our reconstruction of the paper's idea
    ("the coordination number decreases linearly over epochs"); the defaults are ours.
    """

    by_epoch = True

    def __init__(
        self, n: int, k0: int | None = None, gamma: float | None = None, reach: float = _REACH, k_min: int = 2
    ) -> None:
        super().__init__(n)
        densest = max(n - 1, 1)
        if gamma is not None and reach != _REACH:
            raise GossamerError("Ada: give gamma or reach, not both; each of them sets how fast k falls")
        if gamma is not None and gamma < 0:
            raise GossamerError(f"Ada: gamma={gamma} is negative; k falls by gamma each epoch")
        if not 0 < reach <= 1:
            raise GossamerError(f"Ada: reach={reach} is out of range; it is a fraction of the epochs, above 0 and up to 1")
        if k_min < 2:
            raise GossamerError(f"Ada: k_min={k_min} is out of range; the thinnest lattice is the ring, k_min=2")
        for what, value in (("k0", k0), ("k_min", k_min)):
            if value is not None and int(value) != value:
                raise GossamerError(f"Ada: {what}={value} is not an integer; it counts neighbours")
        if n > 3 and k_min > densest:
            raise GossamerError(f"Ada: k_min={k_min} is out of range for n={n}; it is from 2 (ring) to {densest} (complete)")
        if k0 is not None and n > 3 and not k_min <= k0 <= densest:
            raise GossamerError(f"Ada: k0={k0} is out of range for n={n}; it is from k_min={k_min} to {densest} (complete)")
        self.k0 = densest if k0 is None else min(k0, densest)
        self.k_min = min(k_min, self.k0)
        self.gamma = gamma
        self.reach = reach
        self._graphs: dict[int, Graph] = {}

    def k(self, epoch: int, epochs: int) -> int:
        gamma = (self.k0 - self.k_min) / (self.reach * epochs) if self.gamma is None else self.gamma
        # The nudge keeps e.g. int(0.1 · 30) at 3 when the product is 2.9999999999999996.
        return max(self.k0 - int(gamma * epoch + 1e-9), self.k_min)

    def decide(self, now: Moment) -> tuple[Graph, str]:
        k = self.k(now.epoch, now.epochs)
        if k not in self._graphs:
            self._graphs[k] = graphs.complete(self.n) if k >= self.n - 1 else graphs.lattice(self.n, k=k)
        return self._graphs[k], f"epoch {now.epoch} of {now.epochs}: k={k}"

    def sized(self, n: int) -> Ada:
        """One that starts complete does so with any n."""
        densest = max(n - 1, 1)
        k0 = None if self.k0 >= self.n - 1 else min(self.k0, densest)
        return Ada(n, k0, self.gamma, self.reach, max(2, min(self.k_min, densest)))

    def describe(self) -> str:
        speed = f"reach={self.reach}" if self.gamma is None else f"gamma={self.gamma}"
        return f"ada:k0={self.k0},{speed},k_min={self.k_min}"


class AdaAuto(Schedule):
    """Averages as rarely as the replicas' disagreement allows, and needs no setting: see ``docs/decisions/0005-ada-auto.md``.

    At each global average all workers see how far apart the replicas were, the same bits everywhere. From that and the learning rate
    follows the noise: how far one step would drive them apart at a learning rate of 1. ``pace``: how far it does now, as a part of
    what it did at most. Where gradients are taken, replicas may be apart by ``tolerance``, as mean squares, in steps of that
    size: less when the learning rate is smaller, in proportion. Of the frontier of :mod:`gossamer.frontier` the cheapest level that
    keeps to it is approached. If disagreement returns, so do averages.
    """

    watches = True
    shares_momentum = True
    # A mean of all in each step leaves no distance where gradients are taken; while combining it would leave that of a step.
    order = "atc"

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

    def decide(self, now: Moment) -> tuple[Graph, str]:
        return self.levels[self.level].graph, self._why

    def learnt(self) -> tuple[float, ...]:
        return self.noise, self.usual, self.fastest, float(self.patience)

    def observe(self, sight: Sight) -> None:
        # What each had learnt travels along and is averaged: so somebody who came later, or missed a sight, learns it too.
        self.noise, self.usual, self.fastest, patience = sight.carried
        self.patience = round(patience)
        before, self._seen = self._seen, sight.step
        rate, self._rate = self._rate, sight.rate
        if before is None:
            self.until = sight.step + self.patience
        if before is None or not sight.rate or not sight.distance:
            return  # nobody knows since when they have drifted, or they have not
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
        return AdaAuto(n, self.tolerance, self.cost)

    def succeed(self, other: Schedule) -> None:
        if isinstance(other, AdaAuto):
            for key in ("usual", "fastest", "patience", "changes"):
                setattr(self, key, getattr(other, key))

    def describe(self) -> str:
        return "ada-auto" if self.tolerance == _TOLERANCE else f"ada-auto:tolerance={self.tolerance}"

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {key: getattr(self, key) for key in self._KEPT}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        for key in self._KEPT:
            setattr(self, key, state[key])

    _KEPT = ("level", "noise", "usual", "fastest", "entered", "bent", "patience", "until", "_seen", "_rate", "_why")


def schedule(what: str | Graph | Schedule, n: int, also: Sequence[str] = ()) -> Schedule:
    """What a person may write for a schedule: a graph's name, ``"ada-auto"``, ``"ada"`` (with ``:reach=0.5`` …), a Graph, or a
    Schedule. ``also``: names that only the caller knows; an error names them too."""
    kind = graphs.plain_name(what) if isinstance(what, str) else ""
    if isinstance(what, str) and kind in _KINDS:
        make, takes = _KINDS[kind]
        return make(n, **_options(what, kind, takes))
    if not isinstance(what, (str, Graph, Schedule)):
        raise GossamerError(
            f"a {type(what).__name__} is not a graph; give a name, or make one with graphs.from_matrix or from_networkx"
        )
    if isinstance(what, str):
        what = graphs.parse(what, n, [*_KINDS, *also])
    made = Fixed(what) if isinstance(what, Graph) else what
    if made.n != n:
        raise GossamerError(f"this graph or schedule is for {made.n} replicas, but there are {n}")
    return made


_ANY_N = "one-peer-exponential"  # where the graph does not exist for the number of workers that is left


def rebuilt(planned: Schedule, n: int, current: Schedule | None = None) -> tuple[Schedule, str]:
    """The same for another number of workers, or the nearest that there is; and what to say about it. ``current``: the one that
    was used so far."""
    note = ""
    try:
        made = planned.sized(n)
    except GossamerError as error:
        made, note = schedule(_ANY_N, n), f"; {error}"
    if current is not None:
        made.succeed(current)
    return made, note


class Resized(Schedule):
    """A schedule for workers that come and go: the planned one, rebuilt for as many as there are."""

    def __init__(self, planned: Schedule) -> None:
        super().__init__(planned.n)
        self.planned, self.watches, self.shares_momentum = planned, planned.watches, planned.shares_momentum
        self._made, self._note = planned, ""

    def resize(self, n: int) -> None:
        self._made, self._note = rebuilt(self.planned, n, self._made)
        self.n = n

    def decide(self, now: Moment) -> tuple[Graph, str]:
        graph, reason = self._made.decide(now)
        return graph, self._note.removeprefix("; ") or reason

    def learnt(self) -> tuple[float, ...]:
        return self._made.learnt()

    def observe(self, sight: Sight) -> None:
        self._made.observe(sight)

    def describe(self) -> str:
        return self.planned.describe()

    def state_dict(self) -> dict[str, Any]:
        return self._made.state_dict() | super().state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """After :meth:`resize`, if they are not as many as at the start."""
        self._made.load_state_dict(state)
        super().load_state_dict(state)


_KINDS: dict[str, tuple[Callable[..., Schedule], dict[str, type]]] = {
    "ada": (Ada, {"k0": int, "gamma": float, "reach": float, "k_min": int}),
    "ada-auto": (AdaAuto, {"tolerance": float}),
}


def _options(text: str, kind: str, takes: Mapping[str, type]) -> dict[str, float]:
    options: dict[str, float] = {}
    for part in filter(None, (p.strip() for p in text.partition(":")[2].split(","))):
        key, _, value = (s.strip() for s in part.partition("="))
        if key not in takes:
            raise GossamerError(f"{kind} has no parameter {key!r}; it takes {', '.join(takes)}")
        try:
            options[key] = takes[key](value)
        except ValueError:
            raise GossamerError(f"{text!r}: {key}={value!r} is not a number as {key} takes it") from None
    return options
