"""Ctrl-C, and processes that end with their parent: Linux has all of it, macOS and Windows a part."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
from collections.abc import Callable, Iterator
from typing import Any


@contextlib.contextmanager
def ctrl_c_waits() -> Iterator[None]:
    """It is for this process alone to handle: workers start with it blocked, and one that comes meanwhile waits for us."""
    mask = getattr(signal, "pthread_sigmask", None)  # not on Windows
    if mask is not None:
        mask(signal.SIG_BLOCK, {signal.SIGINT})
    yield
    if mask is not None:
        mask(signal.SIG_UNBLOCK, {signal.SIGINT})


def die_with(parent: int) -> None:
    """If the parent is killed, so is this worker: its results would not be written down. (Linux; elsewhere it ends at its next cell.)"""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        if os.getppid() != parent:
            os._exit(1)


@contextlib.contextmanager
def interruptible() -> Iterator[Callable[[], bool]]:
    """The first Ctrl-C lets the current steps finish and saves; the second one ends at once."""
    hit = False

    def handle(number: int, frame: Any) -> None:
        nonlocal hit
        if hit:
            raise KeyboardInterrupt
        hit = True

    try:
        before = signal.signal(signal.SIGINT, handle)
    except ValueError:  # not in the main thread: no signals here
        yield lambda: False
        return
    try:
        yield lambda: hit
    finally:
        signal.signal(signal.SIGINT, before)
