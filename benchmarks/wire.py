"""What does bfloat16 on the wire cost in accuracy? Fashion-MNIST, n=8, the same training with both wires, three seeds.

    python -m benchmarks.wire

A run that differs in one rounding ends up elsewhere: single runs differ by some tenths of a point either way, as seeds do, so the
bars are on the means over the seeds; the differences seed by seed are printed beside them.

The layout does not matter (tests/test_parity.py: bfloat16 is defined without p), so all eight replicas run in one process.
"""

from __future__ import annotations

import statistics
import sys
from dataclasses import replace

import torch

from benchmarks.timing import console, verdict
from gossamer import Evaluation, LearningRate, Recipe, Settings, Trainer, WarmupCosine
from gossamer.apps import tasks

_SEEDS = (0, 1, 2)
_GRAPHS = ("one-peer-exponential", "ring")


def main() -> None:
    torch.set_num_threads(2)
    task = tasks.make("fashion-mnist/mlp")
    base = Settings(
        8,
        4,
        32,
        algorithm="dsgd-awc",
        optimizer=Recipe("sgd", 0.2, {"momentum": 0.9}),
        learning_rate=LearningRate(0.2, WarmupCosine(warmup=0.1)),
    )
    met = True
    wires: tuple[str, str] = ("float32", "bfloat16")
    for graph in _GRAPHS:
        results: dict[str, list[Evaluation]] = {wire: [] for wire in wires}
        for seed in _SEEDS:
            for wire in wires:
                trainer = Trainer(task, replace(base, seed=seed, wire=wire), graph)
                trainer.run()
                results[wire].append(trainer.evaluate())
                console.print(f"{graph:22} seed {seed} {wire:9} {results[wire][-1]}, {trainer.bytes / 1e6:.0f} MB per replica")
        for what, key, bar in (
            ("averaged model", "value", 0.3),
            ("mean replica", "mean", 1.0),
            ("worst replica", "worst", 1.0),
        ):
            full, half = ([100 * getattr(e, key) for e in results[wire]] for wire in wires)
            pairs = ", ".join(f"{b - a:+.2f}" for a, b in zip(full, half, strict=True))
            gap = abs(statistics.mean(half) - statistics.mean(full))
            met &= verdict(f"{graph}: {what}, points between the means over the seeds (by seed: {pairs})", gap, bar)
    sys.exit(not met)


if __name__ == "__main__":
    main()
