"""A worker for tests/test_collectives.py: collectives in every step, and a death, a pause or an end at a given moment.

python -m tests.collective_driver OUT CASE
"""

import gc
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import torch

import gossamer
import tests.no_compiler  # noqa: F401

out, case = Path(sys.argv[1]), sys.argv[2]


def wrapped(**options):
    torch.manual_seed(0)
    made = gossamer.DecentralizedDataParallel(torch.nn.Linear(64, 64), **options)
    optimizer = torch.optim.SGD(made.parameters(), lr=0.01, momentum=0.9)
    made.gossip(optimizer)
    return made, optimizer


def step(model, optimizer):
    optimizer.zero_grad()
    model(torch.randn(4, 64)).square().mean().backward()
    optimizer.step()


def stop_for(seconds, pid):
    subprocess.Popen(["sh", "-c", f"sleep {seconds}; kill -CONT {pid}"])
    os.kill(pid, signal.SIGSTOP)


def deaths():
    """Rank 2 dies just after a step, rank 0 in the last one: the others have means, checkpoints and one leader."""
    model, optimizer = wrapped(graph="one-peer-exponential")
    record = {"means": []}
    while model.steps < 60:
        step(model, optimizer)
        mean = model.mean(float(2**model.rank))
        record["means"].append([mean, model.members])
        if model.steps % 20 == 0:
            model.save(out / "kept")
        if (model.rank, model.steps) in ((2, 30), (0, 59)):
            os.kill(os.getpid(), signal.SIGKILL)
    model.average_()
    weights = model.module.weight.detach()
    return record | {"leads": model.leads, "members": model.members, "sum": float(weights.double().sum())}


def evicted():
    """Rank 0 is away for longer than ``evict_after``, and then wants the last average."""
    model, optimizer = wrapped()
    for _ in range(10):
        step(model, optimizer)
    if model.rank == 0:
        stop_for(5, os.getpid())
    else:
        time.sleep(1)
        while model.steps < 40 or len(model.members) > 1:
            step(model, optimizer)
    try:
        model.average_()
    except gossamer.Evicted as error:
        return {"evicted": str(error)}
    return {"members": model.members, "finite": bool(torch.isfinite(model.module.weight).all())}


def held():
    threads = [thread.name for thread in threading.enumerate() if thread.name.startswith("gossamer")]
    return [len(os.listdir("/proc/self/fd")), len(threads)]


def wraps():
    """Models that are dropped, or closed, leave nothing."""
    seen = []
    for number in range(12):  # each kind twice
        model, optimizer = wrapped(graph="ada-auto" if number % 3 else "one-peer-exponential")
        for _ in range(2):
            step(model, optimizer)
        model.average_()
        if number % 2:
            model.close()
        del model, optimizer
        gc.collect()
        deadline = time.monotonic() + 2  # threads that are ending close their connections
        while (now := held()) > (seen[0] if seen else [0, 0]) and time.monotonic() < deadline:
            time.sleep(0.02)
            gc.collect()  # what the model's end let go of
        seen.append(now)
    return {"seen": seen}


def silent():
    """The store does not answer for ever: a worker in a collective ends in time."""
    model, optimizer = wrapped(timeout=6)
    for _ in range(3):
        step(model, optimizer)
    model.mean(1.0)
    (out / f"ready-{model.rank}").write_text(str(os.getpid()))
    while not (out / "stopped").exists():
        time.sleep(0.05)
    began = time.monotonic()
    try:
        model.mean(1.0)
    except gossamer.GossamerError as error:
        (out / f"silent-{model.rank}.json").write_text(json.dumps({"error": str(error), "seconds": time.monotonic() - began}))
        os._exit(3)
    return {}


def mixed():
    """One rank saves where the others average."""
    model, optimizer = wrapped(timeout=20)
    step(model, optimizer)
    try:
        model.save(out / "kept") if model.rank == 0 else model.average_()
    except gossamer.GossamerError as error:
        return {"error": str(error)}
    return {"error": None}


torch.set_num_threads(1)
if "GOSSAMER_STORE" not in os.environ:
    torch.distributed.init_process_group("gloo")
made = {"deaths": deaths, "evicted": evicted, "wraps": wraps, "silent": silent, "mixed": mixed}[case]()
(out / f"rank-{os.environ['RANK']}.json").write_text(json.dumps(made))
