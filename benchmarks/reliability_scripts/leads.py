"""Rank 0 dies a few steps before the end. One of the others leads, and saves."""

import json
import os
import signal

import torch

import gossamer

model = gossamer.DecentralizedDataParallel(torch.nn.Linear(10, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
model.gossip(optimizer)
while model.steps < 50:
    optimizer.zero_grad()
    model(torch.randn(8, 10)).sum().backward()
    optimizer.step()
    if model.rank == 0 and model.steps == 45:
        os.kill(os.getpid(), signal.SIGKILL)
model.average_()
if model.leads:
    torch.save(model.state_dict(), "final2.pt")
print("RESULT", json.dumps({"rank": model.rank, "members": model.members, "wrote": model.leads}), flush=True)
