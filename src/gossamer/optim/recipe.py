"""``torch.optim`` on a block of replicas.

Elementwise optimizers see ``[r, D]`` as they would see one replica, so one instance serves all rows. Others (Adafactor …)
would mix replicas there: they get one instance per replica. Momentum and moments stay local; they are never averaged.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from gossamer.errors import GossamerError
from gossamer.optim import momentum
from gossamer.optim.accum_adam import AccumAdam, AccumAdamW
from gossamer.rows.block import Block
from gossamer.rows.replicas import Replicas

_ELEMENTWISE = ("SGD", "Adam", "AdamW", "NAdam", "RAdam", "RMSprop", "Adagrad", "Adadelta", "Adamax", "Rprop")
_OURS = {"accumadam": AccumAdam, "accumadamw": AccumAdamW}  # elementwise too
_NAMES = (*(name.lower() for name in _ELEMENTWISE), *_OURS)
_FUSED = ("SGD", "Adam", "AdamW", "Adagrad")  # these have a one-pass kernel on CPU and CUDA
_REFUSED = {
    "LBFGS": "it evaluates the loss several times per step",
    "SparseAdam": "it takes sparse gradients only",
    "Muon": "it takes matrices only, so biases and norms would need a second optimizer",
}


@dataclass(frozen=True)
class Recipe:
    """Which optimizer, and how.

    ``name``: one of ``torch.optim`` in lower case, or ``accumadam``, ``accumadamw``. ``options`` go to the optimizer as they are
    (momentum, betas, weight_decay, accum_iter …). ``clip`` bounds the global gradient
    norm of each replica. ``spare_norms`` keeps weight decay off biases and norm layers (``decay.py`` says which those are).
    """

    name: str = "sgd"
    lr: float = 0.1
    options: Mapping[str, Any] = field(default_factory=dict)
    clip: float | None = None
    spare_norms: bool = False

    def kind(self) -> type[torch.optim.Optimizer]:
        known = {
            name.lower(): cls
            for name, cls in vars(torch.optim).items()
            if isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer) and cls is not torch.optim.Optimizer
        }
        cls = (known | _OURS).get(self.name.lower())
        if cls is None:
            raise GossamerError(f"optimizer {self.name!r} is not in torch.optim; use one of {', '.join(_NAMES)}")
        if cls.__name__ in _REFUSED:
            raise GossamerError(
                f"optimizer {self.name!r} can't run on a block of replicas: {_REFUSED[cls.__name__]}; "
                f"use one of {', '.join(_NAMES)}"
            )
        return cls


@dataclass(frozen=True)
class _Place:
    """Where an optimizer's parameter lies: rows and columns of a block, or one tensor of one replica."""

    block: Block
    row: int | None = None  # None: all rows
    start: int = 0
    end: int = 0
    tensor: int | None = None  # position among the slots

    def view(self, flat: Tensor) -> Tensor:
        if self.row is None:
            return flat
        if self.tensor is not None:
            return self.block.rows(flat)[self.row][self.tensor]
        return flat[self.row, self.start : self.end]


class BlockOptimizer:
    """Clips each replica's gradient and applies the recipe to all rows."""

    def __init__(self, recipe: Recipe, replicas: Replicas) -> None:
        if recipe.clip is not None and recipe.clip <= 0:
            raise GossamerError(f"clip={recipe.clip} is out of range; it bounds a norm, so it is above 0")
        self.recipe, self.replicas = recipe, replicas
        kind = recipe.kind()
        self._options = options = dict(recipe.options)
        # With one row we leave torch's default, so that n=1 equals plain PyTorch bit for bit. With many rows memory traffic
        # is everything, and the fused kernel touches each number once.
        # (On a CPU, torch 2.13's fused SGD leaves half-precision parameters where they are, without a word.)
        single = all(block.dtype in (torch.float32, torch.float64) for block in replicas.blocks)
        if kind.__name__ in _FUSED and replicas.r > 1 and single:
            options.setdefault("fused", "foreach" not in options)
        self._build()

    def _build(self) -> None:
        replicas, kind = self.replicas, self.recipe.kind()
        self._params: list[tuple[nn.Parameter, _Place]] = []
        self._elementwise = kind.__name__ in _ELEMENTWISE or kind in _OURS.values()
        shares = [self._rows()] if self._elementwise else [self._tensors(i) for i in range(replicas.r)]
        self.optimizers = [self._make(kind, places) for places in shares]

    def _make(self, kind: type[torch.optim.Optimizer], places: list[tuple[_Place, bool]]) -> torch.optim.Optimizer:
        """``places``: each with whether weight decay spares it."""
        decayed: dict[str, Any] = {"params": []}
        spared: dict[str, Any] = {"params": [], "weight_decay": 0.0}
        for place, without in places:
            param = nn.Parameter(place.view(place.block.x))
            param.grad = place.view(place.block.grad)
            self._params.append((param, place))
            (spared if without else decayed)["params"].append(param)
        try:
            groups = [group for group in (decayed, spared) if group["params"]]
            return kind(groups, lr=self.recipe.lr, **self._options)  # type: ignore[call-arg]
        except (TypeError, ValueError) as error:
            raise GossamerError(f"optimizer {self.recipe.name!r} does not take these options: {error}") from None

    def _rows(self) -> list[tuple[_Place, bool]]:
        """All rows of each block; or, where weight decay spares some columns, row by row, because a range of columns over several rows
        has gaps, and torch's fused CPU kernels run over gaps as if they were not there."""
        blocks = self.replicas.blocks
        if not self.recipe.spare_norms:
            return [(_Place(block), False) for block in blocks]
        return [
            (_Place(block, row, start, end), spared)
            for block in blocks
            for row in range(block.r)
            for start, end, spared in ((0, block.decayed, False), (block.decayed, block.x.shape[1], True))
            if end > start
        ]

    def _tensors(self, i: int) -> list[tuple[_Place, bool]]:
        """Each tensor of one replica."""
        return [
            (_Place(block, i, tensor=k), self.recipe.spare_norms and slot.spared)
            for block in self.replicas.blocks
            for k, slot in enumerate(block.slots)
        ]

    def set_lr(self, lr: float) -> None:
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = lr

    def step(self) -> None:
        """Update the current rows. Looks up where they are: mixing swaps buffers."""
        for param, place in self._params:
            param.data = place.view(place.block.x)
        for optimizer in self.optimizers:
            optimizer.step()

    def share_momentum(self, moved: Mapping[int, Tensor | None]) -> bool:
        """After rows were mixed. ``moved``: how far the mean of each block went in a step, by ``id``. Returns whether that was known."""
        rows = {key: row for key, row in moved.items() if row is not None}
        places: dict[Tensor, _Place] = dict(self._params)

        def of(param: Tensor) -> Tensor | None:
            place = places[param]
            row = rows.get(id(place.block))
            return None if row is None else place.view(row.expand_as(place.block.x))

        for optimizer in self.optimizers if rows else ():
            momentum.share(optimizer, of)
        return bool(rows)

    def states(self, rows: Sequence[Tensor]) -> Iterator[tuple[dict[str, Any], Tensor]]:
        """Of each parameter: what an optimizer knows of it, and its place in rows like those of the blocks."""
        of_block = dict(zip(map(id, self.replicas.blocks), rows, strict=True))
        places: dict[Tensor, _Place] = dict(self._params)
        for optimizer in self.optimizers:
            for parameter, state in optimizer.state.items():
                place = places[parameter]
                yield state, place.view(of_block[id(place.block)])

    def clip(self) -> None:
        """As ``clip_grad_norm_`` does, over all tensors of one replica. Tensor by tensor, so that n=1 rounds as PyTorch does."""
        if (limit := self.recipe.clip) is None:
            return
        for i in range(self.replicas.r):
            scale = (limit / (nn.utils.get_total_norm(self.replicas.row_gradients(i)) + 1e-6)).clamp(max=1.0)
            for block in self.replicas.blocks:
                block.grad[i].mul_(scale.to(block.dtype))

    def take(self, rows: Sequence[int]) -> None:
        """After ``replicas.take(rows, …)``: row k goes on with the state of what row ``rows[k]`` was."""
        places: dict[Tensor, _Place] = dict(self._params)
        before = {places[param]: state for optimizer in self.optimizers for param, state in optimizer.state.items()}
        self._build()
        index = torch.tensor(rows, device=self.replicas.device)
        places = dict(self._params)
        for optimizer in self.optimizers:
            for param in (param for group in optimizer.param_groups for param in group["params"]):
                place = places[param]
                state = before.get(place if place.row is None else replace(place, row=rows[place.row]))
                if state is not None:
                    optimizer.state[param] = {name: _taken(value, index, place) for name, value in state.items()}

    def state_dict(self) -> list[dict[str, Any]]:
        return [optimizer.state_dict() for optimizer in self.optimizers]

    def load_state_dict(self, states: list[dict[str, Any]]) -> None:
        for optimizer, state in zip(self.optimizers, states, strict=True):
            optimizer.load_state_dict(state)

    def regrouped(self, saved: Sequence[list[dict[str, Any]]], counts: Sequence[int], rows: slice) -> list[dict[str, Any]]:
        """The states that processes with so many rows each have saved, as of one that holds these ``rows`` of all of them."""
        if not self._elementwise:
            return [state for states in saved for state in states][rows]
        (optimizer,) = self.optimizers
        places: dict[Tensor, _Place] = dict(self._params)
        made: dict[str, Any] = {"state": {}, "param_groups": []}
        before, number = [0] * len(saved), 0  # parameters, of each process and here
        for g, group in enumerate(optimizer.param_groups):
            held = [places[param] for param in group["params"]]
            first = number
            for place in held if held[0].row is None else [place for place in held if place.row == 0]:
                pieces = []
                for k, ((states,), count) in enumerate(zip(saved, counts, strict=True)):
                    some = 1 if place.row is None else count
                    pieces += [states["state"].get(n) for n in range(before[k], before[k] + some)]
                    before[k] += some
                for state in [_joined(pieces, rows)] if place.row is None else pieces[rows]:
                    if state:
                        made["state"][number] = state
                    number += 1
            made["param_groups"].append({**saved[0][0]["param_groups"][g], "params": list(range(first, number))})
        return [made]


def _joined(states: Sequence[dict[str, Any] | None], rows: slice) -> dict[str, Any]:
    """Of all rows together; what is of no row (a count of steps) is the first one's."""
    first, several = states[0] or {}, [state or {} for state in states]
    return {
        name: torch.cat([state[name] for state in several])[rows] if isinstance(value, Tensor) and value.ndim else value
        for name, value in first.items()
    }


def _taken(value: Any, rows: Tensor, place: _Place) -> Any:
    """What is of all rows together (a count of steps) stays; what each row has of its own goes with it."""
    if not isinstance(value, Tensor):
        return value
    return value[rows] if place.row is None and value.ndim > 0 else value.clone()
