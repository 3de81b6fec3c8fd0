"""A Mixer applies a Round to vectors: by itself, or with rows that Exchange brings from other processes.

``start`` makes rows set out and returns a :class:`Transfer`; its ``into`` waits for the result. Between the two, rows are in flight while
the process computes. A caller never knows how many processes there are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from gossamer.graphs.rounds import Hosts, Mean, Round
from gossamer.rows import codec, finite, mixing, wires
from gossamer.rows.block import Block
from gossamer.rows.finite import Fault
from gossamer.rows.movement import Movement, mean_of_codes
from gossamer.rows.vector import Parameters, Vector
from gossamer.rows.wires import EXACT, Wire
from gossamer.transport.exchange import Between, Exchange, poisoned
from gossamer.transport.link import Tag
from gossamer.transport.operation import Operation
from gossamer.transport.probe import Probe
from gossamer.transport.routes import plan, rows_of
from gossamer.transport.spans import span
from gossamer.transport.transfer import Part, Transfer


class Mixer:
    """``wire="bfloat16"``: rows that travel by edges are rounded, each worker's own stays exact: x + Σ w(bf16(x_j) - bf16(x_i)).
    ``send_copy``: send parameters from a copy, so that a slow receiver does not hold a fast sender, and they may change meanwhile."""

    def __init__(self, n: int, exchange: Exchange | None = None, wire: str | Wire = "float32", send_copy: bool = False) -> None:
        self.wire = wires.wire(wire, wires.ANY_METHOD)
        self.n, self.exchange, self.send_copy = n, exchange, send_copy
        self.rows = rows_of(exchange.rank, n, exchange.size) if exchange else range(n)
        self._per_process = len(self.rows)
        self.agrees = True  # whether a mean of all is the same on all workers; not if the store is gone
        self.check_finite = False  # for one row per process: a row that is not finite is not mixed
        self._turns: dict[int, int] = {}  # of each block, how often it was sent
        self.fault: Fault | None = None  # what is not finite in my own row, once it was found
        self.on_fault: Callable[[Fault], object] | None = None  # under gossamer launch: leave, so that the others can go on
        self.probe: Probe | None = None  # looks at the first block whenever all are averaged, if a schedule wants to know
        self.step = 0  # of what was started last
        self._probed: tuple[Block, int] | None = None
        self._movements: dict[int, Movement] = {}  # of the blocks that have a mean that all know
        self._departures: list[tuple[int, Operation, Tensor]] = []  # sent from a copy in some step, perhaps not yet taken
        self._buffers: dict[tuple[int, torch.dtype], list[Tensor]] = {}  # of so many columns; free ones

    def resize(self) -> None:
        """Other processes take part than before."""
        self._movements.clear()
        if self.exchange is not None:
            self.n = self._per_process * self.exchange.size
            self.rows = rows_of(self.exchange.rank, self.n, self.exchange.size)

    def cost_of_mean(self, *vectors: Vector, wire: Wire = EXACT) -> int:
        """Bytes of a mean of all per replica, on a wire."""
        rows = [pair for vector in vectors for pair in zip(vector.numels, vector.flagged, strict=True)]
        return Mean(self.n).cost(sum(wire.bytes(numel, x.dtype) for numel, x in rows))

    def cost(self, round_: Round, *vectors: Vector, wire: Wire | None = None) -> int:
        """Bytes of this Round per replica, as ``Round.cost`` defines them, with what the wire saves and a look costs."""
        total = 0
        for vector in vectors:
            whole = sum(numel * x.dtype.itemsize for numel, x in zip(vector.numels, vector.tensors, strict=True))
            if wire is not None and wire.share(torch.float32) < 1:
                rows = zip(vector.numels, vector.tensors, strict=True)
                total += round_.degree * sum(wire.bytes(numel, x.dtype) for numel, x in rows)
                continue
            probe = self._probe(vector, round_)
            if probe is not None:
                total += probe.cost(vector.tensors[0].shape[1], round_.n)
            if not _in_few_bits(round_):
                total += round_.cost(whole, (wire or self.wire).share(torch.float32))
            elif self._movements and isinstance(vector, Parameters):
                total += round_.cost(torch.float32.itemsize * sum(vector.numels))
            else:
                total += Mean(round_.n).cost(whole)
        return total

    def _probe(self, vector: Vector, round_: Round) -> Probe | None:
        """If there is one, and it looks at this."""
        return self.probe if isinstance(vector, Parameters) and isinstance(round_, Mean) and round_.n > 1 else None

    # --- Start ------------------------------------------------------------------------------------------------------------

    def start(self, round_: Round, step: int, *vectors: Vector, wire: Wire | None = None) -> Transfer:
        """Start to mix. What is sent may be read, not changed, until ``into`` (but see ``send_copy``). ``wire``: in which all rows travel,
        by edges; by default the mixer's own, where it saves bytes."""
        self.step = step
        with span("gossamer::send"):
            parts = [
                [
                    self._start(Part(vector, k, round_, wire or self.wire, step), wire is not None)
                    for k in range(len(vector.tensors))
                ]
                for vector in vectors
            ]
        return Transfer(self, parts)

    def _start(self, part: Part, always: bool) -> Part:
        round_, x = part.round, part.x
        share = part.wire.share(x.dtype)
        rounded = share < 1 and (always or round_.verb(share) == "edges")
        few = part.block is not None and _in_few_bits(round_) and not always
        movement = self._movements.get(part.k) if few else None
        if self.exchange is None:
            self._look(part, None)
            if movement is not None:
                part.moved = movement.mixed(x, part.step)
            elif round_.degree:
                self._mix_here(part, rounded)
            return part
        part.plan = plan(round_, self.exchange.size, self.exchange.rank, rounded, few)
        tag = self.exchange.step_tag(part.step)
        if movement is not None:
            self._start_codes(part, tag, movement)
        elif part.plan.verb == "edges":
            self._start_edges(part, tag, rounded)
        elif part.plan.verb in ("slices", "hosts"):
            self._start_slices(part, tag)
        self._look(part, tag)
        return part

    def _mix_here(self, part: Part, rounded: bool) -> None:
        """In one process the result is there at once."""
        x, vector = part.x, part.vector
        block = part.block if isinstance(vector, Parameters) and not vector.in_place else None
        if isinstance(part.round, Mean) and block is None and not rounded:
            part.result = torch.mean(x, dim=0, keepdim=True)
            return
        part.result = self._take(part, x.shape, x.dtype) if block is None else block.spare
        if rounded:
            self._encode(part)
        mixing.mix(part.round, part.sent, part.result)

    def _encode(self, part: Part) -> None:
        """The rows as the wire has them."""
        x, wire = part.x, part.wire
        part.snapshot = self._take(part, (len(x), wire.width(x.shape[1])), wire.code)
        if self._looks(part) and wire.code.is_floating_point:
            finite.copy(x[0], part.snapshot[0])
            return
        for k, (row, code) in enumerate(zip(x, part.snapshot, strict=True)):
            wire.encode(row, code, codec.turn(part.step, self.rows.start + k))

    def _copy(self, part: Part) -> Tensor:
        """What is sent: a copy of parameters, or the rows as they are."""
        if self.send_copy and part.block is not None:
            part.snapshot = self._take(part, part.x.shape, part.x.dtype)
            if self._looks(part):
                finite.copy(part.x[0], part.snapshot[0])
            else:
                part.snapshot.copy_(part.x)
            return part.snapshot
        return part.x

    def _look(self, part: Part, tag: Tag | None) -> None:
        probe, block = self._probe(part.vector, part.round), part.block
        if probe is not None and block is not None and self._probed is None:
            self._probed = block, part.step
            probe.start(block, tag)

    def see(self) -> None:
        """What was looked at has arrived."""
        if self.probe is not None and self._probed is not None:
            (block, step), self._probed = self._probed, None
            self.probe.finish(block, step)

    def _start_edges(self, part: Part, tag: Tag, rounded: bool) -> None:
        assert self.exchange is not None
        x = part.x
        if rounded or (self.send_copy and part.block is not None):
            self._wait_for_departures(part.step)
        if rounded:
            self._encode(part)
        source = self._copy(part) if part.snapshot is None else part.snapshot
        dtype, width = source.dtype, source.shape[1]
        outgoing: list[tuple[int, Tensor]] = []
        for parcel in part.plan.sends:
            local = [row - self.rows.start for row in parcel.rows]
            if parcel.sums is None:
                outgoing += [(parcel.peer, source[row]) for row in local]
            else:
                sums = self._take(part, (parcel.count, width), dtype)
                weights = torch.from_numpy(parcel.sums).to(x)
                torch.mm(weights, source if len(local) == len(x) else source[local], out=sums)
                outgoing.append((parcel.peer, sums))
        count = sum(parcel.count for parcel in part.plan.receives)
        part.received = self._take(part, (count, width), dtype)
        pieces = part.received.split([parcel.count for parcel in part.plan.receives]) if count else ()
        incoming = [(parcel.peer, piece) for parcel, piece in zip(part.plan.receives, pieces, strict=True)]
        if part.snapshot is None:
            part.operation = self.exchange.edges(outgoing, incoming, tag)
            return
        departure, part.operation = self.exchange.edges_apart(outgoing, incoming, tag)
        self._departures.append((part.step, departure, part.held.pop(0)))  # the snapshot's buffer was taken first

    def _start_slices(self, part: Part, tag: Tag) -> None:
        assert self.exchange is not None
        rows, members, dtype = self._copy(part), part.plan.members, part.x.dtype
        if part.plan.reduced and len(rows) > 1:
            rows = torch.mean(rows, dim=0, keepdim=True, out=self._take(part, (1, rows.shape[1]), dtype))
        part.result = self._take(part, rows.shape, dtype)
        owned = self.exchange.owned(rows.shape[1], members)
        mine = owned.stop - owned.start
        x, y = (self._take(part, (len(members) * len(rows), mine), dtype) for _ in range(2))
        apply, between = self._between(part, mine)
        part.operation = self.exchange.slices(rows, part.result, members, apply, tag, (x, y), between=between)

    def _start_codes(self, part: Part, tag: Tag, movement: Movement) -> None:
        """As slices, but every row travels, not the mean of mine: it would be rounded once more."""
        assert self.exchange is not None
        rows = self._copy(part)
        wide, members, n = codec.width(rows.shape[1]), part.plan.members, part.round.n
        owned = self.exchange.owned(wide, members, codec.UNIT)
        mine, first, step = owned.stop - owned.start, owned.start // codec.UNIT, part.step
        sent, part.moved = (self._take(part, (len(rows), wide), torch.uint8) for _ in range(2))
        x, y = (self._take(part, (n, mine), torch.uint8) for _ in range(2))
        movement.encode(rows, sent, step, self.rows.start)

        def apply(x: Tensor, y: Tensor) -> None:
            mean_of_codes(x, n, y[0], step, first)
            y[1:] = y[:1]

        part.operation = self.exchange.slices(sent, part.moved, members, apply, tag, (x, y), unit=codec.UNIT)

    def _between(self, part: Part, mine: int) -> tuple[Callable[[Tensor, Tensor], object], Between | None]:
        """What I do with my columns. Hosts: those of my host's mean go to the worker with my place on another host, and its come to me."""
        hosts, inner, plan_, place = part.round, part.plan.inner, part.plan.between, part.plan.place
        assert inner is not None
        look, dtype = self._looks(part), part.x.dtype
        if plan_ is None:

            def alone(x: Tensor, y: Tensor) -> None:
                mixing.mix(inner, x, y)
                if look:
                    finite.mark(y, isinstance(inner, Mean))

            return alone, None
        assert isinstance(hosts, Hosts)
        mean = self._take(part, (1, mine), dtype)
        theirs = self._take(part, (max(1, len(plan_.receives)), mine), dtype)
        peers = [(parcel.peer * hosts.per_node + place, row) for parcel, row in zip(plan_.receives, theirs, strict=False)]
        weights = hosts.inner.neighbors(self.rows.start // hosts.per_node)
        others = [(weights[parcel.rows[0]], row) for parcel, row in zip(plan_.receives, theirs, strict=False)]
        own = weights.get(self.rows.start // hosts.per_node, 0.0)

        def apply(x: Tensor, y: Tensor) -> None:
            mixing.blend(mean[0], own, others, out=y[0])
            if look:
                finite.mark(y[:1], alike=True)
            y[1:] = y[:1]

        sends = [(parcel.peer * hosts.per_node + place, mean) for parcel in plan_.sends]
        return apply, Between(lambda x: torch.mean(x, dim=0, keepdim=True, out=mean), sends, peers)

    # --- Means in 8 bits --------------------------------------------------------------------------------------------------

    def agree(self, part: Part, mean: Tensor) -> None:
        """The first mean of those that will be in few bits; it came in full precision."""
        if part.block is not None and _in_few_bits(part.round) and part.k not in self._movements:
            self._movements[part.k] = Movement(mean, part.step)

    def arrive(self, part: Part, moved: Tensor) -> Tensor | None:
        """The new mean; or None, and the next one is in full precision again."""
        if self.exchange is not None:
            codes, moved = moved, torch.empty(part.x.shape[1], dtype=torch.float32, device=part.x.device)
            codec.decode(codes[0], moved)
        mean = self._movements[part.k].arrive(moved, part.step)
        if mean is None:
            del self._movements[part.k]
            self.look_for_fault(part.block, part.x[0], part.step)
        return mean

    def averaged_in(self, step: int) -> bool:
        """Whether a mean that all know is of this step."""
        return any(movement.step == step for movement in self._movements.values())

    def moved(self, k: int, step: int) -> Tensor | None:
        """How far the mean of block k in this step went per step, on the average; None if it took one step only, or is not known."""
        movement = self._movements.get(k)
        if movement is None or movement.moved is None or movement.step != step or movement.steps < 2:
            return None
        return movement.moved / movement.steps

    def state_dict(self, blocks: Sequence[Block]) -> list[dict[str, Any] | None]:
        """What all know, of each block."""
        return [movement.state_dict() if (movement := self._movements.get(k)) else None for k in range(len(blocks))]

    def load_state_dict(self, blocks: Sequence[Block], state: list[dict[str, Any] | None]) -> None:
        """``state``: of all blocks. If they were others (parameters that were frozen then), the next mean is the first one again."""
        pairs = list(zip(blocks, state, strict=False))
        same = len(blocks) == len(state) and all(not held or len(held["mean"]) == block.x.shape[1] for block, held in pairs)
        self._movements = {k: Movement.of(held) for k, held in enumerate(state) if same and held}

    # --- Rows that are not finite -----------------------------------------------------------------------------------------

    def _looks(self, part: Part) -> bool:
        return self.check_finite and self.exchange is not None and len(part.x) == 1

    def turn(self, part: Part) -> int:
        self._turns[part.k] = turn = self._turns.get(part.k, 0) + 1
        return turn

    def look_for_fault(self, block: Block | None, row: Tensor, step: int = 0) -> None:
        """Some row is not finite. Is it mine, and where? ``block``: of parameters."""
        if self.check_finite and self.fault is None and not finite.finite(row):
            self.fault = Fault("the method's state" if block is None else finite.culprit(block, row), step)

    # --- Means -----------------------------------------------------------------------------------------------------------

    def mean_in_place(self, row: Tensor, what: str) -> None:
        """A flat tensor becomes its mean over all processes."""
        if self.exchange is not None and self.exchange.guard is not None:
            row.copy_(self.mean(row, what, acknowledged=True))
        elif (exchange := self.exchange) is not None:  # what is sent has left before anything comes back: one buffer is enough
            mine = exchange.owned(len(row), range(exchange.size))
            x, y = (self._buffer(rows, mine.stop - mine.start, row) for rows in (exchange.size, 1))
            self._start_mean(exchange, row, row, what, (x[: exchange.size], y[:1])).wait()
            self.give_back([x, y])

    @staticmethod
    def _start_mean(
        exchange: Exchange, row: Tensor, out: Tensor, what: str, scratch: tuple[Tensor, Tensor] | None = None
    ) -> Operation:
        def apply(x: Tensor, y: Tensor) -> None:
            torch.mean(x, dim=0, out=y[0])

        members, tag = range(exchange.size), exchange.collective_tag(what)
        return exchange.slices(row.unsqueeze(0), out.unsqueeze(0), members, apply, tag, scratch, what, alike=True)

    @torch.inference_mode(False)  # a thread writes to what is made here, and it is in no inference mode
    @torch.no_grad()
    def mean(
        self,
        row: Tensor,
        what: str = "mean()",
        sound: Callable[[Tensor], bool] | None = None,
        acknowledged: bool = False,
    ) -> Tensor:
        """The mean over all processes of a flat tensor. ``sound``, ``acknowledged``: see :meth:`Exchange.complete`."""
        exchange = self.exchange
        if exchange is None or row.numel() == 0:
            return row
        out = row

        def start() -> Operation:
            nonlocal out
            out = poisoned(row, 1)[0]  # anew, in case what was lost still comes
            return self._start_mean(exchange, row, out, what)

        done = exchange.complete(start, what, sound and (lambda: sound(out)), acknowledged)
        self.agrees = done
        return out if done else exchange.reachable(row, what).mean(dim=0)

    def gather(self, rows: Tensor, what: str = "profile") -> Tensor:
        """My rows ``[r, …]`` and those of all others, ``[n, …]``. For small ones."""
        if self.exchange is None:
            return rows
        return self.exchange.gather(rows.contiguous().flatten(), what).reshape(-1, *rows.shape[1:])

    # --- Buffers ---------------------------------------------------------------------------------------------------------

    def _wait_for_departures(self, step: int) -> None:
        """What was sent from copies in earlier steps has left, so that they may be written again."""
        for sent_in, operation, buffer in self._departures:
            if sent_in != step:
                operation.wait()
                self.give_back([buffer])
        self._departures = [departure for departure in self._departures if departure[0] == step]

    def _take(self, part: Part, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A buffer for as long as the transfer lasts."""
        part.held.append(self._buffer(shape[0], shape[1], part.x, dtype))
        return part.held[-1][: shape[0]]

    def _buffer(self, rows: int, columns: int, like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Of at least so many rows. They are used again from step to step, once they are given back."""
        dtype = dtype or like.dtype
        free = self._buffers.setdefault((columns, dtype), [])
        fits = next((k for k, buffer in enumerate(free) if len(buffer) >= rows), None)
        if fits is None:
            free.clear()  # a Round that brings more rows than any before
            return torch.empty(rows, columns, dtype=dtype, device=like.device)
        return free.pop(fits)

    def give_back(self, buffers: Sequence[Tensor]) -> None:
        for buffer in buffers:
            self._buffers.setdefault((buffer.shape[1], buffer.dtype), []).append(buffer)


def _in_few_bits(round_: Round) -> bool:
    return isinstance(round_, Mean) and round_.bits < 32 and round_.n > 1
