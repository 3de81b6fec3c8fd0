"""A Step is what a method sees at its moments. The Trainer, or a person's own loop, drives it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from gossamer.graphs import Graph
from gossamer.graphs.rounds import Mean, Round
from gossamer.optim import moments
from gossamer.rows.vector import Parameters, Vector
from gossamer.rows.wires import EXACT, Wire
from gossamer.transport.agreed import AgreedMean
from gossamer.transport.mixer import Mixer
from gossamer.transport.transfer import Transfer


class Step:
    """One for a whole run; the driver sets what changes.

    - ``t``: the step's number. ``round``: which rows are averaged in it, of ``graph``. ``lr``: the learning rate.
    - ``x``, ``grad``, ``state``: rows of parameters, of gradients, and of the method's own.
    - ``pending``: transfers that a method has started and not used yet, by name. ``crossing``: those that are used in a later step. They
      are in no checkpoint: a method starts them again from its state.
    - ``bytes``: received by each replica so far.
    """

    def __init__(
        self,
        mixer: Mixer,
        x: Parameters,
        grad: Vector,
        look: Callable[[], object],
        share: Callable[[int], bool],
        states: Callable[[Sequence[Tensor]], Iterable[tuple[dict[str, Any], Tensor]]] = lambda rows: (),
    ) -> None:
        self.mixer, self.x, self.grad = mixer, x, grad
        self.state: dict[str, Vector] = {}
        self.part: str | None = None  # the name of the state in a checkpoint, if there is any
        self.pending: dict[str, Transfer] = {}
        self.crossing: dict[str, Transfer | AgreedMean] = {}
        self.optimizers: Sequence[torch.optim.Optimizer] = ()
        self.notes: dict[str, float] = {}
        self.on_note: Callable[[int, dict[str, float]], object] | None = None  # is told of each step's notes
        self.t, self.lr, self.bytes = 0, 0.0, 0
        self.graph = Graph("complete", (Mean(mixer.n),))
        self.round: Round = self.graph.rounds[0]
        self._look, self._share, self._states = look, share, states
        self._shared = -1  # the last step in which momentum was shared

    def mix(self, *vectors: Vector, wire: Wire | None = None, round: Round | None = None) -> Transfer:
        """Start to average each vector with those of the neighbours: W v. ``wire``: how rows travel, if not as the driver was told.
        ``round``: another W than that of the step."""
        chosen = self.round if round is None else round
        self.bytes += self.mixer.cost(chosen, *vectors, wire=wire)
        return self.mixer.start(chosen, self.t, *vectors, wire=wire)

    def mean(
        self, *vectors: Vector, wire: Wire = EXACT, turn: int | None = None, ahead: bool = False, plus: Vector | None = None
    ) -> AgreedMean:
        """Start to average each vector over all replicas; the result is the same for all, to the bit. ``wire``: how rows travel. ``ahead``:
        rows set out at once, and the result may be asked for in a later step; vectors stay as they are until then. ``turn``: the step that
        the wire rounds by, if not this one. ``plus``: what it has lost of the first vector before; now it has lost ``lost[0]``."""
        self.bytes += self.mixer.cost_of_mean(*vectors, wire=wire)
        return AgreedMean(self.mixer, vectors, wire, self.t if turn is None else turn, self.t if ahead else None, plus)

    def sound(self, mean: Vector) -> bool:
        """Whether all numbers of a mean are finite, which all workers see alike. If not, a worker whose own ones are not has diverged."""
        if mean.finite():
            return True
        for block in self.x.blocks if len(self.mixer.rows) == 1 else ():
            self.mixer.look_for_fault(block, block.x[0], self.t)
        return False

    def moments(self, *names: str) -> dict[str, Vector]:
        """Copies of the optimizer's moments of these names (default: ``exp_avg`` … as it has them, the same on all workers)."""
        made = {name: self.x.zeros() for name in names or moments.names(self.optimizers)}
        for name, vector in made.items():
            for state, view in self._states(vector.tensors):
                if isinstance(own := state.get(name), Tensor):
                    view.copy_(own)
        return made

    def set_moments(self, made: Mapping[str, Vector]) -> None:
        """Where the optimizer has them already."""
        for name, vector in made.items():
            for state, view in self._states(vector.tensors):
                if isinstance(own := state.get(name), Tensor):
                    own.copy_(view)

    def updates(self) -> int:
        """How many the optimizer has counted."""
        states = (state for optimizer in self.optimizers for state in optimizer.state.values())
        return max((int(state["step"]) for state in states if "step" in state), default=0)

    def reset_moments(self) -> None:
        """The optimizer begins anew, its count of steps included."""
        for optimizer in self.optimizers:
            for state in optimizer.state.values():
                state.clear()

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
        self.crossing.clear()
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
