"""What a person sees of transfers: names in ``torch.profiler``, and a trace of which worker waited for which, for Chrome or Perfetto."""

from __future__ import annotations

import contextlib
import json
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from gossamer.transport.operation import Operation

_NOTHING = contextlib.nullcontext()
_LIMIT = 100_000  # operations that a trace keeps: some 100 MB as a file
_WAITS, _TRANSFERS = 1, 2  # the two lines of a worker


def span(name: str, more: str = "") -> contextlib.AbstractContextManager[Any]:
    """A name in torch.profiler for as long as the block lasts. Without a profiler it costs a call."""
    return torch.autograd.profiler.record_function(name, more) if torch.autograd._profiler_enabled() else _NOTHING


class Trace:
    """The transfers of one worker, and how long it stood still for which other one. ``rank``: its name."""

    def __init__(self, rank: int) -> None:
        self.rank, self.events, self.left_out = rank, list[dict[str, Any]](), 0
        self._count = 0
        self._zero = time.time() - time.perf_counter()  # hosts have their clocks alone in common

    def add(self, operation: Operation, began: float) -> None:
        """An operation has ended. ``began``: when the worker started to stand still for it."""
        if self._count == _LIMIT:
            self.left_out += 1
            return
        self._count += 1
        end, names, number = time.perf_counter(), operation.link.names, operation.tag.number
        what = f"{operation.what} {number}"
        loads = {way: {str(names[peer]): size for peer, size in bytes_.items()} for way, bytes_ in operation.loads.items()}
        transfer = {"cat": "transfer", "name": what, "id": self._count, "tid": _TRANSFERS}
        self._event(
            operation.began, ph="b", args={"step" if operation.what == "step" else "collective": number} | loads, **transfer
        )
        self._event(operation.ended or end, ph="e", **transfer)
        self._event(began, ph="X", cat="wait", name=what, tid=_WAITS, dur=_us(end - began), args={})
        for peer, since, until in operation.blocked:
            start, stop = max(since, began), min(until, end)
            if stop > start:
                who = {"for": names[peer], "in": operation.what, "number": number}
                name = f"wait for rank {names[peer]}"
                self._event(start, ph="X", cat="wait", name=name, tid=_WAITS, dur=_us(stop - start), args=who)

    def _event(self, seconds: float, **more: Any) -> None:
        self.events.append({"pid": self.rank, "ts": _us(seconds + self._zero), **more})

    def write(self, folder: Path) -> Path:
        """``rank-K.json``, in the format of Chrome's trace events."""
        names = [
            ("process_name", 0, f"rank {self.rank}"),
            ("thread_name", _WAITS, "waits"),
            ("thread_name", _TRANSFERS, "transfers"),
        ]
        head = [{"ph": "M", "pid": self.rank, "tid": tid, "name": kind, "args": {"name": name}} for kind, tid, name in names]
        path, rank = folder / f"rank-{self.rank}.json", {"rank": self.rank, "left_out": self.left_out}
        folder.mkdir(parents=True, exist_ok=True)
        new = path.with_suffix(".new")
        new.write_text(
            json.dumps({"traceEvents": head + self.events, "displayTimeUnit": "ms", "gossamer": rank}), encoding="utf-8"
        )
        os.replace(new, path)
        return path


def _us(seconds: float) -> float:
    return round(seconds * 1e6, 1)
