"""A Step is what a method sees at its moments. The Trainer, or a person's own loop, drives it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from gossamer.graphs import Graph
from gossamer.graphs.rounds import Mean, Round
from gossamer.rows.vector import Parameters, Vector
from gossamer.rows.wires import EXACT, Wire
from gossamer.transport.mixer import Mixer
from gossamer.transport.transfer import AgreedMean, Transfer


class Step:
    """One for a whole run; the driver sets what changes.

    - ``t``: the step's number. ``round``: which rows are averaged in it, of ``graph``. ``lr``: the learning rate.
    - ``x``, ``grad``, ``state``: rows of parameters, of gradients, and of the method's own.
    - ``pending``: transfers that a method has started and not used yet, by name.
    - ``bytes``: received by each replica so far.
    """

    def __init__(
        self, mixer: Mixer, x: Parameters, grad: Vector, look: Callable[[], object], share: Callable[[int], bool]
    ) -> None:
        self.mixer, self.x, self.grad = mixer, x, grad
        self.state: dict[str, Vector] = {}
        self.part: str | None = None  # the name of the state in a checkpoint, if there is any
        self.pending: dict[str, Transfer] = {}
        self.notes: dict[str, float] = {}
        self.on_note: Callable[[int, dict[str, float]], object] | None = None  # is told of each step's notes
        self.t, self.lr, self.bytes = 0, 0.0, 0
        self.graph = Graph("complete", (Mean(mixer.n),))
        self.round: Round = self.graph.rounds[0]
        self._look, self._share = look, share
        self._shared = -1  # the last step in which momentum was shared

    def mix(self, *vectors: Vector, wire: Wire | None = None, round: Round | None = None) -> Transfer:
        """Start to average each vector with those of the neighbours: W v. ``wire``: how rows travel, if not as the driver was told.
        ``round``: another W than that of the step."""
        chosen = self.round if round is None else round
        self.bytes += self.mixer.cost(chosen, *vectors, wire=wire)
        return self.mixer.start(chosen, self.t, *vectors, wire=wire)

    def mean(self, *vectors: Vector) -> Transfer | AgreedMean:
        """Start to average each vector over all replicas; the result is the same for all, to the bit."""
        everyone = Mean(self.mixer.n)
        self.bytes += self.mixer.cost(everyone, *vectors, wire=EXACT)
        return self.mixer.start(everyone, self.t, *vectors, alike=True)

    @property
    def agrees(self) -> bool:
        """Whether the last mean of all was the same on all workers. Only then they may decide by it."""
        return self.mixer.agrees

    def note(self, **numbers: float) -> None:
        """What a method wants to show of this step, by name."""
        self.notes |= numbers
        if self.on_note is not None:
            self.on_note(self.t, numbers)

    def state_dict(self) -> dict[str, list[Tensor]]:
        return {name: list(vector.tensors) for name, vector in self.state.items()}

    def load_state_dict(self, state: Mapping[str, Sequence[Tensor]]) -> None:
        for name, vector in self.state.items():
            for tensor, saved in zip(vector.tensors, state[name], strict=True):
                tensor.copy_(saved)

    def look(self) -> None:
        """The profile, just before averaging."""
        self._look()

    def share_momentum(self) -> None:
        """After a mean of all parameters: the optimizer's momentum becomes what that mean has done since the last one, once in a step."""
        if self._shared != self.t and self._share(self.t):
            self._shared = self.t
