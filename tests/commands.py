"""The command line: as a process, as a fork of this process, inside this one, or in several workers, as under torchrun."""

import gc
import io
import json
import os
import signal
import subprocess
import sys
import traceback
from contextlib import redirect_stderr, redirect_stdout
from multiprocessing import resource_tracker
from pathlib import Path

import pytest

from gossamer import cli

ROOT = Path(__file__).parent.parent


def gossamer(*arguments, **more):
    return subprocess.run(
        [sys.executable, "-m", "gossamer", *map(str, arguments)], capture_output=True, text=True, cwd=ROOT, timeout=200, **more
    )


def forked(work, *arguments, env=None, **more):
    """A process that calls ``work``. It has all that is imported here, so it begins at once; otherwise it is as any other.

    ``more``: for subprocess.Popen.
    """

    def be_it():
        code = 1
        try:
            signal.signal(signal.SIGPIPE, signal.SIG_IGN)  # as Python begins; Popen has undone it
            gc.freeze()  # what is of this process keeps its descriptors, which are others there
            os.closerange(3, os.sysconf("SC_OPEN_MAX"))  # Popen waits until one of them is closed
            sys.stdout, sys.stderr = (os.fdopen(stream, "w", 1, closefd=False) for stream in (1, 2))
            tracker = resource_tracker._resource_tracker
            tracker._fd = tracker._pid = None
            if env is not None:
                os.environ.clear()
                os.environ.update(env)
            work(*arguments)
            code = 0
        except SystemExit as end:
            code = end.code or 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    return subprocess.Popen(["true"], preexec_fn=be_it, cwd=ROOT, text=True, **more)


def in_fork(*arguments, **more):
    """``gossamer`` as a fork, for what needs a process of its own and its signals. Not on a store that is open here: SQLite's locks are of
    one process."""
    return forked(_main, list(map(str, arguments)), **more)


def _main(arguments):
    sys.argv = ["gossamer", *arguments]
    cli.main()


def inside(*arguments):
    """The same in this process: for what needs no process of its own, whose start takes seconds."""
    out, err = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
        patch.setattr(sys, "argv", ["gossamer", *map(str, arguments)])
        patch.setenv("COLUMNS", "200")
        try:
            cli.main()
            code = 0
        except SystemExit as end:
            code = end.code or 0
    return subprocess.CompletedProcess(arguments, code, out.getvalue(), err.getvalue())


def together(pool, size, folder, *arguments, **environment):
    """The same in each of so many workers of the pool: one answer for each rank."""
    pool.check(size, _in_worker, {"arguments": list(map(str, arguments)), "environment": environment}, folder)
    answers = (json.loads((folder / f"said-{rank}.json").read_text()) for rank in range(size))
    return [subprocess.CompletedProcess(arguments, *answer) for answer in answers]


def _in_worker(world, arguments, environment):
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        done = inside(*arguments)
    (world.folder / f"said-{world.rank}.json").write_text(json.dumps([done.returncode, done.stdout, done.stderr]))
