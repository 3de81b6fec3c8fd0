"""Rows between processes. The only place that talks to the network, in two verbs:

- **edges**: one row (or a few) to each neighbour and one from each. Nobody else waits.
- **slices**: each member owns some columns; everyone sends it those columns of its rows, it applies a Round to them and sends
  the rows back. 2(m-1)/m rows for *any* Round over m workers; everyone waits for everyone, as in an all-reduce.

Both are started, run while the process computes, and are waited for: a :class:`Flight`. Rows go in chunks (a large message both
ways between the same two gloo ranks would run half-duplex), straight out of the tensor that holds them.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import queue
import re
import sys
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gossamer.errors import GossamerError
from gossamer.links import Link, Message, Tag

_LOOK = 2.0  # seconds of waiting after which we say so, and look what the other one is doing
_WARN = 30.0  # seconds of waiting after which the user is told

Works = list[tuple[int, Any]]
Stage = Callable[[], Works]


@dataclass
class Traffic:
    """Counted since the start: bytes, and seconds. ``exposed``: the process stood still for it; ``transfer``: from the start
    of each flight to its last byte."""

    sent: int = 0
    received: int = 0
    exposed: float = 0.0
    transfer: float = 0.0
    flights: int = 0

    @property
    def hidden(self) -> float:
        """The share of the transfer time during which the process computed."""
        return 1 - self.exposed / self.transfer if self.transfer else 1.0


class Between(NamedTuple):
    """See :meth:`Exchange.slices`."""

    prepare: Callable[[Tensor], object]
    outgoing: list[tuple[int, Tensor]]
    incoming: list[tuple[int, Tensor]]


class Flight:
    """Rows on their way. ``wait()`` before what was sent is changed, and before what was received is read."""

    def __init__(self, exchange: Exchange, what: str, tag: Tag) -> None:
        self.exchange, self.what, self.tag = exchange, what, tag
        self.done = threading.Event()
        self.error: BaseException | None = None
        self.peer = -1  # whom we are waiting for
        self.work: Any = None  # and for what
        self.began = time.perf_counter()
        self.ended = 0.0
        self.event: Any = None  # on a GPU: what the stream waits for
        self.stages: list[Stage] = []
        self.kept: list[Message] = []  # tensors that must live until all is done
        self.submitted = False
        self.counted = False

    def run(self) -> None:
        """In the communication thread."""
        try:
            for stage in self.stages:
                for peer, work in reversed(stage()):  # the last one first: the others are there by then, one wake-up for all
                    self.peer, self.work = peer, work
                    work.wait()
        except Exception as error:
            self.peer = getattr(error, "peer", self.peer)
            self.error = error
        self.work = None
        self.ended = time.perf_counter()
        self.done.set()

    def wait(self) -> None:
        began = time.perf_counter()
        if not self.submitted:
            self.exchange.submit(self)
        if self.event is not None:
            torch.cuda.current_stream().wait_event(self.event)
        elif not self.done.is_set():
            self._wait(began)
        if self.error is not None:
            raise self.failure(str(self.error).strip().splitlines()[0]) from None
        if not self.counted:
            self.counted = True
            traffic = self.exchange.traffic
            traffic.exposed += time.perf_counter() - began
            traffic.transfer += self.ended - self.began
            traffic.flights += 1

    def _wait(self, began: float) -> None:
        link, said, warned = self.exchange.link, False, False
        while not self.done.wait(_LOOK if not said else 1.0):
            waited = time.perf_counter() - began
            if self.peer < 0 and (ahead := self.exchange._current) is not None:
                self.peer = ahead.peer  # not begun: it waits for what was started before it, and so for that one's peer
            link.say({"in": self.what, "number": self.tag.number, "for": self.peer})
            said = True
            other = link.heard(self.peer)
            if other.get("for") == link.rank and other.get("in") != self.what:
                raise self.failure(
                    f"they wait for each other: rank {self.peer} is {_where(other)}. "
                    "Everything that all workers take part in (step, consensus, mean) must be called by all, in the same order"
                )
            doing = f"it is {_where(other)} and waits for rank {other['for']}" if other else "nothing is known of it"
            if waited >= link.timeout:
                raise self.failure(f"nothing came within {link.timeout:g} s; {doing}")
            if waited >= _WARN and not warned:
                warned = True
                warnings.warn(
                    f"rank {link.rank} has waited {waited:.0f} s for rank {self.peer} {self._where()}; {doing}", stacklevel=3
                )
        if said:
            link.say({})

    def failure(self, reason: str) -> GossamerError:
        self.exchange.failed = True
        reason = re.sub(r"^\[\S+\] |\. This is typically.*", "", reason)  # gloo's source line and its advice
        return GossamerError(f"rank {self.exchange.link.rank} lost rank {self.peer} {self._where()}: {reason}")

    def _where(self) -> str:
        return _where({"in": self.what, "number": self.tag.number})


def _where(status: dict[str, Any]) -> str:
    return f"at step {status['number']}" if status["in"] == "step" else f"in {status['in']} (collective {status['number']})"


class Exchange:
    """``chunk``: bytes per message at most."""

    def __init__(self, link: Link, chunk: int = 1 << 20) -> None:
        self.link, self.chunk = link, chunk
        self.living: tuple[int, ...] = tuple(range(link.size))  # those of the link's ranks that take part, in order
        self.traffic = Traffic()
        self.collectives = 0
        self._parts: dict[bool, tuple[Tag, dict[tuple[int, bool], int]]] = {}
        self._jobs: queue.SimpleQueue[Flight | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._current: Flight | None = None
        self._departures: list[Flight] = []  # sent from a copy; perhaps not yet taken
        self.failed = False  # somebody was lost
        self._stream: Any = torch.cuda.Stream() if link.streams else None

    @property
    def rank(self) -> int:
        """My place among the living; all ranks that Exchange is given are such places."""
        return self.living.index(self.link.rank)

    @property
    def size(self) -> int:
        return len(self.living)

    def step_tag(self, step: int) -> Tag:
        return Tag(self.link.epoch, False, step)

    def collective_tag(self) -> Tag:
        """For something that all processes do together outside of a step, in the same order."""
        self.collectives += 1
        return Tag(self.link.epoch, True, self.collectives)

    # --- The two verbs ---------------------------------------------------------------------------------------------------

    def edges(
        self, outgoing: Sequence[tuple[int, Tensor]], incoming: Sequence[tuple[int, Tensor]], tag: Tag, what: str = "step"
    ) -> Flight:
        """Rows ``[count, D]`` (or one, ``[D]``) to and from peers."""
        return self._start(Flight(self, what, tag), self._messages(outgoing, tag, True), self._messages(incoming, tag, False))

    def edges_apart(
        self, outgoing: Sequence[tuple[int, Tensor]], incoming: Sequence[tuple[int, Tensor]], tag: Tag
    ) -> tuple[Flight, Flight]:
        """As :meth:`edges`, but what leaves and what arrives are waited for apart: a slow receiver does not hold us."""
        out, into = self._messages(outgoing, tag, True), self._messages(incoming, tag, False)
        arrivals = self._start(Flight(self, "step", tag), [], into)
        departures = self._start(Flight(self, "step", tag), out, [], later=True)
        self._departures = [flight for flight in self._departures if not flight.done.is_set()] + [departures]
        _open.add(self)
        return departures, arrivals

    def slices(
        self,
        rows: Tensor,
        out: Tensor,
        members: Sequence[int],
        apply: Callable[[Tensor, Tensor], object],
        tag: Tag,
        scratch: tuple[Tensor, Tensor] | None = None,
        what: str = "step",
        between: Between | None = None,
    ) -> Flight:
        """``out [r, D]`` <- my rows of ``apply`` over the rows of all members. ``apply(x, y)`` fills y from x, both
        ``[members · r, some columns]``, rows in the order of members; ``scratch`` is room for them. ``between``: an exchange
        with others than the members before ``apply``, by edges, of what ``prepare(x)`` made."""
        r, width = rows.shape
        me = members.index(self.rank)
        owned = [columns(width, len(members), k) for k in range(len(members))]
        mine = owned[me]
        x, y = scratch or tuple(rows.new_empty(2, len(members) * r, self.owned(width, members)))
        others = [(k, peer) for k, peer in enumerate(members) if k != me]
        place = {k: slice(k * r, (k + 1) * r) for k in range(len(members))}
        out_1 = self._messages([(peer, rows[:, owned[k]]) for k, peer in others], tag, True)
        in_1 = self._messages([(peer, x[place[k]]) for k, peer in others], tag, False)
        out_2 = self._messages([(peer, y[place[k]]) for k, peer in others], tag, True)
        in_2 = self._messages([(peer, out[:, owned[k]]) for k, peer in others], tag, False)
        self._count(out_2, in_2)
        kept = out_2 + in_2
        x[place[me]].copy_(rows[:, mine])

        def give_back() -> Works:
            if x.shape[1]:
                apply(x, y)
                out[:, mine].copy_(y[place[me]])
            return self.link.post(out_2, in_2)

        later: list[Stage] = [give_back]
        if between is not None:
            prepare = between.prepare
            out_b, in_b = self._messages(between.outgoing, tag, True), self._messages(between.incoming, tag, False)
            self._count(out_b, in_b)
            kept += out_b + in_b

            def meet() -> Works:
                prepare(x)
                return self.link.post(out_b, in_b)

            later.insert(0, meet)
        return self._start(Flight(self, what, tag), out_1, in_1, later, kept)

    def owned(self, width: int, members: Sequence[int]) -> int:
        """How many of the columns are mine."""
        mine = columns(width, len(members), members.index(self.rank))
        return mine.stop - mine.start

    # --- What all processes do together, outside of a step ----------------------------------------------------------------

    def gather(self, row: Tensor, what: str = "gather") -> Tensor:
        """Everyone's flat tensor of the same size, ``[size, …]``. For small ones."""
        everyone = row.new_empty(self.size, row.numel())
        everyone[self.rank] = row
        others = [q for q in range(self.size) if q != self.rank]
        tag = self.collective_tag()
        self.edges([(q, row) for q in others], [(q, everyone[q]) for q in others], tag, what).wait()
        return everyone

    def broadcast_(self, row: Tensor, what: str = "broadcast") -> None:
        """Everyone gets rank 0's values, along a binary tree."""
        tag = self.collective_tag()
        span = 1
        while span < self.size:
            peer = self.rank - span if self.rank >= span else self.rank + span
            if self.rank < span and peer < self.size:
                self.edges([(peer, row)], [], tag, what).wait()
            elif span <= self.rank < 2 * span:
                self.edges([], [(peer, row)], tag, what).wait()
            span *= 2

    def share(self, value: Any = None, what: str = "share") -> Any:
        """Everyone gets rank 0's value, anything that JSON can hold."""
        data = torch.tensor(list(json.dumps(value).encode()), dtype=torch.uint8)
        size = torch.tensor([len(data)])
        self.broadcast_(size, what)
        if self.rank:
            data = torch.empty(int(size), dtype=torch.uint8)
        self.broadcast_(data, what)
        return json.loads(bytes(data.tolist()))

    # --- Underneath ------------------------------------------------------------------------------------------------------

    def _messages(self, parcels: Sequence[tuple[int, Tensor]], tag: Tag, send: bool) -> list[Message]:
        """The rows in messages of at most ``chunk`` bytes. Both ends count the parts of a step in the same order."""
        current = self._parts.get(tag.collective)
        if current is None or current[0] != tag:
            current = self._parts[tag.collective] = (tag, {})
        numbers = current[1]
        messages: list[Message] = []
        for peer, rows in parcels:
            part = numbers.get((peer, send), 0)
            for row in _rows(rows):
                for piece in row.split(max(1, self.chunk // row.element_size())) if row.numel() else ():
                    messages.append(Message(self.living[peer], tag.part(part), piece))
                    part += 1
            numbers[peer, send] = part
        return messages

    def _start(
        self,
        flight: Flight,
        outgoing: list[Message],
        incoming: list[Message],
        then: Sequence[Stage] = (),
        more: Sequence[Message] = (),
        later: bool = False,
    ) -> Flight:
        """Post the messages at once; waiting, and what comes ``then``, is left to the communication thread. ``later``: it only
        starts to wait when someone waits for it."""
        flight.kept = [*outgoing, *incoming, *more]
        self._count(outgoing, incoming)
        if self._stream is not None:
            self._on_stream(flight, outgoing, incoming, then)
            return flight
        try:
            works = self.link.post(outgoing, incoming)
        except RuntimeError as error:
            flight.peer = getattr(error, "peer", flight.peer)
            raise flight.failure(str(error).strip().splitlines()[0]) from None
        flight.stages = [lambda: works, *then]
        if not works and not then:
            flight.submitted = True
            flight.ended = flight.began
            flight.done.set()
        elif not later:
            self.submit(flight)
        return flight

    def _count(self, outgoing: list[Message], incoming: list[Message]) -> None:
        self.traffic.sent += sum(m.tensor.nbytes for m in outgoing)
        self.traffic.received += sum(m.tensor.nbytes for m in incoming)

    def _on_stream(self, flight: Flight, outgoing: list[Message], incoming: list[Message], then: Sequence[Stage]) -> None:
        """On a GPU the stream waits, not the host, so nothing needs a thread."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for stage in (lambda: self.link.post(outgoing, incoming), *then):
                for _, work in stage():
                    work.wait()
        flight.event = self._stream.record_event()
        flight.submitted = True

    def submit(self, flight: Flight) -> None:
        flight.submitted = True
        if self._thread is None:
            # A daemon: a process must be able to end while it still waits for one that hangs.
            self._thread = threading.Thread(target=self._communicate, name="gossamer-exchange", daemon=True)
            self._thread.start()
            _open.add(self)
        self._jobs.put(flight)

    def _communicate(self) -> None:
        while (flight := self._jobs.get()) is not None:
            self._current = flight
            flight.run()
            self._current = None
            del flight  # and with it the tensors that it kept

    # --- The end of the process -------------------------------------------------------------------------------------------

    def close(self, orderly: bool) -> None:
        """``orderly``: what was sent from a copy is taken by its receivers first; they may be a step behind us.

        Then the communication thread ends. It must not be left in gloo's wait: woken there while the interpreter goes down, it
        can't get back into Python, and the whole process aborts.
        """
        for flight in self._departures if orderly and not self.failed else ():
            with contextlib.suppress(GossamerError):  # whoever is gone does not need it
                flight.wait()
        if self._thread is None:
            return
        self._jobs.put(None)
        deadline = time.monotonic() + 5
        while self._thread.is_alive() and time.monotonic() < deadline:
            current = self._current
            work = current.work if current else None
            if work is not None:
                with contextlib.suppress(RuntimeError):
                    work.wait(timedelta(milliseconds=1))  # expires, which closes all pairs and so wakes the thread
            self._thread.join(0.01)
        self._thread = None


_open: set[Exchange] = set()  # kept until the process ends: others may still be taking what these have sent


@atexit.register
def _close_all() -> None:
    orderly = not hasattr(sys, "last_value")  # set if an exception ends the process: then others are not waited for
    for exchange in list(_open):
        exchange.close(orderly)
    _open.clear()


def columns(width: int, members: int, k: int) -> slice:
    """The columns that the k-th member owns. In multiples of 16, so that they start on a line of the cache."""
    share = -(-width // members // 16) * 16 if width >= 16 * members else -(-width // members)
    return slice(min(k * share, width), min((k + 1) * share, width))


def _rows(rows: Tensor) -> Sequence[Tensor]:
    return rows.unbind(0) if rows.ndim == 2 else (rows,)
