"""What it costs to look at every row for numbers that are not finite.

    python -m benchmarks.finite                # 2 minutes; --steps for more

Two workers on loopback train an MLP of 6.3 million parameters. It is one model in one run, with the check in every other step, in random
order: two models would differ by their place in memory alone. Prints the ratio of the medians, by edges and by slices, of the time and of
the processor time of all threads. The latter is what is left to compare if the machine has other work.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from torch import nn

import gossamer
from benchmarks.timing import console, verdict

GRAPHS = {"one-peer-exponential": "edges", "hierarchical:per_node=2": "slices", "periodic:every=1,bits=8": "8 bits"}
SIZES, BATCH = (1024, 2048, 2048, 10), 128
_WARM_UP = 10  # pairs of steps
_BAR = 1.02


def work(graph: str, out: Path, steps: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    layers = [part for a, b in itertools.pairwise(SIZES) for part in (nn.Linear(a, b), nn.ReLU())]
    model = gossamer.DecentralizedDataParallel(nn.Sequential(*layers[:-1]), graph)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    model.gossip(optimizer)
    x, y = torch.randn(BATCH, SIZES[0]), torch.randint(0, SIZES[-1], (BATCH,))
    times: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
    order = random.Random(1)
    for turn in range(-_WARM_UP, steps):
        for on in order.sample([True, False], 2):
            model._mixer.check_finite = on
            began, spent = time.perf_counter(), time.process_time()
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            if turn >= 0:
                times[on].append((1e3 * (time.perf_counter() - began), 1e3 * (time.process_time() - spent)))
    if dist.get_rank() == 0:
        out.write_text(json.dumps({"on": times[True], "off": times[False]}))
    dist.barrier()


def measure(graph: str, steps: int) -> bool:
    with tempfile.TemporaryDirectory() as name:
        out = Path(name) / "times.json"
        command = [sys.executable, "-m", "gossamer", "launch", "-n", "2", "-m", "benchmarks.finite"]
        command += ["--worker", graph, "--out", str(out), "--steps", str(steps)]
        subprocess.run(command, check=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
        result = json.loads(out.read_text())
    good = True
    draws = random.Random(0)
    again = [draws.choices(range(steps), k=steps) for _ in range(400)]
    for k, what in enumerate(("time", "processor time")):
        on, off = ([pair[k] for pair in result[kind]] for kind in ("on", "off"))
        ratios = sorted(median([on[i] for i in some]) / median([off[i] for i in some]) for some in again)
        console.print(
            f"{graph} ({GRAPHS.get(graph, '')}): {what} {median(on):.2f} ms with, {median(off):.2f} ms without the check, {steps} steps "
            f"of each; 95 % of resampled ratios in {ratios[10]:.4f} to {ratios[-11]:.4f}"
        )
        good &= verdict(f"{graph}: {what} with / without", median(on) / median(off), _BAR)
    return good


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300, help="of each kind, for each graph")
    parser.add_argument("--graph", action="append", help="one of these only")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        work(args.worker, args.out, args.steps)
        return
    good = [measure(graph, args.steps) for graph in args.graph or GRAPHS]
    sys.exit(0 if all(good) else 1)


if __name__ == "__main__":
    main()
