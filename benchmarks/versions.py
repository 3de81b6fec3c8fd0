"""Is a step of this version as fast as one of an older version? The versions take turns, way by way, in one run.

    python -m benchmarks.versions 1d5d4eb HEAD                              # loopback-4; about 15 minutes, nothing else running
    python -m benchmarks.versions 1d5d4eb HEAD --setting 1gbit-4            # in the lab; root

Each version is a worktree of its own in a temporary folder; the benchmark's workers are those of this checkout. All versions are
loaded all the time, and a turnstile lets one of them compute at a time: a few steps of one way by the first version, then by the
second. What the machine does meanwhile so hits all of them alike; two runs one after the other differ by up to 7 % here.

Where a process happens to get its memory makes it faster or slower by 3 % for as long as it lives, and all ways of it alike, also
"none", which trains without Gossamer. So there are several launches, each with processes of its own. A ratio is the median over launches,
and the interval is 95 % of resampled medians. Parameters are in large pages (THP_MEM_ALLOC_ENABLE), which makes that smaller.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

from benchmarks.step_time import SETTINGS, TURNSTILE, Setting
from benchmarks.timing import console, verdict
from tests.workers import ROOT, environment, seat

WAYS = (
    "none",
    "one-peer-exponential",
    "one-peer-exponential, bfloat16",
    "one-peer-exponential, send_copy",
    "ring",
    "ring, bfloat16",
    "complete",
    "complete (atc)",
    "all-reduce",
)


def turnstile(server: socket.socket, jobs: int) -> None:
    """Let the jobs pass one at a time, in a new order each time; all of them wait for the next turn at the same place."""
    gates = [server.accept()[0] for _ in range(jobs)]
    order = random.Random(2)
    ready = [gate.recv(1) for gate in gates]
    while all(ready):
        for gate in order.sample(gates, jobs):
            gate.send(b"!")
            gate.recv(1)
        ready = [gate.recv(1) for gate in gates]


def run(setting: Setting, trees: list[Path], ways: list[str], turns: int, steps: int, scratch: Path) -> list[dict]:
    """One launch: of each version, what each way took."""
    from gossamer.runtime.lab import Lab

    (scratch / "turnstile").unlink(missing_ok=True)
    server = socket.socket(socket.AF_UNIX)
    server.bind(str(scratch / "turnstile"))
    server.listen()
    threading.Thread(target=turnstile, args=(server, len(trees)), daemon=True).start()
    outs = [scratch / f"{k}.json" for k in range(len(trees))]
    for out in outs:
        out.unlink(missing_ok=True)

    def job(tree: Path, out: Path) -> None:
        options = ["--turns", str(turns), "--steps", str(steps), "--out", str(out), "--ways", "; ".join(ways)]
        command = [sys.executable, "-m", "benchmarks.step_time", "--worker", setting.name, *options]
        own = {TURNSTILE: str(scratch / "turnstile"), "PYTHONPATH": f"{tree / 'src'}:{ROOT}", "OMP_NUM_THREADS": "1"}
        own["THP_MEM_ALLOC_ENABLE"] = "1"
        if setting.hosts:
            with Lab(hosts=setting.hosts, rate=setting.rate) as lab:
                env = [f"{key}={value}" for key, value in own.items()]
                per_host = setting.workers // setting.hosts
                lab.run(["env", *env, *command], workers_per_host=per_host, timeout=3600)
        else:
            base = environment(setting.workers) | own
            for process in [subprocess.Popen(command, env=base | seat(rank)) for rank in range(setting.workers)]:
                process.wait()

    threads = [threading.Thread(target=job, args=pair) for pair in zip(trees, outs, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    server.close()
    if missing := [tree.name for tree, out in zip(trees, outs, strict=True) if not out.exists()]:
        raise SystemExit(f"no result of {', '.join(missing)}; what its workers said is above")
    return [json.loads(out.read_text())["methods"] for out in outs]


def show(revisions: list[str], launches: list[list[dict]], bar: float) -> bool:
    """After each launch: all so far."""
    met = True
    console.print(f"\n[bold]{len(launches)} launches[/]")
    for way in launches[0][0]:
        for k, revision in enumerate(revisions[1:], 1):
            ratios = []
            for results in launches:
                pairs = zip(results[0][way]["all_ms"], results[k][way]["all_ms"], strict=True)
                ratios.append(statistics.median(new / old for old, new in pairs))  # turn by turn
            draws = random.Random(0)
            middles = sorted(statistics.median(draws.choices(ratios, k=len(ratios))) for _ in range(400))
            what = f"{way}: {revision} / {revisions[0]} ({middles[10]:.3f} to {middles[-11]:.3f})"
            met &= verdict(what, statistics.median(ratios), bar)
    return met


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("revisions", nargs="+", help="the first is what the others are compared with")
    parser.add_argument("--setting", default="loopback-4", help=", ".join(s.name for s in SETTINGS))
    parser.add_argument("--ways", help='separated by "; "; by default all: ' + "; ".join(WAYS))
    parser.add_argument("--launches", type=int, default=8)
    parser.add_argument("--turns", type=int, default=3, help="of each launch")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--bar", type=float, default=1.02)
    args = parser.parse_args()
    setting = next((s for s in SETTINGS if s.name == args.setting), None)
    if setting is None:
        sys.exit(f"--setting {args.setting} is not known; use one of {', '.join(s.name for s in SETTINGS)}")
    if setting.hosts and os.geteuid() != 0:
        sys.exit("the lab needs root; --setting loopback-4 does not")
    ways = args.ways.split("; ") if args.ways else list(WAYS)
    launches: list[list[dict]] = []
    met = True
    with tempfile.TemporaryDirectory() as folder:
        trees = [Path(folder) / f"{k}-{revision}" for k, revision in enumerate(args.revisions)]
        try:
            for tree, revision in zip(trees, args.revisions, strict=True):
                subprocess.run(["git", "worktree", "add", "--detach", "--quiet", str(tree), revision], cwd=ROOT, check=True)
            for launch in range(args.launches):
                order = random.Random(launch).sample(range(len(trees)), len(trees))  # the first to start is no better off
                found = run(setting, [trees[k] for k in order], ways, args.turns, args.steps, Path(folder))
                launches.append([found[order.index(k)] for k in range(len(trees))])
                met = show(args.revisions, launches, args.bar)
        finally:
            for tree in trees:
                subprocess.run(["git", "worktree", "remove", "--force", str(tree)], cwd=ROOT, check=False)
    sys.exit(not met)


if __name__ == "__main__":
    main()
