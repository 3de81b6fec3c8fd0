"""One process at a time writes to a folder. The lock goes with the process that holds it, however it ends."""

from __future__ import annotations

import contextlib
from typing import IO, Any

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

_FAR = 1 << 40  # Windows locks bytes, which no other process can read then: one that no content reaches


def lock(file: IO[Any]) -> bool:
    """Takes the lock of an open file, or says that another process has it."""
    with contextlib.suppress(BlockingIOError, PermissionError):
        if fcntl is not None:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        else:
            _lock_byte(file)
        return True
    return False


def _lock_byte(file: IO[Any]) -> None:
    msvcrt: Any = __import__("msvcrt")
    here = file.tell()
    file.seek(_FAR)
    try:
        msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
    finally:
        file.seek(here)
