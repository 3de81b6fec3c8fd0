"""How long until the same training loss? PyTorch DDP against Gossamer, on four hosts with slow links.

    python -m benchmarks.time_to_loss                     # 200 Mbit per host; about 10 minutes; root for the lab
    python -m benchmarks.time_to_loss --rate 1gbit
    python -m benchmarks.time_to_loss --rate loopback     # no lab, no root

An MLP of 1.9 M parameters (7.4 MB) on Fashion-MNIST, one worker per host, the same batches, learning rate and number of steps for
all. Writes JSON and a figure to ``docs/``.

Nothing is interleaved: each run is a job of its own, and the machine may be busier during one than during another. So each method
runs twice, first in this order and then in the reverse one, and both are shown.

In the timed part a worker does nothing but train and keep (time, loss of its batch) per step. Afterwards the workers' losses are
averaged per step, the step's time is that of the last worker, and the loss is smoothed by a mean over the last 20 steps. A worker's
loss is that of its own replica, before averaging; the averaged model is evaluated at the end.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel

import gossamer
from benchmarks import chart
from benchmarks.timing import console
from gossamer.apps import data, models
from gossamer.optim.learning_rates import WarmupCosine

METHODS: dict[str, tuple[str, str, Literal["awc", "atc"]] | None] = {  # graph, wire, order
    "DDP": None,
    "DDP, float16": None,  # torch's own hook for gradients in half precision
    "one-peer-exponential": ("one-peer-exponential", "float32", "awc"),
    "one-peer-exponential, bfloat16": ("one-peer-exponential", "bfloat16", "awc"),
    "ada-auto": ("ada-auto", "float32", "atc"),  # in this order a mean in every step is what DDP does
}
HOSTS = 4
SMOOTH = 20  # steps
WARM_UP = 0.1  # of the steps, until the learning rate is reached; then it falls, by a half cosine

# --- In each worker -------------------------------------------------------------------------------------------------------


def work(method: str, steps: int, batch: int, lr: float, out: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, n = dist.get_rank(), dist.get_world_size()
    (x, y), test = data.fashion_mnist()
    sample = x[:10000].clone(), y[:10000].clone()
    x, y = x[rank::n].clone(), y[rank::n].clone()
    order = torch.Generator().manual_seed(rank)
    # The batches are drawn before the clock starts, the same for each method.
    picks = [torch.randint(len(y), (batch,), generator=order) for _ in range(steps)]

    torch.manual_seed(0)
    bare = models.mlp(784, 10, (1024, 1024))
    chosen = METHODS[method]
    ours = gossamer.DecentralizedDataParallel(bare, chosen[0], wire=chosen[1], order=chosen[2]) if chosen else None
    model: nn.Module = ours or ddp(bare, method)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    shape = WarmupCosine(WARM_UP)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: shape.factor(step, steps))
    if ours:
        ours.gossip(optimizer)

    losses = torch.zeros(steps)
    stamps = torch.zeros(steps, dtype=torch.float64)
    dist.barrier()
    began = time.perf_counter()
    for step, pick in enumerate(picks):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x[pick]), y[pick])
        loss.backward()
        optimizer.step()
        scheduler.step()
        losses[step] = loss.detach()
        stamps[step] = time.perf_counter() - began

    dist.barrier()
    if ours:
        ours.average_()
    dist.all_reduce(losses)
    dist.all_reduce(stamps, dist.ReduceOp.MAX)
    if rank == 0:
        train_loss, _ = evaluate(bare, *sample)
        test_loss, accuracy = evaluate(bare, *test)
        result = {
            "method": method,
            "workers": n,
            "seconds": [round(t, 4) for t in stamps.tolist()],
            "loss": [round(loss, 5) for loss in (losses / n).tolist()],
            "averaged_train_loss": train_loss,
            "averaged_test_loss": test_loss,
            "averaged_test_accuracy": accuracy,
            "changes": [[change.step, change.graph] for change in ours.schedule.changes] if ours else [],
        }
        out.write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


def ddp(bare: nn.Module, method: str) -> DistributedDataParallel:
    model = DistributedDataParallel(bare)
    if "float16" in method:
        model.register_comm_hook(None, fp16_compress_hook)
    return model


@torch.no_grad()
def evaluate(model: nn.Module, x: Tensor, y: Tensor) -> tuple[float, float]:
    model.eval()
    scores = model(x)
    return float(nn.functional.cross_entropy(scores, y)), float((scores.argmax(dim=1) == y).float().mean())


# --- The run --------------------------------------------------------------------------------------------------------------


def run(method: str, args: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "result.json"
        command = ["-m", "benchmarks.time_to_loss", "--worker", method, "--out", str(out)]
        command += [f"--{key}={getattr(args, key)}" for key in ("steps", "batch", "lr")]
        if args.rate == "loopback":
            from tests import workers  # the same launcher as in the tests

            for worker in workers.run(HOSTS, command, timeout=1800):
                if worker.code:
                    raise SystemExit(worker.out + worker.err)
        else:
            from gossamer.runtime.lab import Lab

            with Lab(hosts=HOSTS, rate=args.rate) as lab:
                done = lab.run(["python", *command], timeout=1800, echo=False)
            if done.exit_code:
                raise SystemExit("\n".join(done.outputs))
        return json.loads(out.read_text())


def smooth(losses: list[float]) -> list[float]:
    """The mean over the last steps; of the first ones, over as many as there are."""
    sums = [0.0, *itertools.accumulate(losses)]
    return [(sums[k + 1] - sums[max(0, k + 1 - SMOOTH)]) / min(k + 1, SMOOTH) for k in range(len(losses))]


def time_to(result: dict[str, Any], target: float) -> float | None:
    """Seconds until the smoothed loss is at the target, or None."""
    smoothed = smooth(result["loss"])
    return next((t for k, t in enumerate(result["seconds"]) if k + 1 >= SMOOTH and smoothed[k] <= target), None)


def show(results: list[dict[str, Any]], target: float) -> None:
    reached: dict[str, list[float]] = {method: [] for method in METHODS}
    for result in sorted(results, key=lambda r: list(METHODS).index(r["method"])):
        at = time_to(result, target)
        if at is not None:
            reached[result["method"]].append(at)
        steps = len(result["seconds"])
        console.print(
            f"  {result['method']:32} {'not reached' if at is None else f'{at:7.1f} s'}   "
            f"{result['seconds'][-1] / steps * 1e3:6.0f} ms per step   averaged model: "
            f"training loss {result['averaged_train_loss']:.3f}, test accuracy {result['averaged_test_accuracy']:.3f}"
        )
    for method, times in reached.items():
        if method != "DDP" and times and reached["DDP"]:
            ratio = statistics.mean(reached["DDP"]) / statistics.mean(times)
            least, most = min(reached["DDP"]) / max(times), max(reached["DDP"]) / min(times)
            console.print(f"  DDP / {method}: {ratio:.2f} (between single runs {least:.2f} to {most:.2f})")


def draw(results: list[dict[str, Any]], rate: str, target: float, batch: int) -> str:
    ordered = sorted(results, key=lambda r: list(METHODS).index(r["method"]))
    series = [chart.Line(r["method"], r["seconds"][SMOOTH - 1 :], smooth(r["loss"])[SMOOTH - 1 :]) for r in ordered]
    where = f"{HOSTS} workers, loopback" if rate == "loopback" else f"{HOSTS} hosts, {rate} each"
    return chart.lines(
        series,
        "Training loss over time",
        f"Fashion-MNIST, MLP of 1.9 M parameters, {where}, batch {batch} per worker, the same number of steps; each method twice.",
        "seconds",
        f"training loss (mean over workers and {SMOOTH} steps)",
        level=(target, f"target {target:g}"),
        log=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", default="200mbit", help="of each host: 200mbit, 1gbit …, or loopback")
    parser.add_argument("--steps", type=int, default=160)
    parser.add_argument("--batch", type=int, default=128, help="per worker")
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--target", type=float, default=0.5, help="training loss")
    parser.add_argument("--only", default="", help="methods with this in their name")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--out", type=Path, help="JSON; the figure is beside it (docs/time-to-loss-RATE.json)")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        work(args.worker, args.steps, args.batch, args.lr, args.out)
        return
    if args.rate != "loopback" and os.geteuid() != 0:
        sys.exit("the lab needs root; --rate loopback does not")
    out = args.out or Path(f"docs/time-to-loss-{args.rate}.json")
    results = []
    for repeat in range(args.repeats):
        for method in [m for m in METHODS if args.only in m][:: -1 if repeat % 2 else 1]:
            with console.status(f"{method}, run {repeat + 1} of {args.repeats}"):
                results.append(run(method, args) | {"repeat": repeat})
    console.print(f"\n[bold]{args.rate}[/]: seconds to a training loss of {args.target:g}")
    show(results, args.target)
    settings = {key: getattr(args, key) for key in ("rate", "steps", "batch", "lr", "target")} | {"smooth": SMOOTH}
    out.write_text(json.dumps({"settings": settings, "runs": results}))
    out.with_suffix(".svg").write_text(draw(results, args.rate, args.target, args.batch))


if __name__ == "__main__":
    main()
