"""A Transfer is vectors on their way to W v: what ``mix`` returns. It owns its buffers, from when rows set out to when the result is used.

``into`` waits and writes W v. What was sent may be the target, and may have changed since if a copy of it was sent: then the change is
kept, and what averaging adds, W v - v, is added. The same form keeps means exact on a wire that rounds: x + W Q(x) - Q(x).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gossamer.graphs.rounds import Round
from gossamer.rows import finite, mixing
from gossamer.rows.block import Block
from gossamer.rows.vector import Parameters, Vector
from gossamer.rows.wires import Wire
from gossamer.transport.operation import Operation
from gossamer.transport.routes import Plan, columns
from gossamer.transport.spans import span

if TYPE_CHECKING:
    from gossamer.transport.mixer import Mixer

_NO_PLAN = Plan("none")


@dataclass
class Part:
    """One tensor ``[r, D]`` of a vector."""

    vector: Vector
    k: int  # which of the vector's tensors
    round: Round
    wire: Wire
    step: int
    plan: Plan = _NO_PLAN
    operation: Operation | None = None
    received: Tensor | None = None  # edges: what arrives, a row each
    result: Tensor | None = None  # in one process, or slices: W Q(v), or one row if all are the same
    snapshot: Tensor | None = None  # the rows as they were sent, if not straight out of the vector
    moved: Tensor | None = None  # how far a mean has moved; in several processes, rows of 8 bits
    held: list[Tensor] = field(default_factory=list)  # buffers

    @property
    def x(self) -> Tensor:
        return self.vector.tensors[self.k]

    @property
    def block(self) -> Block | None:
        """Of parameters."""
        return self.vector.blocks[self.k] if isinstance(self.vector, Parameters) else None

    @property
    def coded(self) -> bool:
        return self.snapshot is not None and self.snapshot.dtype != self.x.dtype

    @property
    def sent(self) -> Tensor:
        """Q(v): what the receivers see of my rows."""
        return self.x if self.snapshot is None else self.decoded(self.snapshot)

    def finite(self, code: Tensor) -> bool:
        if not code.dtype.is_floating_point:
            return self.wire.finite(code)
        return finite.finite(
            code if self.snapshot is None else code[:1]
        )  # all workers send copies, and mark them, or none does

    def decoded(self, code: Tensor) -> Tensor:
        """Rows in the precision of x, from what travelled."""
        if not self.coded:
            return code
        if self.wire.code.is_floating_point:
            return code.to(self.x.dtype)
        rows = torch.empty(len(code), self.x.shape[1], dtype=torch.float32, device=code.device)
        for one, row in zip(code, rows, strict=True):
            self.wire.decode(one, row)
        return rows.to(self.x.dtype)

    def row(self, code: Tensor) -> Tensor:
        """A row as it can be added up: what is rounded to bfloat16 is widened piece by piece, where it is used."""
        return code if not self.coded or self.wire.code.is_floating_point else self.decoded(code.unsqueeze(0))[0]


class Transfer:
    """``parts``: of each vector. ``lost``: ranks whose rows did not come."""

    def __init__(self, mixer: Mixer, parts: Sequence[Sequence[Part]]) -> None:
        self._mixer, self._parts = mixer, parts
        self.lost: frozenset[int] = frozenset()
        self._spoiled: set[int] = set()  # peers whose rows are not finite
        self._identity = False  # nothing is mixed: a row without which the others are worth nothing is missing
        self._waited = False

    def wait(self) -> Transfer:
        if self._waited:
            return self
        self._waited = True
        flying = [(part, part.operation) for parts in self._parts for part in parts if part.operation is not None]
        for _, operation in flying:
            operation.wait()
        self._mixer.see()
        self.lost = frozenset().union(*(operation.lost for _, operation in flying))
        self._identity = any(operation.in_vain for _, operation in flying)
        for part, operation in flying:
            if operation.dirty:
                part.held = []  # what was given up may still be written to
            if self._mixer.check_finite and part.moved is None and not self._identity and len(part.x) == 1:
                self._look(part)
        return self

    def into(self, *targets: Vector) -> None:
        """Each target becomes W v."""
        self.wait()
        with span("gossamer::mix"):
            for target, parts in zip(targets, self._parts, strict=True):
                for part in parts:
                    if target is part.vector and isinstance(target, Parameters) and not target.in_place:
                        self._replace(target.blocks[part.k], part)
                    else:
                        self._write(part, target.tensors[part.k])
        self._give_back()

    @property
    def own(self) -> list[Vector]:
        """Q(v): what the receivers see of my rows."""
        return [Vector([part.sent for part in parts], parts[0].vector.numels) for parts in self._parts]

    @property
    def arrived(self) -> list[Vector]:
        """W Q(v)."""
        self.wait()
        with span("gossamer::mix"):
            return [
                Vector([self._mixed(part, torch.empty_like(part.x)) for part in parts], parts[0].vector.numels)
                for parts in self._parts
            ]

    def end(self) -> None:
        """Nothing more is taken from it."""
        self.wait()
        self._give_back()

    # --- The result -------------------------------------------------------------------------------------------------------

    def _replace(self, block: Block, part: Part) -> None:
        """The mixed rows become the current ones of a block, whose buffers take turns."""
        if not self._nothing(part):
            self._write(part, block.spare)
            block.swap()
            self._agree(part, block.x)

    def _nothing(self, part: Part) -> bool:
        """Whether W v is v: the Round is the identity for my rows, or rows without which there is no result are missing."""
        return self._identity or (part.plan.verb == "none" and part.result is None and part.moved is None)

    def _write(self, part: Part, out: Tensor) -> None:
        """``out`` <- W v (with what the wire rounds kept); it may be what was sent."""
        x = part.x
        if self._nothing(part):
            _copy(x, out)
        elif part.moved is not None:
            mean = self._mixer.arrive(part, part.moved)
            if mean is None:
                _copy(x, out)
            else:
                self._write_result(part, mean, out)
        elif part.result is not None:
            self._write_result(part, part.result, out)
            if len(x) == 1:
                self._agree(part, part.result)
        elif part.snapshot is not None and len(x) == 1:
            _copy(x, out)
            own, terms = self._terms(part)
            sent = part.row(part.snapshot[0])
            mixing.correct(out[0], sent, [(weight, part.row(row)) for weight, row in terms])
            beyond = own + sum(weight for weight, _ in terms) - 1  # of a directed graph, rows of W need not sum to 1
            if abs(beyond) > 1e-9:
                out[0].add_(sent.to(out.dtype), alpha=beyond)
        elif len(x) == 1:
            mixing.blend(x[0], *self._terms(part), out=out[0])
        else:
            room = self._mixed(part, torch.empty_like(x) if out.data_ptr() == x.data_ptr() else out)
            if part.coded:
                room.add_(x).sub_(part.sent)
            _copy(room, out)

    @staticmethod
    def _write_result(part: Part, result: Tensor, out: Tensor) -> None:
        """What was sent is mixed; what has changed since then is kept."""
        x = part.x
        if part.coded:
            _copy(result.add_(x).sub_(part.sent), out)
        elif part.snapshot is not None and out.data_ptr() == x.data_ptr():
            for row, sent, mixed in zip(out, part.snapshot, result.expand_as(x), strict=True):
                mixing.correct(row, sent, [(1.0, mixed)])
        else:
            _copy(result.expand_as(x), out)

    def _mixed(self, part: Part, out: Tensor) -> Tensor:
        """``out`` <- W Q(v), which is not what was sent."""
        if self._nothing(part):
            return out.copy_(part.sent)
        if part.result is not None:
            return out.copy_(part.result.expand_as(out))
        assert part.received is not None
        received, sent = part.decoded(part.received), part.sent
        if len(out) == 1:
            own, terms = self._terms(part)
            mixing.blend(sent[0], own, [(weight, part.row(row).to(out.dtype)) for weight, row in terms], out=out[0])
        elif part.coded:
            mixing.product([(part.plan.local, sent), (part.plan.remote, received)], out)
        else:
            names = [row for parcel in part.plan.receives for row in parcel.rows] if part.plan.raw else None
            weights = part.plan.local, part.plan.remote
            mixing.mix_some(part.round, self._mixer.rows.start, sent, received, names, *weights, out)
        return out

    def _terms(self, part: Part) -> tuple[float, list[tuple[float, Tensor]]]:
        """My own weight, and the others' with what came from them. For one row per process."""
        mixer = self._mixer
        weights = part.round.neighbors(mixer.rows.start)
        own = weights.get(mixer.rows.start, 0.0)
        if part.received is None:
            return own, []
        parcels = list(zip(part.plan.receives, part.received, strict=True))
        if (self.lost or self._spoiled) and mixer.exchange is not None:
            # A row that did not come whole, or is not finite, is not used at all; its weight goes to my own. (Where columns sum to 1, not
            # rows, nothing is made up for: all vectors of the transfer lose the same part.)
            living, kept = mixer.exchange.living, abs(sum(weights.values()) - 1) < 1e-9
            came = [p for p in parcels if living[p[0].peer] not in self.lost and p[0].peer not in self._spoiled]
            missing = sum(weights[parcel.rows[0]] for parcel, _ in parcels) - sum(weights[parcel.rows[0]] for parcel, _ in came)
            own, parcels = own + missing * kept, came
        return own, [(weights[parcel.rows[0]], row) for parcel, row in parcels]

    # --- Besides ----------------------------------------------------------------------------------------------------------

    def _agree(self, part: Part, mean: Tensor) -> None:
        if part.moved is None:
            self._mixer.agree(part, mean[0])

    def _look(self, part: Part) -> None:
        """Is there something to be mixed? Not if my own row is not finite, or the mixed one."""
        sound = True
        sent = (part.x if part.snapshot is None else part.snapshot)[0]
        if part.result is not None:  # their owners have looked at the columns, and marked those that are not finite
            width, members = part.result.shape[1], len(part.plan.members)
            firsts = [columns(width, members, k).start for k in range(members)]
            sound = finite.finite(part.result[0, [first for first in firsts if first < width]])
        if part.received is not None:
            bad = [not part.finite(row) for row in part.received]
            self._spoiled |= {parcel.peer for parcel, spoiled in zip(part.plan.receives, bad, strict=True) if spoiled}
            sound = part.finite(finite.share(sent, self._mixer.turn(part)) if part.snapshot is None else sent)
        if not sound:
            self._identity = True
            marked = part.snapshot is not None and sent.dtype.is_floating_point
            self._mixer.look_for_fault(
                part.block, part.x[0].to(sent.dtype) if marked else part.decoded(sent.unsqueeze(0))[0], part.step
            )

    def _give_back(self) -> None:
        for parts in self._parts:
            for part in parts:
                self._mixer.give_back(part.held)
                part.held = []


def _copy(row: Tensor, out: Tensor) -> None:
    """``out`` may be the row itself."""
    if out.data_ptr() != row.data_ptr():
        out.copy_(row)
