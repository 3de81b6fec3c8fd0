"""What ``gossamer launch`` and the workers that it starts tell each other: by environment variables and keys of the store."""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

ENDS = "gossamer/ends"  # how many processes have ended, by the launchers' word
LAUNCHERS = "gossamer/launchers"  # how many there are besides the first; and each one's signs of life
TICKETS = "gossamer/tickets"  # how many have been given out


def ended_key(ticket: int) -> str:
    return f"gossamer/ended/{ticket}"


def successor_key(ticket: int) -> str:
    """Where a process that was evicted and comes back says which ticket it has now."""
    return f"gossamer/successor/{ticket}"


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

    @property
    def joins(self) -> bool:
        """Started again, or later than the others."""
        return self.ticket >= self.size
