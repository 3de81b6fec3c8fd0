"""Jobs under ``gossamer launch`` whose workers are killed and paused: does each end as promised?

    python -m benchmarks.reliability scripts     # four small scenarios, 20 runs of each; about 30 minutes
    python -m benchmarks.reliability kills       # 30 times SIGKILL, with collectives in each step; about 8 minutes
    python -m benchmarks.reliability pauses      # 30 times SIGSTOP for 1 to 60 s; about 20 minutes
    python -m benchmarks.reliability wraps       # 200 models in one process, one after the other; about 2 minutes

``--busy 4`` runs four busy loops beside the jobs: races show more often on a loaded machine. ``--seed`` makes the choices the same again;
the moments still depend on the machine. The exit code is 1 if a job did not end as promised. ``--out`` gets a record of each job.

- scripts: a suspended worker, a death between means, the death of the leader before the end, the only worker of a host that dies.
- kills: ``mean()`` in each step, ``consensus()`` in every 7th, ``save()`` in every 50th. No job is lost, all ranks finish, each mean is
  that of the members, the replicas agree in the end, and there is a whole checkpoint on disk at any time.
- wraps: descriptors, threads and memory stay the same.
- pauses: of a worker, of the launcher, of all workers, of everything. All workers finish, and the replicas agree.

The parameters are checksums of themselves (``reliability_scripts/train.py``), so torn and foreign rows show in each step.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.reliability_jobs import (
    LIMIT_SECONDS,
    SCRIPTS,
    BrokenPromise,
    Job,
    N,
    load_again,
    look_at_checkpoint,
    look_at_logs,
)
from benchmarks.reliability_scripts.train import STEP

GRAPHS = ("one-peer-exponential", "complete", "periodic:every=1,bits=8")
REPEATS = {"scripts": 20, "kills": 30, "pauses": 30, "wraps": 200}
KILLS_PER_JOB, PAUSES_PER_JOB = 5, 4
TARGETS = ("one worker", "the launcher", "all workers", "everything")
TOGETHER_SECONDS = (
    180.0  # for all workers to come (back) after a kill: a worker that dies young is started again after up to 30 s
)
BACK_SECONDS = 60.0  # for all workers to be together again after a pause
RUNNING_SECONDS, LAST_RUNNING_SECONDS = 12.0, 30.0  # after a pause, and after the last one of a job
GROWTH_MB = 10.0  # what an allocator keeps; a model that stays costs 4 MB, so 180 of them 720
TAIL_LINES = 40


# --- The four scripts -----------------------------------------------------------------------------------------------------------


def _evicted(job: Job, results: dict[int, dict[str, Any]]) -> Iterator[str]:
    if 1 not in results:
        yield "rank 1 did not finish"
    if 0 not in results and not re.search(r"Evicted: .*went on without it", job.output):
        yield "rank 0 neither finished nor said that the others went on without it"
    for result in results.values():
        if not result["low"] == result["high"] == 1:
            yield f"rank {result['rank']} ended with {result['low']} to {result['high']}"
    yield from _saved(job, results, "final.pt", 1 if 0 not in results else None)
    if (job.folder / "final.pt").exists():
        weight = torch.load(job.folder / "final.pt", weights_only=True)["weight"]
        if not bool((weight == 1).all()):
            yield f"final.pt holds {weight.min()} to {weight.max()}"


def _mean(job: Job, results: dict[int, dict[str, Any]]) -> Iterator[str]:
    yield from _members(results, [0, 1, 3])
    yield from (f"rank {rank}: {result['wrong']} wrong means" for rank, result in results.items() if result["wrong"])


def _leads(job: Job, results: dict[int, dict[str, Any]]) -> Iterator[str]:
    yield from _members(results, [1, 2])
    yield from _saved(job, results, "final2.pt", 1)


def _single(job: Job, results: dict[int, dict[str, Any]]) -> Iterator[str]:
    yield from _members(results, [0, 1])
    if "is started again" not in job.output:
        yield "no worker was started again"


def _members(results: dict[int, dict[str, Any]], right: list[int]) -> Iterator[str]:
    if sorted(results) != right:
        yield f"ranks {sorted(results)} finished, and {right} should have"
    yield from (f"rank {k}: members {r['members']}" for k, r in results.items() if r["members"] != right)


def _saved(job: Job, results: dict[int, dict[str, Any]], name: str, by: int | None) -> Iterator[str]:
    """By one worker; ``by`` None: by any one."""
    wrote = [rank for rank, result in results.items() if result["wrote"]]
    if len(wrote) != 1 or (by is not None and wrote != [by]) or not (job.folder / name).exists():
        yield f"{name} was written by ranks {wrote}"


class Scenario(NamedTuple):
    launch: list[str]
    hosts: int
    judge: Callable[[Job, dict[int, dict[str, Any]]], Iterator[str]]


SCENARIOS = {
    "evicted": Scenario(["-n", "2", "--evict-after", "3"], 1, _evicted),
    "mean": Scenario(["-n", "4"], 1, _mean),
    "leads": Scenario(["-n", "3"], 1, _leads),
    "single": Scenario(["-n", "1", "--restart", "3"], 2, _single),
}


def scripts(repeats: int, rng: random.Random, longest: float) -> Iterator[dict[str, Any]]:
    for turn in range(repeats):
        for name, scenario in SCENARIOS.items():
            command = [*scenario.launch, str(SCRIPTS / f"{name}.py")]
            launches = [command]
            if scenario.hosts > 1:
                with socket.socket() as free:
                    free.bind(("127.0.0.1", 0))
                    place = ["--nodes", str(scenario.hosts), "--address", f"127.0.0.1:{free.getsockname()[1]}"]
                launches = [[*place, "--node", str(host), *command] for host in range(scenario.hosts)]
            yield record(name, f"run {turn + 1}", launches, functools.partial(_scenario, scenario))


def _scenario(scenario: Scenario, job: Job, found: dict[str, Any]) -> list[str]:
    found["exit codes"] = job.codes(LIMIT_SECONDS)
    wrong = [f"exit codes {found['exit codes']}"] if any(found["exit codes"]) else []
    found["results"] = job.results()
    return wrong + list(scenario.judge(job, found["results"]))


# --- Kills --------------------------------------------------------------------------------------------------------------------


def kills(repeats: int, rng: random.Random, longest: float) -> Iterator[dict[str, Any]]:
    for k, some in enumerate(_shares(repeats, KILLS_PER_JOB)):
        graph = GRAPHS[k % len(GRAPHS)]
        launch = ["-n", str(N), "--restart", "9", str(SCRIPTS / "train.py"), graph, "."]
        launch += ["--mean", "1", "--consensus", "7", "--save", "50"]
        yield record(graph, f"{some} kills", [launch], functools.partial(_kill, some, graph, rng))


def _kill(kills: int, graph: str, rng: random.Random, job: Job, found: dict[str, Any]) -> list[str]:
    wrong: list[str] = []
    found |= {"kills": [], "returns": []}
    job.wait_together(TOGETHER_SECONDS)
    began = time.time()
    killed: set[int] = set()
    while len(found["kills"]) < kills:
        chance = rng.random()
        if chance < 0.3:  # close to the kill before: while the others change to the graph without that worker
            time.sleep(rng.uniform(0.0, 0.5))
        elif chance < 0.5:  # while the killed worker comes back
            time.sleep(rng.uniform(2.0, 5.0))
        else:
            found["returns"].append(round(job.wait_together(TOGETHER_SECONDS), 2))
            time.sleep(rng.uniform(0.3, 2.0))
        workers = [log for log in job.workers() if log.pid not in killed]
        training = [log for log in workers if (entry := log.last()) and entry.when > time.time() - 5]
        if len(training) < 3:  # a job needs a worker that survives
            found["returns"].append(round(job.wait_together(TOGETHER_SECONDS), 2))
            continue
        victim = rng.choice(workers)
        try:
            os.kill(victim.pid, signal.SIGKILL)
        except ProcessLookupError:
            raise BrokenPromise(f"rank {victim.rank} ended by itself") from None
        killed.add(victim.pid)
        found["kills"].append([round(time.time() - began, 2), victim.rank, job.step()])
        wrong += look_at_checkpoint(job)
    found["returns"].append(round(job.wait_together(TOGETHER_SECONDS), 2))
    wrong += job.finish()
    more, found["checked"] = look_at_logs(job.logs())
    return wrong + more + look_at_checkpoint(job) + load_again(job, graph)


# --- Pauses -------------------------------------------------------------------------------------------------------------------


def pauses(repeats: int, rng: random.Random, longest: float) -> Iterator[dict[str, Any]]:
    targets = [target for _ in range(0, repeats, len(TARGETS)) for target in rng.sample(TARGETS, len(TARGETS))]
    plan = iter([(target, longest ** rng.random()) for target in targets])  # now: the jobs draw from rng too
    for k, some in enumerate(_shares(repeats, PAUSES_PER_JOB)):
        graph, mine = GRAPHS[k % len(GRAPHS)], list(itertools.islice(plan, some))
        launch = ["-n", str(N), str(SCRIPTS / "train.py"), graph, "."]
        launch += ["--mean", "10"] if k // len(GRAPHS) % 2 else []  # with collectives in every second round of the graphs
        shown = ", ".join(f"{target} {seconds:.1f} s" for target, seconds in mine)
        yield record(graph, shown, [launch], functools.partial(_pause, mine, rng))


def _pause(plan: list[tuple[str, float]], rng: random.Random, job: Job, found: dict[str, Any]) -> list[str]:
    found["pauses"] = []
    job.wait_together(TOGETHER_SECONDS)
    time.sleep(rng.uniform(1.0, 3.0))
    for k, (target, seconds) in enumerate(plan):
        workers, launcher = [log.pid for log in job.workers()], job.launchers[0].pid
        if len(workers) < N:
            raise BrokenPromise(f"{len(workers)} of {N} workers still run")
        pids = {"one worker": [rng.choice(workers)], "the launcher": [launcher], "all workers": workers}.get(target)
        pids = pids or [*workers, launcher]
        began = time.time()
        for which, wait in ((signal.SIGSTOP, seconds), (signal.SIGCONT, 0.0)):
            for pid in rng.sample(pids, len(pids)):
                with contextlib.suppress(ProcessLookupError):  # a worker has failed; all of them are looked for later
                    os.kill(pid, which)
            time.sleep(wait)
        resumed, running = time.monotonic(), RUNNING_SECONDS if k < len(plan) - 1 else LAST_RUNNING_SECONDS
        together = round(job.wait_together(max(running, BACK_SECONDS)), 2)
        time.sleep(max(0.0, running - (time.monotonic() - resumed)))
        held = round(_longest_step(job, began, time.time(), pids), 2)
        found["pauses"].append({"target": target, "seconds": round(seconds, 2), "together": together, "held": held})
    wrong = job.finish()
    more, found["checked"] = look_at_logs(job.logs())
    found["rejoined"] = sum(result["rejoined"] for result in job.results().values())
    return wrong + more


def _longest_step(job: Job, begin: float, end: float, without: list[int]) -> float:
    """Seconds, of the workers that were not paused; of all, if all were."""
    logs = [log for log in job.logs() if log.pid not in without] or job.logs()
    longest = 0.0
    for log in logs:
        times = [entry.when for entry in log.entries() if entry.kind == STEP]
        steps = itertools.pairwise(times)
        longest = max([longest, *(after - before for before, after in steps if after > begin and before < end)])
    return longest


# --- Wraps --------------------------------------------------------------------------------------------------------------------


def wraps(repeats: int, rng: random.Random, longest: float) -> Iterator[dict[str, Any]]:
    command = ["-n", "2", str(SCRIPTS / "wraps.py"), str(repeats)]
    yield record("wraps", f"{repeats} in one process", [command], functools.partial(_wraps, repeats))


def _wraps(repeats: int, job: Job, found: dict[str, Any]) -> list[str]:
    wrong = [f"exit codes {codes}"] if any(codes := job.codes(LIMIT_SECONDS + 2 * repeats)) else []
    found["results"] = job.results()
    for rank, result in found["results"].items():
        for what, seen in zip(("descriptors", "threads", "MB"), zip(*result["seen"], strict=True), strict=True):
            first, last = seen[min(20, repeats // 2)], seen[-1]
            print(f"     rank {rank}: {what} {seen[0]} after the first, {first} after the 21st, {last} after the last")
            if last > first + (GROWTH_MB if what == "MB" else 0):
                wrong.append(f"rank {rank}: {first} {what}, then {last}")
    return wrong


# --- The run --------------------------------------------------------------------------------------------------------------------


def _shares(total: int, most: int) -> list[int]:
    """``total`` in parts of at most ``most``, as equal as they can be; one part for each graph at least, if ``total`` is large enough."""
    parts = max(-(-total // most), min(total, len(GRAPHS)))
    return [total // parts + (k < total % parts) for k in range(parts)]


def record(kind: str, what: str, launches: list[list[str]], body: Callable[[Job, dict[str, Any]], list[str]]) -> dict[str, Any]:
    """Run one job. ``wrong``: what was not as promised."""
    found: dict[str, Any] = {"kind": kind, "what": what, "wrong": []}
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder, Job(Path(folder), *launches) as job:
        try:
            found["wrong"] = body(job, found)
        except BrokenPromise as broken:
            found["wrong"] = [str(broken), *look_at_logs(job.logs())[0]]
        found["seconds"] = round(time.monotonic() - began, 1)
        if found["wrong"]:
            found["output"] = job.output
    return found


@contextlib.contextmanager
def busy_loops(number: int) -> Iterator[None]:
    loop = "import os; parent = os.getppid()\nwhile os.getppid() == parent: pass"  # none is left if this process is killed
    loops = [subprocess.Popen([sys.executable, "-c", loop]) for _ in range(number)]
    try:
        yield
    finally:
        for process in loops:
            process.kill()
            process.wait()


def tell(job: dict[str, Any], number: int) -> None:
    """One line, and more if a promise was broken."""
    more = ""
    if "kills" in job:
        more = f"; {len(job['kills'])} kills, together again after up to {max(job['returns'], default=0):.1f} s"
    if "pauses" in job:
        shown = [f"{pause['together']:.1f}" for pause in job["pauses"]]
        more = f"; together again after {', '.join(shown)} s; evicted and joined again: {job.get('rejoined', '?')}"
    verdict = "as promised" if not job["wrong"] else "BROKEN: " + "; ".join(job["wrong"])
    print(f"{number:3}. {job['kind']}, {job['what']}: {verdict} ({job['seconds']:.0f} s{more})", flush=True)
    if job["wrong"]:
        print("".join(f"      | {line}\n" for line in job["output"].splitlines()[-TAIL_LINES:]), flush=True)


def table(campaign: str, jobs: list[dict[str, Any]]) -> str:
    faults = {
        "scripts": "",
        "kills": " kills | longest until all are together |",
        "pauses": " pauses | longest until all are together |",
        "wraps": "",
    }
    rows = [f"| {'graph' if faults[campaign] else 'script'} | jobs | as promised |{faults[campaign]} mean time of a job |"]
    rows.append("| --- " * (rows[0].count("|") - 1) + "|")
    for kind in dict.fromkeys(job["kind"] for job in jobs):
        some = [job for job in jobs if job["kind"] == kind]
        good = sum(not job["wrong"] for job in some)
        row = f"| {kind} | {len(some)} | {good} |"
        if campaign == "kills":
            returns = [seconds for job in some for seconds in job.get("returns", [])]
            row += f" {sum(len(job.get('kills', [])) for job in some)} | {max(returns, default=0):.1f} s |"
        if campaign == "pauses":
            seen = [pause["together"] for job in some for pause in job.get("pauses", [])]
            row += f" {len(seen)} | {max(seen, default=0):.1f} s |"
        rows.append(f"{row} {sum(job['seconds'] for job in some) / len(some):.0f} s |")
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("campaign", choices=list(REPEATS))
    parser.add_argument("--repeats", type=int, help="runs of each script, kills or pauses in all; by default 20, 30, 30")
    parser.add_argument("--busy", type=int, default=0, help="busy loops beside the jobs")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--longest", type=float, default=60.0, help="seconds of a pause; the shortest is 1 s")
    parser.add_argument("--out", type=Path, help="a JSON file, written after each job")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    campaign = {"scripts": scripts, "kills": kills, "pauses": pauses, "wraps": wraps}[args.campaign]
    repeats = args.repeats if args.repeats is not None else REPEATS[args.campaign]
    jobs: list[dict[str, Any]] = []
    began = time.monotonic()
    with busy_loops(args.busy):
        for job in campaign(repeats, random.Random(args.seed), args.longest):
            jobs.append(job)
            tell(job, len(jobs))
            if args.out:
                settings = {key: value for key, value in vars(args).items() if key != "out"}
                args.out.write_text(json.dumps({"settings": settings | {"repeats": repeats}, "jobs": jobs}, indent=1))
    print(table(args.campaign, jobs))
    broken = sum(bool(job["wrong"]) for job in jobs)
    print(f"{len(jobs) - broken} of {len(jobs)} jobs ended as promised, in {(time.monotonic() - began) / 60:.1f} minutes")
    sys.exit(1 if broken else 0)


if __name__ == "__main__":
    main()
