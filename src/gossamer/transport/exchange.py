"""Rows between processes. The only place that talks to the network, in two verbs:

- **edges**: one row (or a few) to each neighbour and one from each. No other worker waits.
- **slices**: each member owns some columns; all workers send it those columns of its rows, it applies a Round to them and sends
  the rows back. 2(m-1)/m rows for *any* Round over m workers; all wait for all, as in an all-reduce.

Both are started, run while the process computes, and are waited for: a :class:`Operation`. Rows go in chunks (a large message both
ways between the same two gloo ranks would run half-duplex), straight out of the tensor that holds them.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import math
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gossamer.errors import GossamerError
from gossamer.transport import waiting
from gossamer.transport.link import Link, Message, Tag, Works
from gossamer.transport.operation import Guard, Operation, Stage, Traffic, Waiter, first_line
from gossamer.transport.routes import columns
from gossamer.transport.spans import Trace

_KINDS = {"mean()": 1, "consensus()": 2, "average_()": 3, "save()": 4, "load()": 5, "profile": 6, "uneven()": 7}
_LATER = 64  # collectives of a link before its epoch begins are counted from 0, those after from here: newcomers know nothing of the first
_BLIND = 8  # marks messages of when no worker knows which take part; there are no further epochs then

Parcels = Sequence[tuple[int, Tensor]]  # a peer, and rows ``[count, D]`` (or one, ``[D]``) to or from it
Messages = tuple[list[Message], list[Message]]  # to send, and to receive


class Between(NamedTuple):
    """See :meth:`Exchange.slices`."""

    prepare: Callable[[Tensor], object]
    outgoing: Parcels
    incoming: Parcels


class Exchange:
    """``chunk``: bytes per message at most."""

    def __init__(self, link: Link, chunk: int = 4 << 20) -> None:
        self.link, self.chunk = link, chunk
        self.living: tuple[int, ...] = tuple(range(link.size))  # those of the link's ranks that take part, in order
        self.traffic = Traffic()
        self.trace: Trace | None = None
        self.collectives = 0
        self._early: dict[int, int] = {}  # the same, of epochs that have not begun
        self._calls = 0  # the same, but for those that were done again
        self._parts: dict[bool, tuple[Tag, dict[tuple[int, bool], int]]] = {}
        # Two, so that steps and collectives do not wait for each other: workers may call mean() at different points of a step.
        self._waiters = {False: Waiter("steps"), True: Waiter("collectives")}
        self._departures: list[Operation] = []  # sent from a copy; perhaps not yet taken
        self.failed = False  # a peer was lost
        self.guard: Guard | None = None  # with one, losing a peer is no error; see operation.py
        self.limbo: list[Operation] = []  # given up; gloo may still write to their tensors
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

    def collective_tag(self, what: str = "") -> Tag:
        """For something that all processes do together outside of a step, in the same order."""
        self.collectives += 1
        return Tag(self.link.epoch, True, self.collectives, _KINDS.get(what, 0))

    # --- The two verbs ---------------------------------------------------------------------------------------------------

    def edges(self, outgoing: Parcels, incoming: Parcels, tag: Tag, what: str = "step", later: bool = False) -> Operation:
        """Rows to and from peers. ``later``: see :meth:`_start`."""
        operation = Operation(self, what, tag)
        return self._start(operation, self._messages(operation, outgoing, incoming), later=later)

    def edges_apart(self, outgoing: Parcels, incoming: Parcels, tag: Tag) -> tuple[Operation, Operation]:
        """As :meth:`edges`, but what leaves and what arrives are waited for apart: a slow receiver does not hold us."""
        arrivals, departures = self.edges([], incoming, tag), self.edges(outgoing, [], tag, later=True)
        self._departures = [operation for operation in self._departures if not operation.done.is_set()] + [departures]
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
        unit: int = 1,
        alike: bool = False,
    ) -> Operation:
        """``out [r, D]`` <- my rows of ``apply`` over the rows of all members. ``apply(x, y)`` fills y from x, both
        ``[members · r, some columns]``, rows in the order of members; ``scratch`` is room for them. ``between``: an exchange
        with others than the members before ``apply``, by edges, of what ``prepare(x)`` made. ``unit``: columns that must stay together.
        ``alike``: all members get the same, so y is ``[r, some columns]``."""
        r, width = rows.shape
        me = members.index(self.rank)
        owned = [columns(width, len(members), k, unit) for k in range(len(members))]
        mine = owned[me]
        # With an exchange between others and others, all depend on all.
        operation = Operation(
            self, what, tag, frozenset(self.living[q] for q in (members if between is None else range(self.size)))
        )
        place = {k: slice(k * r, (k + 1) * r) for k in range(len(members))}
        made = dict.fromkeys(place, slice(0, r)) if alike else place
        x, y = scratch or (rows.new_empty(places[len(members) - 1].stop, mine.stop - mine.start) for places in (place, made))
        others = [(k, peer) for k, peer in enumerate(members) if k != me]
        to_owners = self._messages(
            operation, [(peer, rows[:, owned[k]]) for k, peer in others], [(peer, x[place[k]]) for k, peer in others]
        )
        back = self._messages(
            operation, [(peer, y[made[k]]) for k, peer in others], [(peer, out[:, owned[k]]) for k, peer in others]
        )
        x[place[me]].copy_(rows[:, mine])

        def give_back() -> Works:
            if x.shape[1]:
                apply(x, y)
                out[:, mine].copy_(y[made[me]])
            return self._post(operation, back)

        later: list[Stage] = [give_back]
        if between is not None:
            prepare, elsewhere = between.prepare, self._messages(operation, between.outgoing, between.incoming)

            def meet() -> Works:
                prepare(x)
                return self._post(operation, elsewhere)

            later.insert(0, meet)
        return self._start(operation, to_owners, later)

    def owned(self, width: int, members: Sequence[int], unit: int = 1) -> slice:
        """The columns that are mine."""
        return columns(width, len(members), members.index(self.rank), unit)

    # --- What all processes do together, outside of a step ----------------------------------------------------------------

    @torch.inference_mode(False)  # a thread writes to what is made here, and it is in no inference mode
    @torch.no_grad()
    def gather(self, row: Tensor, what: str = "gather") -> Tensor:
        """All workers' flat tensors of the same size, ``[size, …]``. For small ones."""
        everyone = row.new_empty(0)

        def start() -> Operation:
            nonlocal everyone
            everyone = poisoned(row, self.size)
            everyone[self.rank] = row
            return self._to_all(row, everyone, what)

        return everyone if self.complete(start, what) else self.reachable(row, what)

    def _to_all(self, row: Tensor, everyone: Tensor, what: str) -> Operation:
        others = [q for q in range(self.size) if q != self.rank]
        return self.edges([(q, row) for q in others], [(q, everyone[q]) for q in others], self.collective_tag(what), what)

    def complete(
        self,
        start: Callable[[], Operation],
        what: str,
        sound: Callable[[], bool] | None = None,
        acknowledged: bool = False,
    ) -> bool:
        """A collective. With a guard, all members that live have it in the end, or it is an error: if one is lost, ``start`` is called
        again, with fewer ``living``, and perhaps on another link. False if no worker can say any more who lives: then it is for
        :meth:`reachable`. ``sound``: with a guard, whether the result is of use; the worker that spoils it must leave.
        ``acknowledged``: for what comes in each step; with a guard, workers tell each other that they have it, and ask the store only
        if they do not."""
        guard = self.guard
        self._calls += 1
        if guard is None or self.link.alone:
            start().wait()
            return True
        home = self.link, self.living, self.collectives
        stands = False

        def fly(link: Link, places: tuple[int, ...]) -> int:
            nonlocal stands
            if link is not self.link:  # of an epoch that begins later
                self.collectives = self._early.get(link.epoch, 0)
            self.link, self.living = link, places
            operation = start()
            operation.wait()
            whole = not operation.lost.intersection(places) and (sound is None or sound())
            stands, everywhere = self._acknowledged(whole, what) if acknowledged else (False, False)
            if link is not home[0]:
                self._early[link.epoch] = self.collectives
            return whole + everywhere

        try:
            return guard.complete(what, home[0].timeout, fly, acknowledged) or stands
        finally:
            if self.link is home[0]:
                home = (*home[:2], self.collectives)
            self.link, self.living, self.collectives = home

    def _acknowledged(self, whole: bool, what: str) -> tuple[bool, bool]:
        """All workers tell all others whether it came. Returns two things: whether it came to all workers that still say something, and
        whether it came everywhere. In the first case it stands without the store, too: none of them has heard anything else."""
        came = torch.zeros(self.size, 1, dtype=torch.uint8)
        came[self.rank] = whole
        operation = self._to_all(came[self.rank], came, what)
        if not whole:
            return False, False  # others may be a collective behind, and wait for this worker's vote: they are not waited for
        operation.wait()
        heard = [place not in operation.lost for place in self.living]
        stands = bool(came[heard].all())
        return stands, stands and all(heard)

    def reachable(self, row: Tensor, what: str) -> Tensor:
        """The rows of the workers that this one can reach, its own among them, ``[some, …]`` in the order of ranks. For when the
        members can't agree any more: no row depends on which others take part, so what comes is right; but two workers may have
        heard different ones."""
        assert self.guard is not None
        link, lost = self.link, self.guard.losses(self.link).gone
        here = [peer for peer, q in enumerate(self.living) if q not in lost or peer == self.rank]
        rows = poisoned(row, len(here))
        rows[here.index(self.rank)] = row
        others = [(k, peer) for k, peer in enumerate(here) if peer != self.rank]
        tag = Tag(link.epoch + _BLIND, True, self._calls)
        operation = self.edges([(peer, row) for _, peer in others], [(peer, rows[k]) for k, peer in others], tag, what)
        operation.wait()
        return rows[[k for k, peer in enumerate(here) if self.living[peer] not in operation.lost]]

    def broadcast_(self, row: Tensor, what: str = "broadcast") -> None:
        """All workers get rank 0's values, along a binary tree."""
        tag = self.collective_tag(what)
        span = 1
        while span < self.size:
            peer = self.rank - span if self.rank >= span else self.rank + span
            if self.rank < span and peer < self.size:
                self.edges([(peer, row)], [], tag, what).wait()
            elif span <= self.rank < 2 * span:
                self.edges([], [(peer, row)], tag, what).wait()
            span *= 2

    def share(self, value: Any = None, what: str = "share") -> Any:
        """All workers get rank 0's value, anything that JSON can hold."""
        data = torch.tensor(list(json.dumps(value).encode()), dtype=torch.uint8)
        size = torch.tensor([len(data)])
        self.broadcast_(size, what)
        if self.rank:
            data = torch.empty(int(size), dtype=torch.uint8)
        self.broadcast_(data, what)
        return json.loads(bytes(data.tolist()))

    # --- Underneath ------------------------------------------------------------------------------------------------------

    def _messages(self, operation: Operation, outgoing: Parcels, incoming: Parcels) -> Messages:
        """The rows in messages of at most ``chunk`` bytes. Both ends count the parts of a step in the same order."""
        tag = operation.tag
        current = self._parts.get(tag.collective)
        if current is None or current[0] != tag:
            current = self._parts[tag.collective] = (tag, {})
        numbers = current[1]
        sent: list[Message] = []
        received: list[Message] = []
        for send, made, parcels in ((True, sent, outgoing), (False, received, incoming)):
            for peer, rows in parcels:
                part = numbers.get((peer, send), 0)
                for row in rows.unbind(0) if rows.ndim == 2 else (rows,):
                    for piece in row.split(max(1, self.chunk // row.element_size())) if row.numel() else ():
                        made.append(Message(self.living[peer], tag.part(part), piece))
                        part += 1
                numbers[peer, send] = part
            operation.kept += made
        if self.trace is not None:
            operation.load(sent, received)
        self.traffic.sent += sum(m.tensor.nbytes for m in sent)
        self.traffic.received += sum(m.tensor.nbytes for m in received)
        return sent, received

    def _start(self, operation: Operation, messages: Messages, then: Sequence[Stage] = (), later: bool = False) -> Operation:
        """Post the messages at once; waiting, and what comes ``then``, is left to a thread (see ``operation.py``). ``later``: it only
        starts to wait when someone waits for it."""
        if self._stream is not None:
            self._on_stream(operation, messages, then)
            return operation
        losses = waiting.NONE if self.guard is None else self.guard.losses(operation.link)
        if losses is not waiting.NONE:  # in nearly every step nothing is lost
            given_up = waiting.at_start(operation.essential, operation.peers, losses)
            operation.lost |= given_up.lost
            if given_up.in_vain:
                operation.submitted = True
                operation.land()
                return operation
        try:
            works = self._post(operation, messages)
        except RuntimeError as error:
            operation.peer = getattr(error, "peer", operation.peer)
            raise operation.failure(first_line(error)) from None
        operation.stages.extend([lambda: works, *then])
        if not works and not then:
            operation.submitted = True
            operation.ended = operation.began
            operation.done.set()
        elif not later:
            self.submit(operation)
        return operation

    def _post(self, operation: Operation, messages: Messages) -> Works:
        if self.guard is None:
            return operation.link.post(*messages)
        before = set(operation.lost)
        works = operation.link.post(*messages, operation.lost)
        for peer in operation.lost - before:
            self.guard.lose(operation.link, peer, "the connection is closed")
        return works

    def _on_stream(self, operation: Operation, messages: Messages, then: Sequence[Stage]) -> None:
        """On a GPU the stream waits, not the host, so nothing needs a thread."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for stage in (lambda: self.link.post(*messages), *then):
                for _, work in stage():
                    work.wait()
        operation.event = self._stream.record_event()
        operation.submitted = True

    def submit(self, operation: Operation) -> None:
        operation.submitted = True
        operation.waiter = self._waiters[operation.tag.collective]
        operation.waiter.take(operation)
        _open.add(self)

    # --- The end of the process -------------------------------------------------------------------------------------------

    def close(self, orderly: bool) -> None:
        """``orderly``: what was sent from a copy is taken by its receivers first; they may be a step behind us.

        Then the threads that wait end. They must not be left in gloo's wait: woken there while the interpreter goes down, they
        can't get back into Python, and the whole process aborts.
        """
        _open.discard(self)
        for operation in self._departures if orderly and not self.failed else ():
            with contextlib.suppress(GossamerError):  # a receiver that is gone does not need it
                operation.wait()
        for operation in self.limbo:
            operation.link.close()
        for waiter in self._waiters.values():
            waiter.end()
        if self.guard is not None:
            self.guard.close(orderly)

    def drop(self) -> None:
        """Its model is gone, or closed: give back threads, descriptors and memory, now and not when the process ends."""
        if all(operation.done.is_set() for operation in self._departures):
            self.close(orderly=True)
            self.link.discard()
            self._departures, self.limbo, self._parts = [], [], {}

    def guarded(self, guard: Guard) -> None:
        """From now on ``guard`` watches over the members; it is told when the process ends."""
        self.guard = guard
        _open.add(self)

    def change(self, link: Link, living: tuple[int, ...]) -> None:
        """The next epoch: another group, or other places of this one. Nothing is on its way."""
        self.living = living
        if link is self.link:
            return
        self.link, self.collectives = link, _LATER
        self._early = {}
        self._departures = []
        self.limbo = [operation for operation in self.limbo if not operation.link.closed]


_open: set[Exchange] = set()  # kept until the process ends: others may still be taking what these have sent


@atexit.register
def _close_all() -> None:
    orderly = not hasattr(sys, "last_value")  # set if an exception ends the process: then others are not waited for
    for exchange in list(_open):
        exchange.close(orderly)


def poisoned(row: Tensor, count: int) -> Tensor:
    """Room for so many rows, which no reader takes for values before it is filled."""
    lowest = math.nan if row.dtype.is_floating_point else torch.iinfo(row.dtype).min
    return row.new_full((count, row.numel()), lowest)
