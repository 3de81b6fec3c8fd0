"""Ctrl-C, and processes that end with their parent."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

_LOOK = 0.5  # seconds between two looks at the parent


def block_ctrl_c() -> None:
    """In this thread, and in all processes that it starts."""
    mask = getattr(signal, "pthread_sigmask", None)  # not on Windows
    if mask is not None:
        mask(signal.SIG_BLOCK, {signal.SIGINT})


def end_with(parent: int) -> None:
    """If the parent is gone, so is this worker soon: its result would not be taken. (Not on Windows, where it ends after its cell.)"""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_LOOK)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


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
