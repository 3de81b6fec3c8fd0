"""What ``gossamer launch`` and the workers that it starts tell each other: by environment variables and keys of the store.

A job may have several *generations*: if a worker dies before there is a training that it could join, all workers are started again. Each
generation has a store of its own, so no key of an earlier one is ever found: not ours, and not those of torch's own process group.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from gossamer.errors import GossamerError
from gossamer.transport.link import Alone, BatchLink, Link

# In the store of the job: what launchers tell each other.
LAUNCHERS = "gossamer/launchers"  # how many there are besides the first; with a launcher's number: its signs of life
GENERATION = "gossamer/generation"  # the number of the one that runs, or shall run
STORES = "gossamer/stores"  # with the number of a later generation: where its store listens

# In the store of a generation.
ALONE = "gossamer/alone"  # which worker trains without others, and from which step on
BEGAN = "gossamer/began"  # how many workers have begun to train
DIVERGED = "gossamer/diverged"  # set when the last worker has diverged: there is no state left to go on from
ENDS = "gossamer/ends"  # how many processes have ended, by the launchers' word
START_FAILED = "gossamer/start-failed"  # why the workers could not begin together
START_REFUSED = "gossamer/start-refused"  # set if another try would fail as well
TICKETS = "gossamer/tickets"  # how many have been given out

# In the store of a generation, with a worker's ticket.
ENDED = "gossamer/ended"  # how its process has ended, by its launcher's word
SUCCESSOR = "gossamer/successor"  # the ticket that it has now: it was evicted, and comes back
TRAINS = "gossamer/trains"  # set when it has begun to train: at the start, or after it has joined
WRAPPED = "gossamer/wrapped"  # set when it has begun to open a link to the others


@dataclass(frozen=True)
class Seat:
    """What ``gossamer launch`` gives to each process it starts."""

    host: str
    port: int
    ticket: int
    rank: int
    size: int  # workers at the start
    evict_after: float

    @staticmethod
    def taken() -> Seat | None:
        """Mine, if there is a launcher."""
        env = os.environ
        if "GOSSAMER_STORE" not in env:
            return None
        host, _, port = env["GOSSAMER_STORE"].rpartition(":")
        first = int(env["GOSSAMER_WORKERS"])
        return Seat(host, int(port), int(env["GOSSAMER_TICKET"]), int(env["RANK"]), first, float(env["GOSSAMER_EVICT_AFTER"]))

    def connect(self) -> Any:
        """A connection of one's own: a store's client does one thing at a time, and some of them wait."""
        return dist.TCPStore(self.host, self.port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=30))

    def connect_patiently(self) -> Any:
        """A connection for a thread that can wait: a store that is silent for a minute, because its host is, is not gone."""
        store = self.connect()
        store.set_timeout(timedelta(days=7))
        return store

    @property
    def joins(self) -> bool:
        """Started again, or later than the others."""
        return self.ticket >= self.size

    def announce_training(self) -> None:
        """From now on a worker that dies is left out, and can join again. The launcher starts that one alone, not the whole job."""
        with contextlib.suppress(RuntimeError):  # the store is gone; then no worker can be started again either
            store = self.connect()
            store.set(f"{TRAINS}/{self.ticket}", "1")
            store.add(BEGAN, 1)

    def announce_alone(self, step: int) -> None:
        """All other workers are gone. The launchers say so."""
        with contextlib.suppress(RuntimeError):
            self.connect().set(ALONE, f"rank {self.rank} trains alone from step {step} on")

    def announce_divergence(self, why: str) -> None:
        """No worker is left whose parameters are finite. The launchers start no worker again."""
        with contextlib.suppress(RuntimeError):
            self.connect().set(DIVERGED, why)


@dataclass(frozen=True)
class GivenSeat(Seat):
    """Of a worker that another launcher has started: the store is the one that its link was opened with."""

    store: Any

    def connect_patiently(self) -> Any:
        return self.store


class Start:
    """The time before training, when all workers need all others: what a worker reads about them, and says itself."""

    def __init__(self, seat: Seat, store: Any) -> None:
        self._size, self._store = seat.size, store

    def end(self) -> str:
        """The first rank that has ended, and how: "rank 1 was killed by SIGKILL". Empty if all run."""
        if not self._store.add(ENDS, 0):
            return ""
        for rank in range(self._size):
            if self._store.check([f"{ENDED}/{rank}"]):
                return f"rank {rank} {self._store.get(f'{ENDED}/{rank}').decode()}"
        return ""

    def failed(self, why: str, final: bool) -> None:
        """Training can't begin. ``final``: nor could it at another try. The launcher ends the workers that still run, or starts all
        again."""
        with contextlib.suppress(RuntimeError):
            if final:
                self._store.set(START_REFUSED, why)
            self._store.set(START_FAILED, why)


def open_link(device: torch.device, timeout: float = 300.0, joins: bool = False) -> Link | None:
    """The link of this process, or None if it is alone. ``torch.distributed`` must have been started, as for DDP, unless there is a
    launcher of ours. ``joins``: it may be one that joins a job that is running."""
    seat = Seat.taken()
    if seat is not None:
        own = seat.connect()
        own.set(f"{WRAPPED}/{seat.ticket}", "1")
    if seat is not None and seat.joins and not (joins and device.type == "cpu"):
        what = "it is on a GPU" if device.type != "cpu" else "only DecentralizedDataParallel can do that"
        raise GossamerError(f"rank {seat.rank} can't join a job that is running: {what}")
    if seat is not None and device.type == "cpu":  # NCCL has no connections that fail one by one
        return Alone(own, 0, 1, timeout) if seat.joins else Link(own, seat.rank, seat.size, timeout, start=Start(seat, own))
    if not dist.is_available() or not dist.is_initialized():
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            raise GossamerError(
                f"WORLD_SIZE is {os.environ['WORLD_SIZE']}, but torch.distributed is not started; "
                "call torch.distributed.init_process_group() first, as for DistributedDataParallel"
            )
        return None
    if dist.get_world_size() == 1:
        return None
    kind = BatchLink if device.type == "cuda" else Link
    store = dist.distributed_c10d._get_default_store()
    return kind(store, dist.get_rank(), dist.get_world_size(), timeout)
