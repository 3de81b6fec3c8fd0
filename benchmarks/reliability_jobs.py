"""A job under ``gossamer launch``, seen from outside: its processes, its output, the logs of its workers, its checkpoints."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.reliability_scripts.train import MEAN, RECORD, SAVE, STEP, WRONG
from gossamer.checkpoints import checkpoint

ROOT = Path(__file__).parent.parent
SCRIPTS = Path(__file__).parent / "reliability_scripts"
N = 4  # workers of a job that runs train.py
ALL = 2**N - 1  # the members, as a sum of 2**rank
LIMIT_SECONDS = 120.0  # of a scenario, and of the last steps of a job


class BrokenPromise(Exception):
    """A job that does not go on as it should."""


class Entry(NamedTuple):
    """What a worker wrote into its log. ``members``: a sum of 2**rank."""

    kind: bytes
    step: int
    when: float
    value: float
    members: int


class Log(NamedTuple):
    """The log of one process."""

    rank: int
    pid: int
    path: Path

    @property
    def alive(self) -> bool:
        with contextlib.suppress(OSError, IndexError):
            return Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
        return False

    def last(self) -> Entry | None:
        with open(self.path, "rb") as file:
            size = file.seek(0, os.SEEK_END) // RECORD.size * RECORD.size
            if not size:
                return None
            file.seek(size - RECORD.size)
            return Entry(*RECORD.unpack(file.read(RECORD.size)))

    def entries(self) -> list[Entry]:
        data = self.path.read_bytes()
        return [Entry(*record) for record in RECORD.iter_unpack(data[: len(data) // RECORD.size * RECORD.size])]


class Job:
    """One or more launchers that run in ``folder``, and what they print."""

    def __init__(self, folder: Path, *launches: list[str]) -> None:
        self.folder = folder
        self.said: list[list[str]] = [[] for _ in launches]
        env = os.environ | {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", "OMP_NUM_THREADS": "1"}
        self.launchers = [
            subprocess.Popen(
                [sys.executable, "-m", "gossamer", "launch", *arguments],
                env=env,
                cwd=folder,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for arguments in launches
        ]
        self._listeners = [threading.Thread(target=self._listen, args=(k,), daemon=True) for k in range(len(launches))]
        for listener in self._listeners:
            listener.start()

    def _listen(self, k: int) -> None:
        pipe = self.launchers[k].stdout
        assert pipe is not None
        for line in pipe:
            self.said[k].append(line)

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        for launcher in self.launchers:
            if launcher.poll() is None:
                launcher.kill()  # the kernel kills its workers with it, also if they are paused
            launcher.wait()

    @property
    def output(self) -> str:
        return "".join(line for lines in self.said for line in lines)

    def results(self) -> dict[int, dict[str, Any]]:
        """Of each rank that has finished."""
        found = [json.loads(text) for text in re.findall(r"RESULT (\{.*\})", self.output)]
        return {result["rank"]: result for result in found}

    def codes(self, seconds: float) -> list[int]:
        """The exit codes, within so many seconds."""
        deadline = time.monotonic() + seconds
        try:
            codes = [launcher.wait(max(0.0, deadline - time.monotonic())) for launcher in self.launchers]
        except subprocess.TimeoutExpired:
            raise BrokenPromise(f"it still runs after {seconds:.0f} s") from None
        for listener in self._listeners:
            listener.join(5)
        return codes

    # --- Of jobs that run train.py

    def logs(self) -> list[Log]:
        names = [(path, path.name.split(".")) for path in self.folder.glob("*.*.log")]
        return sorted(Log(int(rank), int(pid), path) for path, (rank, pid, _) in names)

    def workers(self) -> list[Log]:
        """Of those that run."""
        return [log for log in self.logs() if log.alive]

    def step(self) -> int:
        return max((entry.step for log in self.logs() if (entry := log.last())), default=0)

    def is_together(self, since: float) -> bool:
        """All workers train with all others, and each has done a step after ``since``."""
        last = {log.rank: entry for log in self.workers() if (entry := log.last())}
        return len(last) == N and all(entry.members == ALL and entry.when > since for entry in last.values())

    def wait_together(self, seconds: float) -> float:
        """The seconds that it took."""
        began, since = time.monotonic(), time.time()
        while not self.is_together(since):
            spent = time.monotonic() - began
            if any(launcher.poll() is not None for launcher in self.launchers):
                raise BrokenPromise("the job has ended")
            if spent > seconds:
                last = {log.rank: (entry.step, f"{entry.members:b}") for log in self.workers() if (entry := log.last())}
                raise BrokenPromise(f"the workers are not together again after {seconds:.0f} s: {last}")
            time.sleep(0.02)
        return time.monotonic() - began

    def finish(self) -> list[str]:
        """All workers end, some steps from now. Returns what was not as promised."""
        (self.folder / "new").write_text(str(self.step() + 60))
        (self.folder / "new").rename(self.folder / "last")
        codes, results = self.codes(LIMIT_SECONDS), self.results()
        wrong = [f"exit code {codes[0]}"] if codes != [0] else []
        if sorted(results) != list(range(N)):
            return [*wrong, f"of {N} ranks {sorted(results)} finished"]
        for what in ("members", "steps", "digest"):
            values = {rank: result[what] for rank, result in results.items()}
            if len({str(value) for value in values.values()}) > 1:
                wrong.append(f"{what} differ after the last average: {values}")
        if results[0]["members"] != list(range(N)):
            wrong.append(f"at the end the members were {results[0]['members']}")
        leaders = [rank for rank, result in results.items() if result["leads"]]
        return wrong if len(leaders) == 1 else [*wrong, f"{len(leaders)} workers led at the end: {leaders}"]


def look_at_logs(logs: list[Log]) -> tuple[list[str], dict[str, int]]:
    """What all workers saw, also those that were killed: errors, and how much was checked."""
    wrong: list[str] = []
    means: dict[int, dict[int, float]] = {}  # of each step, by rank
    count = 0
    for log in logs:
        entries = log.entries()
        torn = [entry for entry in entries if entry.kind == WRONG]
        if torn:
            wrong.append(f"rank {log.rank}: {len(torn)} wrong rows, the first at step {torn[0].step}, off by {torn[0].value:g}")
        count += sum(entry.kind == STEP for entry in entries)
        for entry in (entry for entry in entries if entry.kind == MEAN):
            if abs(entry.value * entry.members.bit_count() - entry.members) > 1e-9:
                wrong.append(f"rank {log.rank}, step {entry.step}: a mean of {entry.value}, with members {entry.members:b}")
            means.setdefault(entry.step, {})[log.rank] = entry.value
    wrong += [f"step {step}: different means {seen}" for step, seen in means.items() if len(set(seen.values())) > 1]
    return wrong, {"steps": count, "means": sum(len(seen) for seen in means.values())}


# --- Checkpoints ----------------------------------------------------------------------------------------------------------------


def look_at_checkpoint(job: Job) -> list[str]:
    """The newest step whose files are all there can be read. It is the last one that a worker has saved, or a newer one."""
    problem = ""
    for _ in range(20):  # the job goes on meanwhile, and removes files of older steps
        saved = _saved(job)
        if saved is None:
            return []
        sets = _sets(job.folder / "kept")
        newest = max(sets, default=(-1, 0))
        if saved not in sets and newest[0] <= saved[0]:
            problem = (
                f"step {saved[0]} was saved by {saved[1]} workers, and these (step, workers) are whole on disk: {sorted(sets)}"
            )
            continue
        try:
            for path in sets[newest]:
                checkpoint.load(path)
        except checkpoint.Unreadable as error:
            problem = str(error)
        else:
            return []
    return [problem]


def load_again(job: Job, graph: str) -> list[str]:
    """A new job takes over the last checkpoint."""
    step, size = _saved(job) or (-1, 0)
    if step < 0:
        return ["no checkpoint was saved"]
    with Job(job.folder, ["-n", str(size), str(SCRIPTS / "train.py"), graph, ".", "--load"]) as again:
        codes, results = again.codes(LIMIT_SECONDS), again.results()
    good = [found for found in results.values() if found["loaded"] and found["steps"] == step and not found["wrong"]]
    if codes == [0] and len(good) == size:
        return []
    return [f"step {step} of {size} workers was not loaded: exit code {codes[0]}, {results}\n{again.output}"]


def _saved(job: Job) -> tuple[int, int] | None:
    """The last step that a worker knows to be saved, and how many workers saved it."""
    saved = [(entry.step, entry.members.bit_count()) for log in job.logs() for entry in log.entries() if entry.kind == SAVE]
    return max(saved, default=None)


def _sets(folder: Path) -> dict[tuple[int, int], list[Path]]:
    """The files of each step and number of workers, if all are there."""
    sets: dict[tuple[int, int], list[Path]] = {}
    for path in folder.glob("step-*.ckpt"):
        if match := re.fullmatch(r"step-(\d+)\.rank-\d+-of-(\d+)\.ckpt", path.name):
            sets.setdefault((int(match[1]), int(match[2])), []).append(path)
    return {key: paths for key, paths in sets.items() if len(paths) == key[1]}
