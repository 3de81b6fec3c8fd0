"""A worker for test_gradient_survival.py, under ``gossamer launch``: gradients are averaged, and each step's parameters are written down.

python -m tests.gradient_driver OUT METHOD
"""

import hashlib
import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from gossamer import DecentralizedDataParallel
from gossamer.methods.policies import auto


def main(out, method):
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(20, 300), nn.Tanh(), nn.Linear(300, 10), nn.LayerNorm(10))
    module[2].bfloat16()  # a second row
    model = DecentralizedDataParallel(Rows(module), method, timeout=60)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model.gossip(optimizer)
    auto._LATER = 1  # one trial after another
    name = out / f"rank-{rank}.{os.getpid()}"
    log = name.with_suffix(f".{os.getpid()}.log").open("w", buffering=1)
    generator = torch.Generator().manual_seed(os.getpid())
    while not ((last := out / "last").exists() and model.steps >= int(last.read_text())):
        optimizer.zero_grad()
        for _ in range(2):  # two means in a step
            model(torch.randn(8, 20, generator=generator)).square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        state = [p.detach().float().numpy().tobytes() for p in model.parameters()]
        state += [t.float().numpy().tobytes() for s in optimizer.state.values() for t in s.values()]
        log.write(f"{model.steps} {hashlib.sha256(b''.join(state)).hexdigest()[:16]} {len(model.members)}\n")
        (out / f"rank-{rank}.{os.getpid()}.pid").touch()
        (out / f"rank-{rank}.{os.getpid()}.step").write_text(str(model.steps))
        time.sleep(0.01)  # what is left of the cores is for processes that start
    mean = model.mean(float(rank))
    (out / f"rank-{rank}.{os.getpid()}.json").write_text(
        json.dumps({"rank": rank, "steps": model.steps, "members": model.members, "mean": mean, "last": log.name})
    )


class Rows(nn.Module):
    def __init__(self, module):
        super().__init__()
        self.module_ = module

    def forward(self, x):
        first, tanh, second, norm = self.module_
        return norm(second(tanh(first(x)).bfloat16()).float())


if __name__ == "__main__":
    import tests.no_compiler  # noqa: F401

    main(Path(sys.argv[1]), sys.argv[2])
