"""The paper's observation on a laptop: with 96 replicas, the better connected the graph, the better the averaged model.

    python examples/fashion_96.py [--replicas 96] [--epochs 8] [--data FOLDER]

Trains an MLP on Fashion-MNIST (Debian: apt install dataset-fashion-mnist) six times in one process, batch 8 per replica, and
prints the test accuracy of the averaged model. A few minutes on two cores.
"""

from __future__ import annotations

import argparse
import functools
from pathlib import Path

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from gossamer import GossamerError, LearningRate, Recipe, Settings, Task, Trainer, TrainingDiverged, WarmupCosine
from gossamer.apps import data, models

METHODS = {
    "centralized": ("allreduce", "complete"),
    "D-complete": ("dsgd-atc", "complete"),
    "exponential": ("dsgd-atc", "exponential"),
    "torus": ("dsgd-atc", "torus"),
    "ring": ("dsgd-atc", "ring"),
    "Ada": ("dsgd-atc", "ada:reach=0.8"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", type=int, default=96)
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--batch", type=int, default=8, help="samples per replica and step")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--data", type=Path, help="folder with the gzipped IDX files")
    args = parser.parse_args()
    train, test = data.fashion_mnist(args.data)
    task = Task("fashion-mnist/mlp", functools.partial(models.mlp, 784, 10), train, test)
    table = Table("method", "averaged model", "mean replica", "worst replica", "MB per replica", "seconds", title="Test accuracy")
    with Progress() as progress:
        for name, (algorithm, graph) in METHODS.items():
            settings = Settings(
                replicas=args.replicas,
                epochs=args.epochs,
                batch=args.batch,
                algorithm=algorithm,
                optimizer=Recipe("sgd", 0.5, {"momentum": 0.9}),
                learning_rate=LearningRate(0.5, WarmupCosine(warmup=0.1)),
                seed=args.seed,
            )
            bar = progress.add_task(name, total=None)
            advance = functools.partial(progress.update, bar)
            trainer = Trainer(task, settings, graph, on_step=lambda step, loss, advance=advance: advance(completed=step))
            progress.update(bar, total=trainer.steps)
            try:
                history = trainer.run()
            except TrainingDiverged as error:
                progress.console.print(f"{name}: {error}")
                continue
            result = trainer.evaluate()
            scores = (f"{score:.3f}" for score in (result.value, result.mean, result.worst))
            table.add_row(name, *scores, f"{history[-1].bytes / 1e6:.0f}", f"{history[-1].seconds:.0f}")
    Console().print(table)


if __name__ == "__main__":
    try:
        main()
    except GossamerError as error:
        raise SystemExit(f"fashion_96: {error}") from None
