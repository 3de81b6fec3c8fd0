"""Do the applications learn, and what does it cost to run many replicas of one?

    python -m benchmarks.apps [--data FOLDER]        CIFAR-10 in FOLDER, or where `gossamer data` finds it

- ResNet-20 on CIFAR-10, one replica, 3 epochs: over 60 % of the test images right.
- 96 replicas of ResNet-8, an epoch of CIFAR-10 with batch 4 each: under 60 s, and at most 1.6 times as long as the same samples
  through one shared model with the same optimizer. Steps of both are timed in turns.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch
from rich.table import Table

from benchmarks.timing import console, interleaved, verdict
from gossamer import Recipe, Settings, Trainer
from gossamer.apps import tasks
from gossamer.optim.learning_rates import LearningRate, WarmupCosine

_STEPS = 10  # in one repeat


def learns(folder: Path | None) -> bool:
    task = tasks.make("cifar10/resnet20", folder)
    recipe = Recipe("sgd", 0.1, {"momentum": 0.9, "weight_decay": 1e-4})
    settings = Settings(1, 3, 128, optimizer=recipe, learning_rate=LearningRate(0.1, WarmupCosine(0.1, 0.1, 0.0)))
    trainer = Trainer(task, settings, "complete")
    trainer.on_epoch = lambda e: console.print(
        f"  epoch {e.epoch + 1}: loss {e.train_loss:.3f}, test accuracy {e.value:.3f} ({e.seconds:.0f} s)"
    )
    console.print("ResNet-20 on CIFAR-10, one replica")
    value = trainer.run()[-1].value
    return verdict("test accuracy after 3 epochs", value, 0.6, at_most=False)


def many(folder: Path | None, repeats: int) -> list[bool]:
    task = tasks.make("cifar10/resnet8", folder)
    recipe = Recipe("sgd", 0.05, {"momentum": 0.9})
    replicas = Trainer(task, Settings(96, 1, 4, optimizer=recipe), "ada")
    shared = Trainer(task, Settings(1, 1, 96 * 4, optimizer=recipe), "complete")
    for trainer in (replicas, shared):
        trainer.run(until=3)  # finds the backend

    def steps(trainer: Trainer) -> None:
        trainer.run(until=trainer.step + _STEPS)

    times = interleaved(
        {"96 replicas": lambda: steps(replicas), "one shared model": lambda: steps(shared)}, repeats, "ResNet-8"
    )
    table = Table("", "ms per step of 384 images", title=f"ResNet-8 on CIFAR-10, backend {replicas.replicas.backend}")
    for name, milliseconds in times.items():
        table.add_row(name, f"{milliseconds / _STEPS:.0f}")
    console.print(table)
    again = Trainer(task, Settings(96, 1, 4, optimizer=recipe, backend=str(replicas.replicas.backend)), "ada")
    began = time.perf_counter()
    again.run()
    whole = time.perf_counter() - began
    return [
        verdict("96 replicas / one shared model", times["96 replicas"] / times["one shared model"], 1.6),
        verdict("seconds for one epoch, evaluation included", whole, 60),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    torch.set_num_threads(2)
    met = [*many(arguments.data, arguments.repeats), learns(arguments.data)]
    raise SystemExit(0 if all(met) else 1)


if __name__ == "__main__":
    main()
