"""Does the library's default train as DDP does, whatever the optimizer? Gradients in 8 bits with error feedback against float32.

    python -m benchmarks.default                  # SGD, AdamW, Muon and schedule-free AdamW, 4 and 16 workers, five paired seeds
    python -m benchmarks.default adamw --seeds 2  # a part of it

A nano GPT over bytes. All workers have the same parameters, so one process computes the gradients of all of them on one model, and
averages them with the library's own arithmetic. The 8 bits are those of ``graph="auto"`` after its trial, here from the first step on.
Learning rates are the same for both, and were not tuned. Schedule-free needs ``pip install schedulefree``. Runs that are in the file
of results are not done again.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import statistics
from pathlib import Path
from typing import Any

import torch
from torch.nn.utils import clip_grad_norm_

from gossamer.apps import tasks
from gossamer.data.sampling import sampler
from gossamer.data.sources import source
from gossamer.methods.policies.auto import COARSE
from gossamer.rows.vector import Vector
from gossamer.rows.wires import EXACT, WIRES
from gossamer.transport.agreed import AgreedMean
from gossamer.transport.mixer import Mixer

STEPS, SAMPLES = 150, 16  # samples in a step, of all workers
RATES = {"adamw": 3e-3, "muon": 0.02, "sgd": 0.2, "schedule-free": 12e-3}
WORKERS = (4, 16)


def optimizers(name: str, model: torch.nn.Module, lr: float) -> list[torch.optim.Optimizer]:
    parameters = list(model.parameters())
    if name == "sgd":
        return [torch.optim.SGD(parameters, lr, momentum=0.9)]
    if name == "adamw":
        return [torch.optim.AdamW(parameters, lr)]
    if name == "muon":
        hidden = [p for key, p in model.named_parameters() if p.ndim == 2 and "emb" not in key and "head" not in key]
        others = {id(p) for p in hidden}
        return [torch.optim.Muon(hidden, lr), torch.optim.AdamW([p for p in parameters if id(p) not in others], 6e-3)]
    import schedulefree  # type: ignore[import-not-found]

    made = schedulefree.AdamWScheduleFree(parameters, lr, warmup_steps=STEPS // 10)
    made.train()
    return [made]


def run(data: Path | None, name: str, workers: int, coarse: bool, lr: float, seed: int) -> float:
    """The loss on test data at the end."""
    task = tasks.make("text/gpt-nano", data, options={"train": STEPS * SAMPLES * 64, "test": 32768}, batch=SAMPLES // workers)
    torch.manual_seed(seed)
    model = task.build()
    batches, parameters = sampler("reshuffled", task.train, workers, SAMPLES // workers, seed), list(model.parameters())
    made = optimizers(name, model, lr)
    starts = [group["lr"] for optimizer in made for group in optimizer.param_groups]
    mixer, sizes = Mixer(workers), [p.numel() for p in parameters]
    rows = Vector([torch.zeros(workers, sum(sizes))])
    lost, mean = rows.zeros(), torch.zeros(1, sum(sizes))
    for step in range(STEPS):
        scale = (
            1.0
            if name == "schedule-free"
            else min(1.0, 10 * (step + 1) / STEPS) * (0.55 + 0.45 * math.cos(math.pi * step / STEPS))
        )
        for group, start in zip((g for optimizer in made for g in optimizer.param_groups), starts, strict=True):
            group["lr"] = scale * start
        batch = batches.batch(step)
        for k in range(workers):
            model.zero_grad()
            task.loss(model, *(tensor[k] for tensor in batch)).backward()
            torch.cat([p.grad.flatten() for p in parameters if p.grad is not None], out=rows.tensors[0][k])
        transfer = AgreedMean(mixer, [rows], WIRES[COARSE.wire] if coarse else EXACT, step, plus=lost if coarse else None)
        transfer.into(out := Vector([torch.zeros_like(rows.tensors[0])]))
        if coarse:
            lost.copy_(transfer.lost[0])
        mean = out.tensors[0][0]
        for p, part in zip(parameters, mean.split(sizes), strict=True):
            p.grad = part.view_as(p).clone()
        clip_grad_norm_(parameters, 1.0)
        for optimizer in made:
            optimizer.step()
    for optimizer in made if name == "schedule-free" else ():
        optimizer.eval()  # type: ignore[attr-defined]
    model.eval()
    return math.log(task.metric.of(model, source(task.test)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("optimizers", nargs="*", default=list(RATES), help=f"of {', '.join(RATES)}")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--data", type=Path, help="the text, if it is not where gossamer data puts it")
    parser.add_argument("--out", type=Path, default=Path("runs/default.json"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    results: dict[str, float] = json.loads(options.out.read_text()) if options.out.exists() else {}

    def once(*what: Any) -> float:
        key = " ".join(map(str, what))
        if key not in results:
            results[key] = run(options.data, *what)
            options.out.write_text(json.dumps(results, indent=1))
        return results[key]

    for workers, name in itertools.product(WORKERS, options.optimizers):
        lr = RATES[name]
        pairs = [[once(name, workers, coarse, lr, seed) for coarse in (False, True)] for seed in range(options.seeds)]
        apart = [100 * (ours / theirs - 1) for theirs, ours in pairs]
        mean = statistics.mean(apart)
        half = {5: 2.776, 4: 3.182, 3: 4.303, 2: 12.706}.get(len(apart), math.nan) * statistics.stdev(apart) / len(apart) ** 0.5
        print(
            f"{name:14} {workers:3} workers, lr {lr}: loss {statistics.mean(theirs for theirs, _ in pairs):.4f} in float32, "
            f"{statistics.mean(ours for _, ours in pairs):.4f} in 8 bits: {mean:+.2f} ± {half:.2f} % (bar: 0.5 %)",
            flush=True,
        )


if __name__ == "__main__":
    main()
