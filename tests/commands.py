"""The command line: as a process, or inside this one."""

import io
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest

from gossamer import cli

ROOT = Path(__file__).parent.parent


def gossamer(*arguments, **more):
    return subprocess.run(
        [sys.executable, "-m", "gossamer", *map(str, arguments)], capture_output=True, text=True, cwd=ROOT, timeout=200, **more
    )


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
