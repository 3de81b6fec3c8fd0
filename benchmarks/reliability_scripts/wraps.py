"""Models that are wrapped one after the other, in one process: what each leaves behind."""

import gc
import json
import sys
import threading
import time
from pathlib import Path

import torch

import gossamer


def held() -> list[int]:
    """Descriptors and threads."""
    return [len(list(Path("/proc/self/fd").iterdir())), threading.active_count()]


seen: list[list[float]] = []
first: list[int] = []
for number in range(int(sys.argv[1])):
    model = gossamer.DecentralizedDataParallel(torch.nn.Linear(512, 512), graph="ada-auto" if number % 3 else "auto")
    optimizer = torch.optim.Adam(model.parameters())
    model.gossip(optimizer)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.randn(8, 512)).square().mean().backward()
        optimizer.step()
    model.average_()
    rank = model.rank
    if number % 2:
        model.close()
    del model, optimizer
    gc.collect()
    deadline = time.monotonic() + 2  # threads that are ending close their connections
    while first and held() > first and time.monotonic() < deadline:
        time.sleep(0.02)
        gc.collect()
    first = first or held()
    megabytes = int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 1e6
    seen.append([*held(), round(megabytes, 1)])
print("RESULT", json.dumps({"rank": rank, "seen": seen}), flush=True)
