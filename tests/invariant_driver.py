"""A worker for test_method_survival.py, under ``gossamer launch``: after each step it writes down its row and its method's own state.

python -m tests.invariant_driver OUT METHOD GRAPH
"""

import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from gossamer import DecentralizedDataParallel

LR = 0.05


def main(out, method, graph):
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DecentralizedDataParallel(nn.Linear(4, 2, bias=False).double(), graph, method=method, timeout=60)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    model.gossip(optimizer)
    generator = torch.Generator().manual_seed(rank)
    log = (out / f"rank-{rank}.{os.getpid()}.log").open("w", buffering=1)
    while not ((last := out / "last").exists() and model.steps >= int(last.read_text())):
        optimizer.zero_grad()
        (
            model(torch.randn(8, 4, generator=generator, dtype=torch.float64)) - rank
        ).square().mean().backward()  # data that differ
        optimizer.step()
        state = {name: vector.tensors[0][0].tolist() for name, vector in model._driver.now.state.items()}
        x = [number for p in model.parameters() for number in p.detach().flatten().tolist()]
        log.write(json.dumps({"step": model.steps, "members": model.members, "x": x, **state}) + "\n")
        (out / f"rank-{rank}.{os.getpid()}.pid").touch()
        (out / f"rank-{rank}.{os.getpid()}.step").write_text(str(model.steps))
        time.sleep(0.01)  # what is left of the cores is for processes that start
    mean = model.mean(float(rank))
    (out / f"rank-{rank}.{os.getpid()}.json").write_text(
        json.dumps({"rank": rank, "steps": model.steps, "members": model.members, "mean": mean, "last": log.name})
    )


if __name__ == "__main__":
    import tests.no_compiler  # noqa: F401

    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3])
