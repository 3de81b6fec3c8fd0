"""How close do many replicas in one process come to the hardware, and which backend is best where?

    python -m benchmarks.replicas [--repeats 9] [--case mlp-1008x4 …]

For each model and number of replicas × batch: forward and backward of all replicas by each backend; "shared" is all samples
through one model (the compute limit when batches are small); "plain" is a loop over separate modules with their own
optimizers, which "auto + step" (gradients and optimizer) is held against. Medians of interleaved repeats.
"""

from __future__ import annotations

import argparse
import functools
import multiprocessing
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.table import Table
from torch import Tensor, nn

from benchmarks.timing import console, interleaved, verdict
from gossamer import Recipe, Replicas, Settings, Task, Trainer
from gossamer.apps import models
from gossamer.data.tasks import cross_entropy
from gossamer.optim import BlockOptimizer
from gossamer.rows.backends import Backend


@dataclass(frozen=True)
class Case:
    build: Callable[[], nn.Module]
    r: int
    batch: int
    shape: tuple[int, ...]
    backends: tuple[str, ...]
    against_plain: float | None = None  # at least this much faster


MLP = functools.partial(models.mlp, 784, 10)
IMAGE = (3, 32, 32)
CASES = {
    "mlp-96x8": Case(MLP, 96, 8, (784,), ("loop", "vmap", "vmap:16", "vmap:64", "tape", "tape:16", "tape:64")),
    "mlp-1008x4": Case(MLP, 1008, 4, (784,), ("loop", "vmap", "vmap:16", "vmap:64", "tape:16", "tape:64"), 2.2),
    "resnet8-96x4": Case(
        functools.partial(models.CifarResNet, 8, 8, norm="group"),
        96,
        4,
        IMAGE,
        ("loop", "vmap", "vmap:16", "tape", "tape:16"),
        2.5,
    ),
    "resnet20-32x8": Case(
        functools.partial(models.CifarResNet, 20, norm="group"), 32, 8, IMAGE, ("loop", "vmap", "vmap:16", "tape", "tape:16")
    ),
    "resnet20-16x32": Case(
        functools.partial(models.CifarResNet, 20, norm="group"), 16, 32, IMAGE, ("loop", "vmap", "vmap:4", "tape", "tape:4")
    ),
}


def measure(name: str, case: Case, repeats: int) -> list[bool]:
    x, y = torch.randn(case.r, case.batch, *case.shape), torch.randint(0, 10, (case.r, case.batch))
    replicas = Replicas(case.build, case.r, init="different")
    optimizer = BlockOptimizer(Recipe("sgd", 1e-4, {"momentum": 0.9}), replicas)
    replicas.gradients(cross_entropy, (x, y))
    chosen = replicas.backend
    modules = [case.build() for _ in range(case.r)]
    optimizers = [torch.optim.SGD(module.parameters(), 1e-4, momentum=0.9) for module in modules]
    shared_model = case.build()

    def shared() -> None:
        cross_entropy(shared_model, x.flatten(0, 1), y.flatten(0, 1)).backward()

    def plain() -> None:
        for i, (module, own) in enumerate(zip(modules, optimizers, strict=True)):
            own.zero_grad()
            cross_entropy(module, x[i], y[i]).backward()
            own.step()

    def by(backend: Backend | None) -> Tensor:
        replicas.backend = backend
        return replicas.gradients(cross_entropy, (x, y))

    def whole_step() -> None:
        by(chosen)
        optimizer.step()

    ways: dict[str, Callable[[], object]] = {"shared": shared}
    # After its choice, auto *is* the chosen backend: it is timed once, under that name.
    ways |= {name: functools.partial(by, Backend.parse(name)) for name in dict.fromkeys((*case.backends, str(chosen)))}
    ways |= {"auto + step": whole_step, "plain": plain}
    times = interleaved(ways, repeats, name)
    best = min(times[backend] for backend in case.backends)
    table = Table(
        "way", "ms", "× shared", "× best", title=f"{name}: {case.r} replicas × batch {case.batch}; auto chose {chosen}"
    )
    for way, ms in times.items():
        table.add_row(way, f"{ms:.1f}", f"{ms / times['shared']:.2f}", f"{ms / best:.2f}")
    console.print(table)
    met = [verdict(f"{name}: auto against the best backend", times[str(chosen)] / best, 1.1)]
    if case.against_plain is not None:
        ratio = times["plain"] / times["auto + step"]
        met.append(verdict(f"{name}: faster than a plain loop over modules", ratio, case.against_plain, at_most=False))
    return met


def peak_memory(backend: str) -> float:
    """The peak of three whole D-SGD steps of 1008 MLP replicas, in sizes of X, without the data. In a process of its own."""
    data = (torch.randn(3 * 1008 * 4, 784), torch.randint(0, 10, (3 * 1008 * 4,)))
    settings = Settings(replicas=1008, epochs=1, batch=4, optimizer=Recipe("sgd", 0.1, {"momentum": 0.9}), backend=backend)
    task = Task("memory", MLP, data, (data[0][:10], data[1][:10]))
    before = _memory("VmRSS")
    trainer = Trainer(task, settings, "ring")
    trainer.run()
    return (_memory("VmHWM") - before) / (trainer.replicas.blocks[0].x.numel() * 4)


def _memory(field: str) -> int:
    """Linux only. (getrusage would carry over the peak of the parent process.)"""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--case", nargs="*", choices=[*CASES, "memory"], default=[*CASES, "memory"])
    args = parser.parse_args()
    console.print(f"{torch.get_num_threads()} threads, torch {torch.__version__}")
    met: list[bool] = []
    for name, case in CASES.items():
        if name in args.case:
            met += measure(name, case, args.repeats)
    if "memory" in args.case:
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            met.append(
                verdict("peak memory of a D-SGD step of 1008 MLPs, in sizes of X", pool.apply(peak_memory, ("auto",)), 5)
            )
    raise SystemExit(0 if all(met) else 1)


if __name__ == "__main__":
    main()
