"""A Schedule says which Graph to use now. It sees the step, the epoch and what was last measured, and logs each change."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

from gossamer import graphs
from gossamer.errors import GossamerError
from gossamer.graphs import Graph
from gossamer.spelling import Registry, plain_name


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
    watches = False  # whether it wants to be told what is seen at global averages
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

    def first(self) -> Graph | None:
        """The Graph of step 0, if it is known before training: for checks."""
        return None

    def note(self, step: int, graph: str, reason: str) -> None:
        """Log a change that was decided elsewhere."""
        self.changes.append(Change(step, self.changes[-1].epoch if self.changes else 0, graph, reason))

    @abstractmethod
    def decide(self, now: Moment) -> tuple[Graph, str]:
        """The Graph, and the reason that goes to the log if it is a change."""

    def observe(self, sight: Any) -> None:  # noqa: B027  (most have no use for it)
        """The Sight of a global average (transport/probe.py); the same on every worker."""

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

    def first(self) -> Graph:
        return self.fixed

    def decide(self, now: Moment) -> tuple[Graph, str]:
        return self.fixed, "fixed"

    def describe(self) -> str:
        return self.fixed.name


SCHEDULES: Registry[Schedule] = Registry("schedule", own=("n",))
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


SCHEDULES.makers["ada"] = Ada


def schedule(what: str | Graph | Schedule, n: int, also: Sequence[str] = ()) -> Schedule:
    """What a person may write for a schedule: a graph's name, ``"ada-auto"``, ``"ada"`` (with ``:reach=0.5`` …), a Graph, or a
    Schedule. ``also``: names that only the caller knows; an error names them too."""
    if isinstance(what, str) and plain_name(what) in SCHEDULES.makers:
        return SCHEDULES.make(what, n)
    if not isinstance(what, (str, Graph, Schedule)):
        raise GossamerError(
            f"a {type(what).__name__} is not a graph; give a name, or make one with graphs.from_matrix or from_networkx"
        )
    if isinstance(what, str):
        what = graphs.parse(what, n, [*SCHEDULES.makers, *also])
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
        self.planned, self.watches = planned, planned.watches
        self._made, self._note = planned, ""

    def resize(self, n: int) -> None:
        self._made, self._note = rebuilt(self.planned, n, self._made)
        self.n = n

    def decide(self, now: Moment) -> tuple[Graph, str]:
        graph, reason = self._made.decide(now)
        return graph, self._note.removeprefix("; ") or reason

    def learnt(self) -> tuple[float, ...]:
        return self._made.learnt()

    def observe(self, sight: Any) -> None:
        self._made.observe(sight)

    def describe(self) -> str:
        return self.planned.describe()

    def state_dict(self) -> dict[str, Any]:
        return self._made.state_dict() | super().state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """After :meth:`resize`, if they are not as many as at the start."""
        self._made.load_state_dict(state)
        super().load_state_dict(state)
