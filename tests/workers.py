"""Starts real worker processes for the tests, as torchrun would, and collects what they print."""

import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent


@dataclass(frozen=True)
class Worker:
    code: int
    out: str
    err: str


def environment(p: int = 1) -> dict[str, str]:
    """What torchrun tells all of p workers of one host."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    return os.environ | {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(p),
        "LOCAL_WORLD_SIZE": str(p),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}",
    }


def seat(rank: int) -> dict[str, str]:
    """What torchrun tells one of them."""
    return {"RANK": str(rank), "LOCAL_RANK": str(rank)}


def start(
    p: int, command: Sequence[object], env: dict[str, str] | None = None, only: Sequence[int] | None = None
) -> list[subprocess.Popen]:
    """``command`` (after the interpreter) in p processes; ``only``: the ranks that are really started."""
    base = environment(p)
    return [
        subprocess.Popen(
            [sys.executable, *map(str, command)],
            env=base | seat(rank) | (env or {}),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )
        for rank in (range(p) if only is None else only)
    ]


def finish(processes: list[subprocess.Popen], timeout: float = 240) -> list[Worker]:
    """Wait for all; whoever is still there after ``timeout`` seconds is ended, and its code is not 0."""
    results = []
    try:
        for process in processes:
            out, err = process.communicate(timeout=timeout)
            results.append(Worker(process.returncode, out, err))
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.wait()
    return results


def run(
    p: int,
    command: Sequence[object],
    env: dict[str, str] | None = None,
    timeout: float = 240,
    only: Sequence[int] | None = None,
) -> list[Worker]:
    return finish(start(p, command, env, only), timeout)


def run_ok(p: int, command: Sequence[object], env: dict[str, str] | None = None, timeout: float = 240) -> list[Worker]:
    results = run(p, command, env, timeout)
    for rank, worker in enumerate(results):
        assert worker.code == 0, f"rank {rank} ended with {worker.code}\n{worker.out}\n{worker.err}"
    return results
