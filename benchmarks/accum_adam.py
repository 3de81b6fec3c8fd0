"""What does AccumAdam cost against torch's Adam?

    python -m benchmarks.accum_adam [--repeats 21]

The optimizer's step alone, float32, on the 59 parameter tensors of ResNet-20 and on a block of 16 replicas of it, as DBench
has it. Each repeat is a few whole windows of accumulation; times are medians of interleaved repeats, per step.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
from rich.table import Table
from torch import nn

from benchmarks.timing import console, interleaved, verdict
from gossamer import AccumAdam
from gossamer.apps.models import CifarResNet

ACCUMULATED = 4


def compare(title: str, shapes: list[torch.Size], windows: int, repeats: int) -> dict[str, float]:
    steps = windows * ACCUMULATED

    def way(make: Callable[[list[nn.Parameter]], torch.optim.Optimizer]) -> Callable[[], None]:
        params = [nn.Parameter(torch.randn(shape)) for shape in shapes]
        for p in params:
            p.grad = torch.randn_like(p)
        optimizer = make(params)

        def run() -> None:
            for _ in range(steps):
                optimizer.step()

        return run

    ways = {
        "torch Adam, foreach": way(lambda params: torch.optim.Adam(params, lr=1e-6, foreach=True)),
        "torch Adam, fused": way(lambda params: torch.optim.Adam(params, lr=1e-6, fused=True)),
        "AccumAdam": way(lambda params: AccumAdam(params, lr=1e-6, accum_iter=ACCUMULATED)),
        "AccumAdam, weight decay": way(lambda params: AccumAdam(params, lr=1e-6, weight_decay=0.1, accum_iter=ACCUMULATED)),
        "AccumAdam, reference": way(lambda params: AccumAdam(params, lr=1e-6, accum_iter=ACCUMULATED, foreach=False)),
    }
    times = interleaved(ways, repeats, title)
    table = Table("optimizer", "ms per step", "ratio", title=title)
    base = times["torch Adam, foreach"]
    for name, ms in times.items():
        table.add_row(name, f"{ms / steps:.2f}", f"{ms / base:.2f}")
    console.print(table)
    return {name: ms / base for name, ms in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=21)
    repeats = parser.parse_args().repeats
    console.print(f"{torch.get_num_threads()} threads, torch {torch.__version__}")
    shapes = [p.shape for p in CifarResNet(20).parameters()]
    whole = sum(shape.numel() for shape in shapes)
    one = compare(f"ResNet-20, {len(shapes)} tensors, {whole:,} parameters", shapes, 5, repeats)
    block = compare(f"A block [16, {whole:,}]", [torch.Size((16, whole))], 1, repeats)
    met = [
        verdict("AccumAdam on ResNet-20 against torch.optim.Adam(foreach=True)", one["AccumAdam"], 1.4),
        verdict("AccumAdam on a block of 16 replicas against the same", block["AccumAdam"], 1.4),
    ]
    raise SystemExit(0 if all(met) else 1)


if __name__ == "__main__":
    main()
