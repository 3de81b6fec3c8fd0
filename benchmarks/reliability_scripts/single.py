"""Two hosts with one worker each. The worker of the second host dies once, and comes back."""

import json
import os
import signal
import time

import torch

import gossamer
from gossamer.members.roster import Change

last = 6000  # steps, if it never comes back; how long a start takes depends on the load


def changed(change: Change) -> None:
    global last
    if len(change.members) == 2:
        last = change.step + 200


model = gossamer.DecentralizedDataParallel(torch.nn.Linear(10, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
model.gossip(optimizer, on_change=changed)
while model.steps < last:
    optimizer.zero_grad()
    model(torch.randn(8, 10)).sum().backward()
    optimizer.step()
    time.sleep(0.01)
    if model.rank == 1 and model.steps == 45 and int(os.environ["GOSSAMER_TICKET"]) < 2:
        os.kill(os.getpid(), signal.SIGKILL)
print("RESULT", json.dumps({"rank": model.rank, "members": model.members}), flush=True)
