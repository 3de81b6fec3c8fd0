"""A cell's own file: what its run has brought so far. Only the process that runs the cell writes it, and only the bench that asked for it
takes what is in it into the store. So workers share a folder and no lock, and any file system will do.

The file is a row of frames: a length, and a checkpoint, which has a checksum. A frame is on disk before the next one begins; of one that
was cut off by a kill, or damaged, nothing is read, nor of what follows it.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, astuple, dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from gossamer.checkpoints import checkpoint
from gossamer.errors import GossamerError
from gossamer.rows.profile import Profile
from gossamer.schedules import Change
from gossamer.trainer import EpochRecord

FOLDER = "cells"
_LENGTH_BYTES = 8


@dataclass(frozen=True)
class Number:
    """What a method has noted of a step."""

    step: int
    name: str
    value: float | None  # None: not a number


@dataclass
class Rows:
    """What steps have brought. Steps that were repeated after a resume are there twice, and the same."""

    profiles: list[Profile] = field(default_factory=list)
    epochs: list[EpochRecord] = field(default_factory=list)
    changes: list[Change] = field(default_factory=list)
    numbers: list[Number] = field(default_factory=list)

    def extend(self, other: Rows) -> None:
        for mine, more in zip(vars(self).values(), vars(other).values(), strict=True):
            mine.extend(more)


@dataclass
class Record:
    """What a file says. ``begun``: machine, backend, threads, tensors. ``notes``: kind and text. ``result``: once the run is finished."""

    begun: dict[str, Any]
    rows: Rows = field(default_factory=Rows)
    notes: list[tuple[str, str]] = field(default_factory=list)
    processor_seconds: float = 0.0  # of the process that wrote it, lost steps included
    status: str = "running"
    message: str | None = None
    result: dict[str, float | int | None] = field(default_factory=dict)

    @property
    def finished(self) -> bool:
        return self.status != "running"


class RecordFile:
    """``store``: the identity of the store that it is for. A file of another one, left over in the same place, counts as none."""

    def __init__(self, path: Path, store: str) -> None:
        self.path, self.store = path, store
        self._end = 0  # of the last frame that is right
        self._counted = time.process_time()

    def read(self) -> Record | None:
        return self.parse(self.path.read_bytes()) if self.path.is_file() else None

    def parse(self, data: bytes) -> Record | None:
        record, self._end = None, 0
        for end, tensors, header in _frames(data):
            if header["kind"] == "begin":
                if header["store"] != self.store:
                    return None
                record = Record(header["begun"])
            elif record is None:
                return None
            elif header["kind"] == "note":
                record.notes.append((header["note"], header["reason"]))
            else:
                record.rows.extend(_rows(tensors, header))
                record.processor_seconds += header["processor_seconds"]
                if header["kind"] == "finish":
                    record.status, record.message, record.result = header["status"], header["message"], header["result"]
            self._end = end
        return record

    def begin(self, machine: dict[str, Any], backend: str, threads: int, tensors: Sequence[str]) -> None:
        """The run starts from its first step: nothing of an earlier try stays."""
        self._end = 0
        begun = {"machine": machine, "backend": backend, "threads": threads, "tensors": list(tensors)}
        self._append({"kind": "begin", "store": self.store, "begun": begun})

    def note(self, kind: str, reason: str) -> None:
        """An event that is no change of the graph."""
        self._append({"kind": "note", "note": kind, "reason": reason})

    def add(self, rows: Rows) -> None:
        self._append({"kind": "add"}, rows)

    def finish(self, status: str, message: str | None, result: dict[str, float | int | None], rows: Rows) -> None:
        """The last rows and the result in one frame: a run is finished whole or not at all."""
        self._append({"kind": "finish", "status": status, "message": message, "result": result}, rows)

    def _append(self, header: dict[str, Any], rows: Rows | None = None) -> None:
        tensors: dict[str, Tensor] = {}
        if rows is not None:
            tensors = {str(p.step): p.norms for p in rows.profiles}
            before, self._counted = self._counted, time.process_time()
            header |= {
                "processor_seconds": self._counted - before,
                "profiles": [[p.step, p.epoch, p.consensus_distance, p.bytes] for p in rows.profiles],
                "epochs": [asdict(epoch) for epoch in rows.epochs],
                "changes": [asdict(change) for change in rows.changes],
                "numbers": [astuple(number) for number in rows.numbers],
            }
        data = checkpoint.dumps(tensors, header)
        with _disk_errors(self.path), open(self.path, "r+b" if self._end else "wb") as file:
            file.seek(self._end)
            file.truncate()
            file.write(len(data).to_bytes(_LENGTH_BYTES, "little") + data)
            file.flush()
            os.fsync(file.fileno())
            if not self._end:
                checkpoint.sync(self.path.parent)
            self._end = file.tell()


def _frames(data: bytes) -> Iterator[tuple[int, dict[str, Tensor], dict[str, Any]]]:
    """Up to the first one that is not right: where it ends, and what is in it."""
    start = 0
    while start + _LENGTH_BYTES <= len(data):
        begin = start + _LENGTH_BYTES
        start = begin + int.from_bytes(data[begin - _LENGTH_BYTES : begin], "little")
        try:
            yield start, *checkpoint.loads(data[begin:start])
        except checkpoint.Unreadable:
            return


def _rows(tensors: dict[str, Tensor], header: dict[str, Any]) -> Rows:
    return Rows(
        [Profile(step, epoch, tensors[str(step)], far, sent) for step, epoch, far, sent in header["profiles"]],
        [EpochRecord(**epoch) for epoch in header["epochs"]],
        [Change(**change) for change in header["changes"]],
        [Number(*number) for number in header["numbers"]],
    )


@contextlib.contextmanager
def _disk_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise GossamerError(
            f"{path} can't be written: {error.strerror}; finished runs are kept, free some space and run the same command again"
        ) from None
