"""Six ways to average, side by side in one process.

    python examples/compare_graphs.py digits           scikit-learn's digits, n=48, under a minute (make demo)
    python examples/compare_graphs.py fashion          Fashion-MNIST, n=96, a few minutes on two cores

Fashion-MNIST is Debian's package dataset-fashion-mnist, or the folder given with --data.
"""

from __future__ import annotations

import argparse
import functools
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from gossamer import Evaluation, GossamerError, LearningRate, Recipe, Settings, Task, Trainer, TrainingDiverged, WarmupCosine
from gossamer.apps import data, models

METHODS = {
    "centralized": ("allreduce", "complete"),
    "D-complete": ("dsgd-atc", "complete"),
    "exponential": ("dsgd-atc", "exponential"),
    "torus": ("dsgd-atc", "torus"),
    "ring": ("dsgd-atc", "ring"),
    "Ada": ("dsgd-atc", "ada:reach=0.8"),
}


@dataclass(frozen=True)
class Experiment:
    inputs: int
    hidden: tuple[int, ...]
    replicas: int
    batch: int
    epochs: int


EXPERIMENTS = {
    "digits": Experiment(inputs=64, hidden=(64,), replicas=48, batch=2, epochs=40),
    "fashion": Experiment(inputs=784, hidden=(128, 128), replicas=96, batch=8, epochs=8),
}


def train(task: Task, settings: Settings, graph: str, name: str, progress: Progress) -> tuple[Trainer, Evaluation | str]:
    bar = progress.add_task(name, total=None)
    trainer = Trainer(task, settings, graph, on_step=lambda step, _: progress.update(bar, completed=step))
    progress.update(bar, total=trainer.steps)
    try:
        trainer.run()
    except TrainingDiverged:
        return trainer, f"diverged at step {trainer.step}"
    return trainer, trainer.evaluate()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("experiment", choices=EXPERIMENTS, nargs="?", default="digits")
    parser.add_argument("--replicas", type=int)
    parser.add_argument("--epochs", type=int)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--data", type=Path, help="folder with Fashion-MNIST's gzipped IDX files")
    args = parser.parse_args()
    chosen = EXPERIMENTS[args.experiment]
    train_set, test_set = data.digits() if args.experiment == "digits" else data.fashion_mnist(args.data)
    task = Task(args.experiment, functools.partial(models.mlp, chosen.inputs, 10, chosen.hidden), train_set, test_set)
    n = args.replicas or chosen.replicas
    title = f"{args.experiment}: test accuracy, {n} replicas × batch {chosen.batch}"
    table = Table("method", "averaged model", "mean replica", "worst replica", "MB per replica", "seconds", title=title)
    with Progress(transient=True) as progress:
        for name, (algorithm, graph) in METHODS.items():
            settings = Settings(
                replicas=n,
                epochs=args.epochs or chosen.epochs,
                batch=chosen.batch,
                algorithm=algorithm,
                optimizer=Recipe("sgd", 0.5, {"momentum": 0.9}),
                learning_rate=LearningRate(0.5, WarmupCosine(warmup=0.1)),
                seed=args.seed,
            )
            trainer, result = train(task, settings, graph, name, progress)
            if isinstance(result, str):
                table.add_row(name, result)
                continue
            scores = (f"{score:.3f}" for score in (result.value, result.mean, result.worst))
            last = trainer.history[-1]
            table.add_row(name, *scores, f"{last.bytes / 1e6:.1f}", f"{last.seconds:.1f}")
    Console().print(table)


if __name__ == "__main__":
    try:
        main()
    except GossamerError as error:
        raise SystemExit(f"compare_graphs: {error}") from None
