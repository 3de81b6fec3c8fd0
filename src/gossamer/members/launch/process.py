"""One process that ``gossamer launch`` has started: its lines of output, its signals, its end."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence

from gossamer.errors import GossamerError

_LONGEST_LINE = 1 << 16
_PR_SET_PDEATHSIG = 1


class WorkerProcess:
    """``place``: which of this launcher's workers it is, from 0. ``trains``: it need not join, or has joined. ``code``: None as long as it
    runs."""

    def __init__(self, command: Sequence[str], env: dict[str, str], place: int, rank: int, ticket: int, trains: bool) -> None:
        self.place, self.rank, self.ticket, self.trains = place, rank, ticket, trains
        self.began = time.monotonic()
        self.code: int | None = None
        self._text = b""
        launcher = os.getpid()

        def die_with_launcher() -> None:
            if sys.platform != "linux":  # macOS has no such call: there workers outlive a launcher that is killed
                return
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != launcher:
                os._exit(1)

        try:
            self._process = subprocess.Popen(
                command,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C comes from the launcher, once
                preexec_fn=die_with_launcher,
            )
        except OSError as error:
            raise GossamerError(f"{command[0]} can't be started: {error.strerror}") from None
        assert self._process.stdout is not None
        self.pipe = self._process.stdout.fileno()
        os.set_blocking(self.pipe, False)

    @property
    def runs(self) -> bool:
        return self.code is None

    def ended(self) -> bool:
        """Whether it has ended since the last question."""
        if self.code is not None or self._process.poll() is None:
            return False
        self.code = self._process.returncode
        return True

    def read(self, last: bool = False) -> tuple[list[str], bool]:
        """Whole lines of output, and whether more can come. One piece at a time, unless it is the ``last``."""
        more = True
        while more:
            try:
                data = os.read(self.pipe, 1 << 16)
            except BlockingIOError:
                break
            more = bool(data)
            self._text += data
            if not last:
                break  # the other workers shall have their turn
        *lines, self._text = self._text.split(b"\n")
        if self._text and (last or len(self._text) > _LONGEST_LINE):
            lines.append(self._text)
            self._text = b""
        return [line.decode(errors="replace") for line in lines], more

    def send(self, which: int) -> None:
        """To the process and its children: a command may be a shell that runs the worker."""
        if self.runs:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, which)

    def kill_children(self) -> None:
        """Of a process that was asked to end, and has: a shell's job in the background hears no Ctrl-C."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def kill(self) -> None:
        if self.runs:
            self.send(signal.SIGKILL)
            self.code = self._process.wait()

    def describe_end(self) -> str:
        code = self.code or 0
        if code == 0:
            return "has finished"
        if code > 0:
            return f"ended with exit code {code}"
        try:
            return f"was killed by {signal.Signals(-code).name}"
        except ValueError:
            return f"was killed by signal {-code}"
