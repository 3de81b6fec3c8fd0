"""A Mixer applies the Round of the moment to a block of rows: by itself, or with rows that Exchange brings from other processes.

``start`` before the forward pass, ``finish`` after the backward pass: between the two, rows are on their way while the process
computes. Whoever uses it never knows how many processes there are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from gossamer.errors import GossamerError
from gossamer.graphs.rounds import Hosts, Mean, Round
from gossamer.rows import codec, finite, mixing
from gossamer.rows.block import Block
from gossamer.rows.finite import Fault
from gossamer.rows.movement import Movement, mean_of_codes
from gossamer.transport.exchange import Between, Exchange, columns, poisoned
from gossamer.transport.link import Tag
from gossamer.transport.probe import Probe
from gossamer.transport.routes import Plan, plan, rows_of
from gossamer.transport.transfer import Flight

Wire = Literal["float32", "bfloat16"]


@dataclass
class _Mixing:
    """One block on its way."""

    round: Round
    plan: Plan
    flight: Flight | None = None
    received: Tensor | None = None  # edges: what arrives, a row each
    result: Tensor | None = None  # slices: what comes back
    snapshot: Tensor | None = None  # the rows as they were sent, if not straight out of the block
    codes: Tensor | None = None  # few bits: what comes back
    spoiled: Set[int] = frozenset()  # edges: which of the rows that came are not finite


class Mixer:
    """``wire="bfloat16"``: rows that travel by edges are rounded, one's own stays exact: x + Σ w(bf16(x_j) - bf16(x_i)).
    ``send_copy``: send from a copy, so that a slow receiver does not hold a fast sender, and parameters may change meanwhile."""

    def __init__(self, n: int, exchange: Exchange | None = None, wire: Wire = "float32", send_copy: bool = False) -> None:
        if wire not in ("float32", "bfloat16"):
            raise GossamerError(f"wire={wire!r} is not known; rows travel as 'float32' or 'bfloat16'")
        self.n, self.exchange, self.wire, self.send_copy = n, exchange, wire, send_copy
        self.rows = rows_of(exchange.rank, n, exchange.size) if exchange else range(n)
        self._per_process = len(self.rows)
        self.round: Round = Mean(n)
        self.step = 0
        self.check_finite = False  # for one row per process: a row that is not finite is not mixed
        self._turns: dict[int, int] = {}  # of each block, how often it was sent
        self.fault: Fault | None = None  # what is not finite in my own row, once it was found
        self.on_fault: Callable[[Fault], object] | None = None  # under gossamer launch: leave, so that the others can go on
        self.probe: Probe | None = None  # looks at the first block whenever all are averaged, if somebody wants to know
        self._probed: Block | None = None
        self._movements: dict[int, Movement] = {}  # of the blocks that have a mean that all know
        self._moved: dict[int, Tensor] = {}  # in one process: how far all have moved
        self._mixing: dict[int, _Mixing] = {}
        self._departures: dict[int, Flight] = {}  # sent from a copy, perhaps not yet taken by their receivers
        self._buffers: dict[tuple[int, str, torch.dtype], Tensor] = {}

    def resize(self) -> None:
        """Other processes take part than before."""
        self._movements.clear()
        if self.exchange is not None:
            self.n = self._per_process * self.exchange.size
            self.rows = rows_of(self.exchange.rank, self.n, self.exchange.size)

    def edge_share(self, dtype: torch.dtype) -> float:
        """What a row by edges weighs on the wire against one in its own precision."""
        rounded = self.wire == "bfloat16" and dtype in (torch.float32, torch.float64)
        return torch.bfloat16.itemsize / dtype.itemsize if rounded else 1.0

    def cost(self, blocks: Sequence[Block]) -> int:
        """Bytes of this Round per replica, as ``Round.cost`` defines them, with what the wire saves and a look costs."""
        whole = sum(block.numel * block.dtype.itemsize for block in blocks)
        looks = self.probe is not None and isinstance(self.round, Mean) and self.round.n > 1
        seen = self.probe.cost(blocks[0].x.shape[1], self.round.n) if self.probe is not None and looks else 0
        if not self._in_few_bits:
            return self.round.cost(whole, self.edge_share(torch.float32)) + seen
        if not self._movements:
            return Mean(self.round.n).cost(whole) + seen
        return self.round.cost(torch.float32.itemsize * sum(block.numel for block in blocks)) + seen

    @property
    def _in_few_bits(self) -> bool:
        return isinstance(self.round, Mean) and self.round.bits < 32 and self.round.n > 1

    # --- Start and finish ------------------------------------------------------------------------------------------------

    def start(self, block: Block) -> None:
        """Start to mix ``block.x``. It may be read, not changed, until ``finish`` (but see ``send_copy``)."""
        share = self.edge_share(block.dtype)
        rounded = share < 1 and self.round.verb(share) == "edges"
        movement = self._movements.get(id(block)) if self._in_few_bits else None
        if self.exchange is None:
            self._look(block, None)
            if movement is not None:
                self._moved[id(block)] = movement.mixed(block.x, self.step)
                return
            (mixing.mix_rounded if rounded else mixing.mix)(self.round, block.x, block.spare)
            return
        made = plan(self.round, self.exchange.size, self.exchange.rank, rounded)
        state = self._mixing[id(block)] = _Mixing(self.round, made)
        tag = self.exchange.step_tag(self.step)
        if movement is not None:
            self._start_codes(block, state, tag, movement)
        elif made.verb == "edges":
            self._start_edges(block, state, tag, rounded)
        elif made.verb in ("slices", "hosts"):
            self._start_slices(block, state, tag)
        self._look(block, tag)

    def _look(self, block: Block, tag: Tag | None) -> None:
        if self.probe is not None and self._probed is None and isinstance(self.round, Mean) and self.round.n > 1:
            self._probed = block
            self.probe.start(block, tag)

    def _see(self, block: Block) -> None:
        if self.probe is not None and self._probed is block:
            self._probed = None
            self.probe.finish(block, self.step)

    def _start_edges(self, block: Block, state: _Mixing, tag: Tag, rounded: bool) -> None:
        assert self.exchange is not None
        dtype = torch.bfloat16 if rounded else block.dtype
        if rounded or self.send_copy:
            self._take_off(block)
            state.snapshot = self._buffer(block, "snapshot", block.r, dtype).copy_(block.x)
        source = block.x if state.snapshot is None else state.snapshot
        outgoing: list[tuple[int, Tensor]] = []
        for k, parcel in enumerate(state.plan.sends):
            local = [row - self.rows.start for row in parcel.rows]
            if parcel.sums is None:
                outgoing += [(parcel.peer, source[row]) for row in local]
            else:
                sums = self._buffer(block, f"sums {k}", parcel.count, dtype)
                weights = torch.from_numpy(parcel.sums).to(block.x)
                torch.mm(weights, source if len(local) == block.r else source[local], out=sums)
                outgoing.append((parcel.peer, sums))
        count = sum(parcel.count for parcel in state.plan.receives)
        state.received = self._buffer(block, "received", count, dtype)
        parts = state.received.split([parcel.count for parcel in state.plan.receives]) if count else ()
        incoming = [(parcel.peer, part) for parcel, part in zip(state.plan.receives, parts, strict=True)]
        if state.snapshot is not None:
            self._departures[id(block)], state.flight = self.exchange.edges_apart(outgoing, incoming, tag)
        else:
            state.flight = self.exchange.edges(outgoing, incoming, tag)

    def _sent(self, block: Block, state: _Mixing) -> Tensor:
        if self.send_copy:
            state.snapshot = self._buffer(block, "snapshot", block.r, block.dtype).copy_(block.x)
        return block.x if state.snapshot is None else state.snapshot

    def _start_slices(self, block: Block, state: _Mixing, tag: Tag) -> None:
        assert self.exchange is not None
        rows, members = self._sent(block, state), state.plan.members
        if state.plan.reduced and block.r > 1:
            rows = torch.mean(rows, dim=0, keepdim=True, out=self._buffer(block, "mean", 1, block.dtype))
        state.result = self._buffer(block, "result", rows.shape[0], block.dtype)
        mine = self.exchange.owned(rows.shape[1], members)
        x, y = (self._buffer(block, what, len(members) * len(rows), block.dtype, mine) for what in ("columns", "mixed columns"))
        apply, between = self._between(block, state, mine)
        state.flight = self.exchange.slices(rows, state.result, members, apply, tag, (x, y), between=between)

    def _start_codes(self, block: Block, state: _Mixing, tag: Tag, movement: Movement) -> None:
        """As slices, but every row travels, not the mean of mine: it would be rounded once more."""
        assert self.exchange is not None
        rows = self._sent(block, state)
        wide, members, n = codec.width(rows.shape[1]), state.plan.members, state.round.n
        mine = self.exchange.owned(wide, members, codec.UNIT)
        first, step = self.exchange.begins(wide, members, codec.UNIT) // codec.UNIT, self.step
        sent, state.codes = (self._buffer(block, what, block.r, torch.uint8, wide) for what in ("codes", "codes back"))
        x, y = (self._buffer(block, what, n, torch.uint8, mine) for what in ("code columns", "mixed code columns"))
        movement.encode(rows, sent, step, self.rows.start)

        def apply(x: Tensor, y: Tensor) -> None:
            mean_of_codes(x, n, mine // codec.UNIT * codec.SPAN, y[0], step, first)
            y[1:] = y[:1]

        state.flight = self.exchange.slices(sent, state.codes, members, apply, tag, (x, y), unit=codec.UNIT)

    def _between(self, block: Block, state: _Mixing, mine: int) -> tuple[Callable[[Tensor, Tensor], object], Between | None]:
        """What I do with my columns. Hosts: those of my host's mean go to the worker with my place on another host, and its come to me."""
        hosts, inner, plan_, place = state.round, state.plan.inner, state.plan.between, state.plan.place
        assert inner is not None
        look = self.check_finite and block.r == 1
        if plan_ is None:

            def alone(x: Tensor, y: Tensor) -> None:
                mixing.mix(inner, x, y)
                if look:
                    finite.mark(y, isinstance(inner, Mean))

            return alone, None
        assert isinstance(hosts, Hosts)
        mean = self._buffer(block, "host mean", 1, block.dtype, mine)
        theirs = self._buffer(block, "other hosts", max(1, len(plan_.receives)), block.dtype, mine)
        peers = [(parcel.peer * hosts.per_node + place, row) for parcel, row in zip(plan_.receives, theirs, strict=False)]
        weights = hosts.inner.neighbors(self.rows.start // hosts.per_node)
        others = [(weights[parcel.rows[0]], row) for parcel, row in zip(plan_.receives, theirs, strict=False)]

        def apply(x: Tensor, y: Tensor) -> None:
            mixing.blend(mean[0], weights.get(self.rows.start // hosts.per_node, 0.0), others, out=y[0])
            if look:
                finite.mark(y[:1], alike=True)
            y[1:] = y[:1]

        sends = [(parcel.peer * hosts.per_node + place, mean) for parcel in plan_.sends]
        return apply, Between(lambda x: torch.mean(x, dim=0, keepdim=True, out=mean), sends, peers)

    def finish(self, block: Block) -> None:
        """The mixed rows are there and become ``block.x``, which is another buffer than before."""
        state = self._mixing.pop(id(block), None)
        moved = self._moved.pop(id(block), None)
        if state is not None:
            self._combine(block, state)
        elif moved is not None:
            mean = self._arrive(block, moved)
            block.spare.copy_(block.x if mean is None else mean.expand_as(block.x))
        block.swap()
        if moved is None and (state is None or state.codes is None):
            self._agree(block, block.x[0])
        self._see(block)

    def _agree(self, block: Block, mean: Tensor) -> None:
        """The first mean of those that will be in few bits; it came in full precision."""
        if self._in_few_bits and id(block) not in self._movements:
            self._movements[id(block)] = Movement(mean, self.step)

    def _arrived(self, block: Block, state: _Mixing) -> Tensor | None:
        """The mean that the codes lead to."""
        assert state.codes is not None
        moved = torch.empty(block.x.shape[1], dtype=torch.float32, device=block.x.device)
        codec.decode(state.codes[0], moved)
        return self._arrive(block, moved)

    def _arrive(self, block: Block, moved: Tensor) -> Tensor | None:
        """The new mean; or None, and the next one is in full precision again."""
        mean = self._movements[id(block)].arrive(moved, self.step)
        if mean is None:
            del self._movements[id(block)]
            self.look_for_fault(block, block.x[0])
        return mean

    def moved(self, block: Block) -> Tensor | None:
        """How far the last mean went in a step, on the average; None if it took one step only, or nobody knows."""
        movement = self._movements.get(id(block))
        if movement is None or movement.moved is None or movement.step != self.step or movement.steps < 2:
            return None
        return movement.moved / movement.steps

    def state_dict(self, blocks: Sequence[Block]) -> list[dict[str, Any] | None]:
        """What all know, of each block."""
        return [movement.state_dict() if (movement := self._movements.get(id(block))) else None for block in blocks]

    def load_state_dict(self, blocks: Sequence[Block], state: list[dict[str, Any] | None]) -> None:
        """``state``: of all blocks. If they were others (parameters that were frozen then), the next mean is the first one again."""
        pairs = list(zip(blocks, state, strict=False))
        same = len(blocks) == len(state) and all(not held or len(held["mean"]) == block.x.shape[1] for block, held in pairs)
        self._movements = {id(block): Movement.of(held) for block, held in pairs if same and held}

    def _combine(self, block: Block, state: _Mixing) -> None:
        x, out = block.x, block.spare
        if state.flight is not None:
            state.flight.wait()
        if state.codes is not None:
            mean = self._arrived(block, state)
            out.copy_(x if mean is None else mean.expand_as(out))
        elif state.result is not None:
            out.copy_(state.result.expand_as(out))
        elif state.plan.verb == "none":
            out.copy_(x)
        elif state.snapshot is not None and state.snapshot.dtype != block.dtype:
            assert state.received is not None
            sent = state.snapshot.to(block.dtype)
            mixing.product([(state.plan.local, sent), (state.plan.remote, state.received.to(block.dtype))], out)
            out.add_(x).sub_(sent)
        elif block.r == 1:
            own, others = self._terms(state)
            mixing.blend(x[0], own, others, out[0])
        else:
            assert state.received is not None
            names = [row for parcel in state.plan.receives for row in parcel.rows] if state.plan.raw else None
            weights = state.plan.local, state.plan.remote
            mixing.mix_some(state.round, self.rows.start, x, state.received, names, *weights, out)

    def finish_in_place(self, block: Block) -> None:
        """For one row per process: the mixed row is written to where the row is, so that parameters stay in their place."""
        state = self._mixing.pop(id(block), None)
        if state is None or state.flight is None:
            return
        state.flight.wait()
        self._see(block)
        if state.flight.dirty:
            self._buffers = {key: held for key, held in self._buffers.items() if key[0] != id(block)}
        if state.flight.in_vain or not self._sound(block, state):
            return  # some of the mixed row is missing or not finite, so all of it is: the Round is the identity for me
        x = block.x[0]
        if state.codes is not None:
            mean = self._arrived(block, state)
            if mean is None:
                return
        else:
            mean = None if state.result is None else state.result[0]
            if mean is not None:
                self._agree(block, mean)
        if mean is not None and state.snapshot is not None:
            mixing.correct(x, state.snapshot[0], [(1.0, mean)])
        elif mean is not None:
            x.copy_(mean)
        elif state.snapshot is not None:
            mixing.correct(x, state.snapshot[0], self._terms(state)[1])
        else:
            mixing.blend(x, *self._terms(state), out=x)

    def _terms(self, state: _Mixing) -> tuple[float, list[tuple[float, Tensor]]]:
        weights = state.round.neighbors(self.rows.start)
        assert state.received is not None
        parcels = list(zip(state.plan.receives, state.received, strict=True))
        own = weights.get(self.rows.start, 0.0)
        if state.flight is not None and (state.flight.lost or state.spoiled) and self.exchange is not None:
            # A row that did not come whole, or is not finite, is not used at all; its weight goes to my own.
            lost, living = state.flight.lost, self.exchange.living
            came = [pair for k, pair in enumerate(parcels) if living[pair[0].peer] not in lost and k not in state.spoiled]
            own += sum(weights[parcel.rows[0]] for parcel, _ in parcels) - sum(weights[parcel.rows[0]] for parcel, _ in came)
            parcels = came
        return own, [(weights[parcel.rows[0]], row) for parcel, row in parcels]

    def _sound(self, block: Block, state: _Mixing) -> bool:
        """Whether there is something to be mixed: not if my own row is not finite, or the mixed one. (Codes are looked at later.)"""
        if not self.check_finite or state.codes is not None:
            return True
        sent = (block.x if state.snapshot is None else state.snapshot)[0]
        sound = True
        if state.result is not None:  # their owners have looked at the columns, and marked those that are not finite
            first = self._firsts(state)
            sound = finite.finite(state.result[0, first])
        if state.received is not None:
            state.spoiled = {k for k, row in enumerate(state.received) if not finite.finite(row)}
            self._turns[id(block)] = turn = self._turns.get(id(block), 0) + 1
            sound = finite.finite(finite.share(sent, turn))
        if not sound:
            self.look_for_fault(block, sent)
        return sound

    def _firsts(self, state: _Mixing) -> list[int]:
        """Of each member's columns the first one."""
        assert state.result is not None
        width, members = state.result.shape[1], state.plan.members
        begins = (columns(width, len(members), k).start for k in range(len(members)))
        return [begin for begin in begins if begin < width]

    def look_for_fault(self, block: Block, row: Tensor) -> None:
        """Some row is not finite. Is it mine, and where?"""
        if self.check_finite and self.fault is None and not finite.finite(row):
            self.fault = Fault(finite.culprit(block, row), self.step)

    # --- Means -----------------------------------------------------------------------------------------------------------

    def mean_(self, rows: Tensor) -> None:
        """Every row becomes the mean of all n rows."""
        if self.n > 1:
            mean = rows if len(rows) == 1 else rows.mean(dim=0, keepdim=True)
            rows.copy_(self.mean(mean[0]).expand_as(rows))

    @torch.inference_mode(False)  # a thread writes to what is made here, and it is in no inference mode
    @torch.no_grad()
    def mean(self, row: Tensor, what: str = "mean()", sound: Callable[[Tensor], bool] | None = None) -> Tensor:
        """The mean over all processes of a flat tensor. ``sound``: see :meth:`Exchange.complete`."""
        exchange = self.exchange
        if exchange is None or row.numel() == 0:
            return row
        out = row

        def start() -> Flight:
            nonlocal out
            out = poisoned(row, 1)[0]  # anew, in case what was lost still comes
            everyone = Mean(exchange.size)
            return exchange.slices(
                row.unsqueeze(0),
                out.unsqueeze(0),
                range(exchange.size),
                lambda x, y: mixing.mix(everyone, x, y),
                exchange.collective_tag(what),
                what=what,
            )

        done = exchange.complete(start, what, sound and (lambda: sound(out)))
        return out if done else exchange.reachable(row, what).mean(dim=0)

    def gather(self, rows: Tensor, what: str = "profile") -> Tensor:
        """My rows ``[r, …]`` and everyone else's, ``[n, …]``. For small ones."""
        if self.exchange is None:
            return rows
        return self.exchange.gather(rows.contiguous().flatten(), what).reshape(-1, *rows.shape[1:])

    # --- Buffers ---------------------------------------------------------------------------------------------------------

    def _take_off(self, block: Block) -> None:
        """What was sent from the snapshot of the last step has left, so that it may be written again."""
        flight = self._departures.pop(id(block), None)
        if flight is not None:
            flight.wait()

    def _buffer(self, block: Block, what: str, rows: int, dtype: torch.dtype, columns: int | None = None) -> Tensor:
        """Reused from step to step; grows when a Round brings more rows than any before."""
        width = block.x.shape[1] if columns is None else columns
        key = (id(block), what, dtype)
        held = self._buffers.get(key)
        if held is None or held.shape[0] < rows or held.shape[1] != width:
            held = self._buffers[key] = torch.empty(rows, width, dtype=dtype, device=block.x.device)
        return held[:rows]
