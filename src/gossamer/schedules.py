"""A Schedule says which Graph to use now. It sees the step, the epoch and what was last measured, and logs each change."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

from gossamer import graphs
from gossamer.errors import GossamerError
from gossamer.graphs import Graph
from gossamer.probe import Sight
from gossamer.rounds import Mean, Round, identity


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


class Schedule(ABC):
    watches: ClassVar[bool] = False  # whether it wants to be told what is seen at global averages
    by_epoch: ClassVar[bool] = False  # whether it depends on the epoch

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

    def observe(self, sight: Sight) -> None:
        """What was seen at a global average; the same on every worker."""

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


@dataclass(frozen=True)
class Level:
    """One way to average. ``spread``: how far apart replicas are where they take gradients, as a mean square, if each step moves them apart
    by 1, independently; ``cost``: rows that each receives per step."""

    graph: Graph
    spread: float
    cost: float


_PERIODS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)


def frontier(n: int) -> tuple[Level, ...]:
    """From the mean of all in every step to one in every 64: whatever no other way beats in both spread and cost. Between two means
    there is nothing, or one peer at a time. All of them have means, because that is where all workers see the same."""
    one = graphs.one_peer_exponential(n).rounds
    found = []
    for every in _PERIODS:
        found.append(_level(f"mean every {every}", [identity(n)] * (every - 1) + [Mean(n)]))
        if every > 1:
            length = math.lcm(every, len(one))
            rounds = [Mean(n) if (t + 1) % every == 0 else one[t % len(one)] for t in range(length)]
            found.append(_level(f"mean every {every}, one-peer between", rounds))
    found.sort(key=lambda level: (level.spread, level.cost))
    kept: list[Level] = []
    for level in found:
        if not kept or level.cost < kept[-1].cost:
            kept.append(level)
    return tuple(kept)


def _level(name: str, rounds: list[Round]) -> Level:
    apart, total = 0.0, 0.0
    for t in range(2 * len(rounds)):
        round_ = rounds[t % len(rounds)]
        apart = 0.0 if isinstance(round_, Mean) else (apart + 1) / 2 if round_.degree else apart + 1
        total += apart if t >= len(rounds) else 0.0
    cost = sum(round_.cost(1 << 20) for round_ in rounds) / len(rounds) / (1 << 20)
    return Level(Graph(name, tuple(rounds)), total / len(rounds), cost)


class AdaAuto(Schedule):
    """Averages as rarely as the replicas' disagreement allows, and needs no setting.

    At each global average all workers see how far apart the replicas were. From that follows how far one step moves them apart now, σ_t
    (relative to the length of the parameters). Where gradients are taken, replicas may be apart by ``tolerance`` times the largest σ so far, as a
    mean square; the cheapest level of the frontier that keeps to it is taken. While the learning rate is high there is little
    room; as it falls σ falls with it, and averages become rare. If σ rises again, they become frequent again. ``docs/decisions/0005``.
    """

    watches = True

    def __init__(self, n: int, tolerance: float = 0.5) -> None:
        super().__init__(n)
        if tolerance < 0:
            raise GossamerError(f"ada-auto: tolerance={tolerance} is negative")
        self.tolerance = tolerance
        self.levels = frontier(n) if n > 2 else (Level(graphs.complete(n), 0.0, 1.0),)
        self.level = 0
        self.largest, self.sigma = 0.0, 0.0
        self._steps = 1  # since the last average
        self._why = "start"

    def decide(self, now: Moment) -> tuple[Graph, str]:
        return self.levels[self.level].graph, self._why

    def observe(self, sight: Sight) -> None:
        apart = (sight.distance / sight.norm) ** 2 if sight.norm else 0.0
        level = self.levels[self.level]
        period = level.graph.period
        # What one step adds, from what was there before the average; a little smoothed.
        fresh = apart / _before(level, sight.since or 1)
        self.sigma = fresh if not self.sigma else self.sigma + (fresh - self.sigma) * min(1.0, period / _MEMORY)
        self.largest = max(self.largest, self.sigma)
        room = self.tolerance * self.largest / self.sigma if self.sigma else math.inf
        wanted = max(k for k, level in enumerate(self.levels) if level.spread <= room or k == 0)
        if wanted < self.level or (wanted > self.level and self.levels[min(self.level + 1, len(self.levels) - 1)].spread <= room * _SURE):
            self._why = f"replicas move apart by {math.sqrt(self.sigma):.2g} of their length per step, at most {math.sqrt(self.largest):.2g} so far"
            self.level = wanted if wanted < self.level else self.level + 1

    def describe(self) -> str:
        return f"ada-auto:tolerance={self.tolerance}"

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"level": self.level, "largest": self.largest, "sigma": self.sigma}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.level, self.largest, self.sigma = state["level"], state["largest"], state["sigma"]


def schedule(what: str | Graph | Schedule, n: int) -> Schedule:
    """What a person may write for a schedule: a graph's name, ``"ada"`` (with ``:reach=0.5`` …), a Graph, or a Schedule."""
    if isinstance(what, str) and what.partition(":")[0].strip().lower() == "ada":
        return Ada(n, **_ada_options(what))  # type: ignore[arg-type]
    if not isinstance(what, (str, Graph, Schedule)):
        raise GossamerError(
            f"a {type(what).__name__} is not a graph; give a name, or make one with graphs.from_matrix or from_networkx"
        )
    made = Fixed(graphs.parse(what, n)) if isinstance(what, str) else Fixed(what) if isinstance(what, Graph) else what
    if made.n != n:
        raise GossamerError(f"this graph or schedule is for {made.n} replicas, but there are {n}")
    return made


_ANY_N = "one-peer-exponential"  # where the graph does not exist for the number of workers that is left


def rebuilt(planned: Schedule, n: int) -> tuple[Schedule, str]:
    """The same for another number of workers, or the nearest that there is; and what to say about it."""
    try:
        return planned.sized(n), ""
    except GossamerError as error:
        return schedule(_ANY_N, n), f"; {error}"


class Resized(Schedule):
    """A schedule for workers that come and go: the planned one, rebuilt for as many as there are."""

    def __init__(self, planned: Schedule) -> None:
        super().__init__(planned.n)
        self.planned = planned
        self._made: dict[int, tuple[Schedule, str]] = {planned.n: (planned, "")}

    def resize(self, n: int) -> None:
        if n not in self._made:
            self._made[n] = rebuilt(self.planned, n)
        self.n = n

    def decide(self, now: Moment) -> tuple[Graph, str]:
        made, note = self._made[self.n]
        graph, reason = made.decide(now)
        return graph, note.removeprefix("; ") or reason

    def describe(self) -> str:
        return self.planned.describe()


_ADA_OPTIONS = {"k0": int, "gamma": float, "reach": float, "k_min": int}


def _ada_options(text: str) -> dict[str, float]:
    options: dict[str, float] = {}
    for part in filter(None, (p.strip() for p in text.partition(":")[2].split(","))):
        key, _, value = (s.strip() for s in part.partition("="))
        if key not in _ADA_OPTIONS:
            raise GossamerError(f"Ada has no parameter {key!r}; it takes {', '.join(_ADA_OPTIONS)}")
        try:
            options[key] = _ADA_OPTIONS[key](value)
        except ValueError:
            raise GossamerError(f"{text!r}: {key}={value!r} is not a number as {key} takes it") from None
    return options
