"""How close is X <- W X to a plain copy of X?

    python -m benchmarks.mixing [--repeats 9]

One process, float32. Times are medians of interleaved repeats; "copies" is the ratio to copying X once in the same run.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable

import torch
from rich.table import Table
from torch import nn

from benchmarks.timing import console, interleaved, verdict
from gossamer import Recipe, Replicas, graphs
from gossamer.methods import AdaptThenCombine, Step
from gossamer.optim import BlockOptimizer
from gossamer.rows.mixing import mix
from gossamer.rows.vector import Gradients, Parameters
from gossamer.transport.mixer import Mixer

LARGE = [
    "complete",
    "ring",
    "lattice:k=4",
    "lattice:k=6",
    "lattice:k=10",
    "lattice:k=100",
    "lattice:k=500",
    "lattice:k=1006",
    "one-peer-exponential",
]
LARGE += ["one-peer-ring", "random-matching", "base:k=1", "torus", "exponential", "star"]
SMALL = ["complete", "ring", "lattice:k=20", "lattice:k=94", "one-peer-exponential", "torus", "exponential"]


def mixing(n: int, columns: int, names: list[str], repeats: int) -> dict[str, float]:
    x = torch.randn(n, columns)
    out = torch.empty_like(x)
    ways: dict[str, Callable[[], object]] = {"copy": lambda: out.copy_(x)}
    for name in names:
        made = graphs.parse(name, n).round(3)
        ways[name] = functools.partial(mix, made, x, out)
    times = interleaved(ways, repeats, f"mixing n={n}")
    table = Table("round", "ms", "copies", title=f"Mixing, n={n}, D={columns:,} ({x.numel() * 4 / 1e6:.0f} MB)")
    for name, ms in times.items():
        table.add_row(name, f"{ms:.1f}", f"{ms / times['copy']:.2f}")
    console.print(table)
    return {name: ms / times["copy"] for name, ms in times.items()}


def step(n: int, inputs: int, repeats: int) -> float:
    """The optimizer (SGD, momentum) and a ring Round together, in copies of X."""
    replicas = Replicas(nn.Linear(inputs, 1, bias=False), n)
    block = replicas.blocks[0]
    block.grad.normal_()
    optimizer = BlockOptimizer(Recipe("sgd", 1e-6, {"momentum": 0.9}), replicas)
    rule, x = AdaptThenCombine(), Parameters(replicas.blocks, in_place=False)
    now = Step(Mixer(n), x, Gradients(replicas.blocks), lambda: None, lambda t: False)
    now.round = graphs.ring(n).round(0)

    def update() -> None:
        optimizer.step()
        rule.after_update(now)

    ways = {"copy": lambda: block.spare.copy_(block.x), "step": update}
    times = interleaved(ways, repeats, "optimizer + ring")
    return times["step"] / times["copy"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=9)
    repeats = parser.parse_args().repeats
    console.print(f"{torch.get_num_threads()} threads, torch {torch.__version__}")
    mixing(96, 270_000, SMALL, repeats)
    copies = mixing(1008, 118_272, LARGE, repeats)
    both = step(1008, 118_272, repeats)
    windows = {name: value for name, value in copies.items() if name.startswith(("ring", "lattice"))}
    met = [
        verdict("worst window, k from 2 to 1006, in copies", max(windows.values()), 5),
        verdict("k=500 against k=2", copies["lattice:k=500"] / copies["ring"], 1.4),
        verdict("mean, in copies", copies["complete"], 2),
        verdict(
            "worst permutation, in copies",
            max(copies[n] for n in ("one-peer-exponential", "one-peer-ring", "random-matching")),
            3,
        ),
        verdict("SGD with momentum and ring together, in copies", both, 8),
    ]
    raise SystemExit(0 if all(met) else 1)


if __name__ == "__main__":
    main()
