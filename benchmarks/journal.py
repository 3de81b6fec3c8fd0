"""What it costs to collect numbers in every step, with a logger that does nothing.

    python -m benchmarks.journal                # a minute; --steps for more

Two workers on loopback train an MLP whose step takes about 5 ms. It is one model in one run, with the logger in every other step, in random
order. Prints the ratio of the medians with an interval; and, because noise between steps is larger than what is looked for, what the calls
by themselves take: on the same model, between steps, as part of 5 ms. Distances and dispersion are not part of it: they come every k steps.
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
from gossamer.transport.spans import span

SIZES, BATCH = (256, 512, 512, 10), 192
STEP_MS = 5.0
_SPANS = 4  # of a step: send, wait, mix, mean
_CALLS, _BLOCKS = 1000, 20
_WARM_UP = 20  # pairs of steps
_BAR = 0.01


def work(out: Path, steps: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    layers = [part for a, b in itertools.pairwise(SIZES) for part in (nn.Linear(a, b), nn.ReLU())]
    model = gossamer.DecentralizedDataParallel(nn.Sequential(*layers[:-1]))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    model.gossip(optimizer, log=lambda numbers, step: None, profile_every=0)
    driver, log = model._driver, model._driver.journal.log
    x, y = torch.randn(BATCH, SIZES[0]), torch.randint(0, SIZES[-1], (BATCH,))
    times: dict[bool, list[float]] = {True: [], False: []}
    order = random.Random(1)
    for turn in range(-_WARM_UP, steps):
        for on in order.sample([True, False], 2):
            driver.journal.log = log if on else None
            began = time.perf_counter()
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            if turn >= 0:
                times[on].append(1e3 * (time.perf_counter() - began))
    driver.journal.log = log
    calls = []
    for _ in range(_BLOCKS):
        began = time.perf_counter()
        for _ in range(_CALLS):
            driver.journal.begin(driver)
            driver.journal.look(driver)
            driver.journal.end(driver)
            for _ in range(_SPANS):
                with span("gossamer::wait"):
                    pass
        calls.append(1e3 * (time.perf_counter() - began) / _CALLS)
    if dist.get_rank() == 0:
        out.write_text(json.dumps({"on": times[True], "off": times[False], "calls": calls}))
    dist.barrier()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=2000, help="of each kind")
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.out:
        work(args.out, args.steps)
        return
    with tempfile.TemporaryDirectory() as name:
        out = Path(name) / "times.json"
        command = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            "2",
            "-m",
            "benchmarks.journal",
        ]
        subprocess.run(
            [*command, "--out", str(out), "--steps", str(args.steps)], check=True, env=os.environ | {"OMP_NUM_THREADS": "1"}
        )
        result = json.loads(out.read_text())
    on, off = result["on"], result["off"]
    draws = random.Random(0)
    again = (draws.choices(range(len(on)), k=len(on)) for _ in range(400))
    ratios = sorted(median([on[i] for i in some]) / median([off[i] for i in some]) for some in again)
    console.print(
        f"a step takes {median(on):.3f} ms with, {median(off):.3f} ms without the logger, {len(on)} steps of each; "
        f"95 % of resampled ratios in {ratios[10]:.4f} to {ratios[-11]:.4f}"
    )
    calls = median(result["calls"])
    console.print(
        f"the calls of a step take {1e3 * calls:.1f} µs ({1e3 * min(result['calls']):.1f} to {1e3 * max(result['calls']):.1f})"
    )
    good = verdict(f"the calls, as part of a step of {STEP_MS:g} ms", calls / STEP_MS, _BAR)
    good &= verdict("time with / without: the lower end of the interval", ratios[10], 1 + _BAR)
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
