"""Means over all replicas, of which all workers have the same bits, or do it again without the dead: replicas that start the same stay so.

On a wire that rounds, each row is encoded once; worker k averages the columns that it owns of all rows, and sends the mean to all, encoded
once more (:func:`gossamer.rows.movement.mean_of_codes`). That is the same arithmetic in one process and in several.

``ahead``: rows set out at once, and the result may be asked for some steps later. What was sent must stay as it is until then. If a worker
is lost meanwhile, or members have changed, the mean is made anew when it is asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gossamer.rows import codec
from gossamer.rows.movement import mean_of_codes
from gossamer.rows.vector import Vector
from gossamer.rows.wires import EXACT, Wire
from gossamer.transport.operation import Operation
from gossamer.transport.spans import span

if TYPE_CHECKING:
    from gossamer.transport.exchange import Exchange
    from gossamer.transport.link import Tag
    from gossamer.transport.mixer import Mixer


class AgreedMean:
    """``turn``: the step that a wire rounds by. ``tag_step``: the step in which rows set out, if they do so at once. ``plus``: what the
    wire has lost of the first vector before; it travels too."""

    def __init__(
        self,
        mixer: Mixer,
        vectors: Sequence[Vector],
        wire: Wire = EXACT,
        turn: int = 0,
        tag_step: int | None = None,
        plus: Vector | None = None,
    ) -> None:
        self._mixer, self._vectors, self._wire, self._turn = mixer, vectors, wire, turn
        self._parts: list[list[_Part]] | None = None
        if wire is not EXACT or tag_step is not None:
            self._parts = [
                [
                    _Part(mixer, x, width, wire, turn)
                    for x, width in zip(_with(vector, None if k else plus), vector.widths, strict=True)
                ]
                for k, vector in enumerate(vectors)
            ]
        if tag_step is not None and self._parts is not None and mixer.exchange is not None:
            for part in (part for parts in self._parts for part in parts):
                part.depart(mixer.exchange, mixer.exchange.step_tag(tag_step))

    @property
    def own(self) -> list[Vector]:
        """What the others see of my rows."""
        assert self._parts is not None
        return [
            Vector([part.own() for part in parts], vector.numels)
            for parts, vector in zip(self._parts, self._vectors, strict=True)
        ]

    @property
    def lost(self) -> list[Vector]:
        """What the wire has lost of my rows."""
        assert self._parts is not None
        return [Vector([part.lost() for part in parts]) for parts in self._parts]

    @torch.inference_mode(False)  # a thread writes to what is made here, and it is in no inference mode
    @torch.no_grad()
    def into(self, *targets: Vector) -> None:
        """Each target becomes the mean; it may be what was sent."""
        with span("gossamer::mean"):
            for k, (target, vector) in enumerate(zip(targets, self._vectors, strict=True)):
                for i, (out, x) in enumerate(zip(target.flagged, vector.flagged, strict=True)):
                    if self._parts is not None:
                        out.copy_(self._parts[k][i].mean())
                    elif len(x) == 1 and out.data_ptr() == x.data_ptr():
                        self._mixer.mean_in_place(out[0], "all-reduce")
                    else:
                        row = _mean(x)
                        self._mixer.mean_in_place(row, "all-reduce")
                        out.copy_(row)


class _Part:
    """Of one tensor ``[r, D]``. ``width``: columns that are numbers; those behind are flags."""

    def __init__(self, mixer: Mixer, x: Tensor, width: int, wire: Wire, turn: int) -> None:
        self._mixer, self._wire, self._turn = mixer, wire, turn
        self._like, self._width, self._columns = x, width, x.shape[1]
        self._coded = wire.share(x.dtype) < 1
        self._flags = -(-width // wire.span) if width < self._columns else None
        self._split = -(-width // wire.span) * wire.unit  # where flags begin in a code
        self._sent = self._encoded(x) if self._coded else x if len(x) == 1 else _mean(x).unsqueeze(0)
        self._out = self._sent
        self._flight: Operation | None = None
        self._places: tuple[int, ...] = ()

    def _encoded(self, x: Tensor) -> Tensor:
        wire, rest = self._wire, self._columns - self._width
        codes = torch.empty(len(x), self._split + (wire.width(rest) if rest else 0), dtype=wire.code, device=x.device)
        for k, (row, code) in enumerate(zip(x, codes, strict=True)):
            turn = codec.turn(self._turn, self._mixer.rows.start + k)
            wire.encode(row[: self._width], code[: self._split], turn)
            if rest:
                wire.encode(row[self._width :], code[self._split :], turn, self._flags or 0)
        return codes

    def _decoded(self, code: Tensor) -> Tensor:
        row = torch.empty(self._columns, dtype=torch.float32, device=code.device)
        self._wire.decode(code[: self._split], row[: self._width])
        if self._width < self._columns:
            self._wire.decode(code[self._split :], row[self._width :])
        return row.to(self._like.dtype)

    def own(self) -> Tensor:
        rows = torch.stack([self._decoded(code) for code in self._sent]) if self._coded else self._like
        return rows[:, : self._width]

    def lost(self) -> Tensor:
        return self._like[:, : self._width] - self.own()

    def depart(self, exchange: Exchange, tag: Tag) -> None:
        self._flight, self._places = self._start(exchange, tag, "step"), exchange.living

    def mean(self) -> Tensor:
        mixer, exchange = self._mixer, self._mixer.exchange
        if exchange is None:
            return self._decoded(self._here(self._sent)) if self._coded else _mean(self._like)
        what = "all-reduce"

        def start() -> Operation:
            flight, self._flight = self._flight, None
            if flight is not None and flight.link is exchange.link and self._places == exchange.living:
                return flight
            return self._start(exchange, exchange.collective_tag(what), what)

        mixer.agrees = exchange.complete(start, what, acknowledged=True)
        if mixer.agrees:
            return self._decoded(self._out[0]) if self._coded else self._out[0]
        rows = exchange.reachable(self._sent.flatten(), what).reshape(-1, self._sent.shape[1])
        return self._decoded(self._here(rows)) if self._coded else _mean(rows)

    def _here(self, codes: Tensor) -> Tensor:
        out = torch.empty_like(codes[0])
        mean_of_codes(codes, len(codes), out, self._turn, wire=self._wire, flags=self._flags)
        return out

    def _start(self, exchange: Exchange, tag: Tag, what: str) -> Operation:
        unit, size = self._wire.unit if self._coded else 1, exchange.size
        first = exchange.owned(self._sent.shape[1], range(size), unit).start // unit
        self._out = torch.empty_like(self._sent)  # anew, in case what was lost still comes

        def apply(x: Tensor, y: Tensor) -> None:
            if not self._coded:
                torch.mean(x, dim=0, out=y[0])
            else:
                mean_of_codes(x, len(x), y[0], self._turn, first, self._wire, self._flags)

        return exchange.slices(self._sent, self._out, range(size), apply, tag, what=what, unit=unit, alike=True)


def _mean(rows: Tensor) -> Tensor:
    return rows.mean(dim=0)


def _with(vector: Vector, plus: Vector | None) -> list[Tensor]:
    """The rows with their flags, and ``plus``."""
    if plus is None:
        return vector.flagged
    made = [x.clone() for x in vector.flagged]
    for x, width, more in zip(made, vector.widths, plus.tensors, strict=True):
        x[:, :width].add_(more)
    return made
