"""A job of 4 workers that goes on with 3, and then with 5: against a restart from the averaged model.

    python -m benchmarks.resize --svg docs/resize.svg        # 2 minutes

The MLP on scikit-learn's digits, SGD with momentum, one-peer-exponential, several seeds. Each time the number changes, three branches go on
from the same files: rows averaged, rows copied (or dropped), and the averaged model in a fresh job with fresh momentum. Prints the test
loss of the averaged model at the end of each stretch, and whether the branches are within the noise of seeds of the restart.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn

import gossamer
from benchmarks import chart
from benchmarks.timing import console, verdict

WAYS = {"average": "rows averaged", "copy": "rows copied or dropped", "restart": "restart from the averaged model"}
SIZES, STEPS, EVERY, BATCH = (4, 3, 5), 60, 5, 8


def data() -> tuple[torch.Tensor, torch.Tensor]:
    x, y = load_digits(return_X_y=True)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    return torch.tensor(x, dtype=torch.float32)[order] / 16, torch.tensor(y)[order]


def stretch(folder: Path, before: Path | None, way: str, seed: int, size: int) -> list[tuple[int, float]]:
    """Train so many steps, save, and return the averaged model's test loss."""
    x, y = data()
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    if way == "restart" and before is not None:
        net.load_state_dict(gossamer.checkpoints.averaged(before))
    model = gossamer.DecentralizedDataParallel(net, "one-peer-exponential")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model.gossip(optimizer)
    if way != "restart" and before is not None:
        assert model.load(before, resize=way)  # type: ignore[arg-type]
    draws = torch.Generator().manual_seed(1000 * seed + 10 * size + model.rank)
    start, losses = SIZES.index(size) * STEPS, []
    for step in range(start, start + STEPS + 1):
        if (step - start) % EVERY == 0:
            with model.consensus(), torch.no_grad():
                model.eval()
                losses.append((step, float(nn.functional.cross_entropy(model(x[-500:]), y[-500:]))))
                model.train()
        if step < start + STEPS:
            some = torch.randint(len(x) - 500, (BATCH,), generator=draws)
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x[some]), y[some]).backward()
            optimizer.step()
    model.save(folder)
    model.close()
    return losses


def work(out: Path, seeds: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    size, result = dist.get_world_size(), {}
    for seed in range(seeds):
        for way in WAYS:
            k = SIZES.index(size)
            before = out / f"{SIZES[k - 1]}-{seed}-{way}" if k else None
            result[f"{way} {seed}"] = stretch(out / f"{size}-{seed}-{way}", before, way, seed, size)
    if dist.get_rank() == 0:
        (out / f"{size}.json").write_text(json.dumps(result))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--svg", type=Path)
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        work(args.worker, args.seeds)
        return
    results = {}
    with tempfile.TemporaryDirectory() as name:
        for size in SIZES:
            command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(size), "-m", "benchmarks.resize"]
            command += ["--worker", name, "--seeds", str(args.seeds)]
            subprocess.run(command, check=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
            results[size] = json.loads((Path(name) / f"{size}.json").read_text())
    good = True
    for size in SIZES[1:]:
        ends = {way: [results[size][f"{way} {seed}"][-1][1] for seed in range(args.seeds)] for way in WAYS}
        noise = statistics.stdev(ends["restart"])
        for way, losses in ends.items():
            console.print(f"{size} workers, {WAYS[way]}: {statistics.mean(losses):.4f} ± {statistics.stdev(losses):.4f}")
        for way in ("average", "copy"):
            behind = statistics.mean(ends[way]) - statistics.mean(ends["restart"])
            good &= verdict(f"{size} workers: {WAYS[way]} behind a restart, in its standard deviations", behind / noise, 1.0)
    if args.svg:
        lines = [
            chart.Line(WAYS[way], *map(list, zip(*results[size][f"{way} {seed}"], strict=True)))
            for way in WAYS
            for seed in range(args.seeds)
            for size in SIZES
        ]
        marks = [(k * STEPS, f"{size} workers") for k, size in enumerate(SIZES)]
        title = "Test loss of the averaged model when the number of workers changes"
        args.svg.write_text(chart.lines(lines, title, "", "step", "loss", log=True, marks=marks))
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
