"""A checkpoint that a thread writes from a copy, while training goes on."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from gossamer.errors import GossamerError

_IDLE_PRIORITY = 19  # as nice has it


class Writer:
    """One file at a time. Its thread is no daemon: a process that ends, or is interrupted by Ctrl-C, finishes its file."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._problem: GossamerError | None = None
        self._copies: dict[str, Tensor] = {}  # kept from one save to the next: fresh memory would take longer than copying

    def copy(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """In the memory of the copy before, if nothing is being written."""
        assert self._thread is None
        for key, tensor in tensors.items():
            before = self._copies.get(key)
            if before is None or before.shape != tensor.shape or before.dtype != tensor.dtype:
                self._copies[key] = torch.empty(tensor.shape, dtype=tensor.dtype)
            self._copies[key].copy_(tensor.detach())
        self._copies = {key: self._copies[key] for key in tensors}
        return self._copies

    def start(self, write: Callable[[], object]) -> None:
        def work() -> None:
            if sys.platform == "linux":  # there a thread has a priority of its own
                with contextlib.suppress(OSError):
                    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _IDLE_PRIORITY)
            try:
                write()
            except GossamerError as error:
                self._problem = error
            except Exception as error:
                self._problem = GossamerError(f"a checkpoint in the background can't be written: {error}")
            if self._problem is not None:
                print(f"gossamer: {self._problem}", flush=True)

        self._thread = threading.Thread(target=work, name="gossamer checkpoint")
        self._thread.start()

    def finish(self) -> GossamerError | None:
        """Wait for what is being written. Returns what went wrong, once."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        problem, self._problem = self._problem, None
        return problem
