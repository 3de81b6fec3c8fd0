"""A mean in each step, and rank 2 dies. Worker r contributes 2**r, so each mean tells which workers took part in it."""

import json
import os
import signal
import time

import torch

import gossamer

model = gossamer.DecentralizedDataParallel(torch.nn.Linear(100, 100))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
model.gossip(optimizer)
wrong = 0
while model.steps < 300:
    optimizer.zero_grad()
    model(torch.randn(8, 100)).sum().backward()
    optimizer.step()
    mean = model.mean(2.0**model.rank)
    wrong += abs(float(mean) * len(model.members) - sum(2**rank for rank in model.members)) > 1e-9
    if model.rank == 2 and model.steps == 100:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.005)
print("RESULT", json.dumps({"rank": model.rank, "members": model.members, "wrong": wrong}), flush=True)
