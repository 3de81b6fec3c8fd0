"""DBench on engines, and with many cells.

python -m benchmarks.engines busy [local] [ray]
    200 cells of a second each on two cores: processor seconds of the cells / (2 × wall time)
python -m benchmarks.engines store
    a store of 1,000 cells: seconds to open, for results and for the report
python -m benchmarks.engines kills inline|local|ray|slurm [COUNT]
    the bench is killed at COUNT random moments and called again: the same results
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.dbench import large_store
from benchmarks.timing import console, verdict
from gossamer.dbench import report
from gossamer.dbench.results import results
from gossamer.dbench.store import FILE, Store

_SPEC = """
name = "many"
replicas = [4]
methods = {methods}
seeds = {seeds}
backend = "tape"
task = {{ name = "digits/mlp", epochs = {epochs}, batch = 8 }}
profile = {{ every = 20 }}
"""
_ENGINES = {
    "inline": ["--jobs", "1"],
    "local": ["--jobs", "2"],
    "ray": ["--on", "ray"],
    "slurm": ["--on", "slurm:cluster=local"],
}


def _spec(folder: Path, seeds: int, epochs: int) -> Path:
    path = folder / "many.toml"
    methods = ["centralized", "ring", "complete", "one-peer-exponential", "ada"]
    path.write_text(_SPEC.format(methods=json.dumps(methods), seeds=list(range(seeds)), epochs=epochs))
    return path


def _command(spec: Path, out: Path, engine: str) -> list[str]:
    return [sys.executable, "-m", "gossamer", "bench", str(spec), "--out", str(out), *_ENGINES[engine]]


def busy(engine: str) -> bool:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        spec, out = _spec(folder, seeds=40, epochs=8), folder / "out"
        began = time.perf_counter()
        subprocess.run([*_command(spec, out, engine), "--quiet"], check=True, stdout=subprocess.DEVNULL)
        wall = time.perf_counter() - began
        runs = Store(out / FILE).runs()
        seconds = sum(run.processor_seconds or 0 for run in runs)
        console.print(f"{engine}: {len(runs)} cells, {seconds / len(runs):.2f} processor seconds each, {wall:.1f} s in all")
        return verdict(f"{engine}: share of two cores that is busy with cells", seconds / (2 * wall), 0.85, at_most=False)


def store() -> bool:
    with tempfile.TemporaryDirectory() as name:
        out = large_store(Path(name), seeds=25)
        ways: dict[str, Callable[[], Any]] = {
            "opening": lambda: Store(out / FILE).runs(),
            "results": lambda: results(Store(out / FILE)),
            "the report": lambda: report.write(out),
        }
        met = []
        for what, run in ways.items():
            began = time.perf_counter()
            run()
            met.append(
                verdict(f"a store of {len(Store(out / FILE).runs())} cells, seconds for {what}", time.perf_counter() - began, 5)
            )
        return all(met)


def kills(engine: str, count: int) -> bool:
    """One bench after the other; each is killed once, at another moment."""
    chance, wrong = random.Random(7), 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        spec = _spec(folder, seeds=1, epochs=6)
        subprocess.run([*_command(spec, folder / "whole", "inline"), "--quiet"], check=True, stdout=subprocess.DEVNULL)
        whole = _plain(folder / "whole")
        killed = 0
        for k in range(count):
            out = folder / f"out-{k}"
            command = [*_command(spec, out, engine), "--checkpoint-seconds", "0"]
            process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
            while not (out / FILE).exists() and process.poll() is None:
                time.sleep(0.01)
            time.sleep(chance.uniform(0, 8))
            killed += process.poll() is None
            os.kill(process.pid, signal.SIGKILL)
            process.wait()
            again = subprocess.run(command, capture_output=True, text=True)
            same = again.returncode == 0 and _plain(out) == whole
            wrong += not same
            console.print(f"{engine}, kill {k + 1}: {'the same' if same else again.stderr[-500:]}")
    console.print(f"{engine}: {killed} of {count} were killed before their end")
    return verdict(f"{engine}: benches with other results", wrong, 0)


def _plain(out: Path) -> list[dict[str, Any]]:
    return [{key: value for key, value in row.items() if key != "seconds"} for row in results(Store(out / FILE))]


def main() -> None:
    what, *rest = sys.argv[1:] or [""]
    if what == "busy":
        met = [busy(engine) for engine in rest or ["local", "ray"]]
    elif what == "store":
        met = [store()]
    elif what == "kills" and rest:
        met = [kills(rest[0], int(rest[1]) if len(rest) > 1 else 20)]
    else:
        sys.exit(__doc__)
    sys.exit(0 if all(met) else 1)


if __name__ == "__main__":
    main()
