"""Workers for test_finite.py. Some of them diverge: a number of their parameters is not finite after the update of a step.

python -m tests.finite_driver OUT CASES, a JSON list of dicts. ``name``, ``graph``, ``steps``; and if wanted

- ``bad``: ``[[rank, step], …]``, and ``value`` (nan): what one number of ``second.weight`` becomes;
- ``again``: a worker that was bad and has come back is bad once more, so many steps later;
- ``half``: some parameters in float16; ``two``: two optimizers; ``last``: at the end, means of all;
- ``ends``: an error ends the process; otherwise the worker goes on with what it has;
- all else is for DecentralizedDataParallel.
"""

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from gossamer import DecentralizedDataParallel, Diverged, GossamerError

RATE = 0.125


class Net(nn.Module):
    def __init__(self, rank, half):
        super().__init__()
        torch.manual_seed(rank)
        self.first = nn.Linear(3, 4)
        self.second = nn.Linear(4, 2).to(torch.float16 if half else torch.float32)

    def forward(self, x):
        return self.second(self.first(x).to(self.second.weight.dtype)).float().sum()


def gradients(parameters, rank, step):
    """What each worker does in a step, whatever its parameters are: their gradients would be finite or not with them."""
    torch.manual_seed(1000 * (rank + 1) + step)
    return [torch.randn(p.shape).to(p.dtype) for p in parameters]


def row(module):
    return [number for p in module.parameters() for number in p.detach().flatten().tolist()]


def run(out, case):
    rank, options = dist.get_rank(), dict(case)
    name, graph, steps, bad = (options.pop(key) for key in ("name", "graph", "steps", "bad"))
    value, again = float(options.pop("value", "nan")), options.pop("again", 0)
    half, two, last, ends = (options.pop(key, False) for key in ("half", "two", "last", "ends"))
    model = DecentralizedDataParallel(Net(rank, half), graph, init="keep", timeout=30, **options)
    parts = [model.module.first, model.module.second] if two else [model.module]
    optimizers = [torch.optim.SGD(part.parameters(), lr=RATE) for part in parts]
    record = {"rows": {}, "changes": [], "errors": {}}
    returns = []

    def changed(change):
        record["changes"].append(change.describe())
        if change.rejoined:
            returns.append(change.step)

    model.gossip(*optimizers, on_change=changed)
    try:
        while model.steps < steps:
            model(torch.ones(3)).backward()
            step, parameters = model.steps, list(model.parameters())
            for p, grad in zip(parameters, gradients(parameters, rank, step), strict=True):
                p.grad = grad
            for optimizer in optimizers:
                try:
                    optimizer.step()
                except Diverged as error:
                    record["errors"][step] = str(error)
                    if ends:
                        raise
                    optimizer.step()
            if [rank, step] in bad or (again and returns and step == returns[0] + again):
                with torch.no_grad():
                    model.module.second.weight[1, 2] = value
            record["rows"][step] = row(model)
        if last:
            record["mean"] = model.mean(value if any(q == rank for q, _ in bad) else 1.0)
            record["before"] = row(model)
            record["consensus"] = said(lambda: model.consensus().__enter__())
            record["save"] = said(lambda: model.save(out / "kept"))
            record["average"] = said(model.average_)
            record["after"] = row(model)
    finally:
        (out / f"{name}.{rank}.json").write_text(json.dumps(record))


def every_case(world, cases):
    """In workers of the pool."""
    for case in cases:
        run(world.folder, case)


def said(call):
    try:
        call()
    except GossamerError as error:
        return str(error)
    return None


if __name__ == "__main__":
    import tests.no_compiler  # noqa: F401

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for one in json.loads(sys.argv[2]):
        run(Path(sys.argv[1]), one)
