"""How much longer the longest step gets when checkpoints are saved: at once, and in the background.

    python -m benchmarks.background_save         # 3 minutes, nothing else running; --blocks for more

Two workers on loopback train an MLP of 6.3 million parameters (25 MB; with momentum a checkpoint of 50 MB per worker). Training runs in
blocks of steps, in random order: without a save, with one at once, with one in the background. A save counts as a part of its step.
Prints the median over the blocks of the longest step, and the ratios.
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

SIZES, BATCH, STEPS = (1024, 2048, 2048, 10), 128, 25
WAYS = ("none", "background", "at once")
_BAR = 1.10


def work(out: Path, blocks: int, batch: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    layers = [part for a, b in itertools.pairwise(SIZES) for part in (nn.Linear(a, b), nn.ReLU())]
    model = gossamer.DecentralizedDataParallel(nn.Sequential(*layers[:-1]))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    model.gossip(optimizer)
    x, y = torch.randn(batch, SIZES[0]), torch.randint(0, SIZES[-1], (batch,))
    steps: dict[str, list[list[float]]] = {way: [] for way in WAYS}
    saves: dict[str, list[float]] = {way: [] for way in WAYS}
    order = random.Random(1)
    for block in range(-1, blocks):
        for way in order.sample(WAYS, len(WAYS)):
            times = []
            for step in range(STEPS):
                began = time.perf_counter()
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(x), y).backward()
                optimizer.step()
                stepped = time.perf_counter()
                if step == STEPS // 5 and way != "none":
                    model.save(out.parent / way, background=way == "background")
                    saves[way].append(1e3 * (time.perf_counter() - stepped))
                times.append(1e3 * (time.perf_counter() - began))
            if block >= 0:
                steps[way].append(times)
    if dist.get_rank() == 0:
        out.write_text(json.dumps({"steps": steps, "saves": saves}))
    model.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=15, help="of each kind")
    parser.add_argument("--batch", type=int, default=BATCH, help="per worker")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        work(args.worker, args.blocks, args.batch)
        return
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as name:  # on a disk: /tmp may be memory
        out = Path(name) / "times.json"
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "benchmarks.background_save"]
        command += ["--worker", str(out), "--blocks", str(args.blocks), "--batch", str(args.batch)]
        subprocess.run(command, check=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
        result = json.loads(out.read_text())
    longest = {way: median(map(max, blocks)) for way, blocks in result["steps"].items()}
    for way in WAYS:
        usual = median(itertools.chain(*result["steps"][way]))
        saved = f", save() {median(result['saves'][way]):.1f} ms" if result["saves"][way] else ""
        console.print(f"{way}: the longest of {STEPS} steps {longest[way]:.1f} ms, the median {usual:.1f} ms{saved}")
    console.print(f"at once: the longest step is {longest['at once'] / longest['none']:.2f} times as long")
    sys.exit(
        0 if verdict("the longest step, in the background / without", longest["background"] / longest["none"], _BAR) else 1
    )


if __name__ == "__main__":
    main()
