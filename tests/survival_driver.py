"""A worker for the tests of survival, under ``gossamer launch``. Its parameters are checksums of themselves.

One half of the row is the number of the step in every element, on every worker; the other half is another number on each worker, the same in
every element. Any Round keeps both, whatever its weights, as long as rows are of the right step and whole.

python -m tests.survival_driver OUT GRAPH STEPS [SECONDS PER STEP] [NAME=VALUE …]
"""

import contextlib
import json
import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from gossamer import DecentralizedDataParallel

HALF = 64 * 1563  # so many numbers share a power of two in 8 bits, and must be alike
PARTS = 521  # of a half: what is rounded to 8 bits is right on the average only, of so many numbers


class Row(nn.Module):
    def __init__(self):
        super().__init__()
        self.row = nn.Parameter(torch.zeros(2 * HALF, dtype=torch.float64))
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, value):
        self.seen += 1
        return (self.row[HALF:] * value).sum() - self.row[:HALF].sum()


def main(out, graph, steps, pause, options):
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = DecentralizedDataParallel(
        Row(), graph, timeout=60, order=options.get("order", "awc"), send_copy="send_copy" in options
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=1e-9)
    name = f"rank-{rank}.{os.getpid()}"
    record = {"rank": rank, "pid": os.getpid(), "times": [], "changes": [], "wrong": [], "began": time.time()}

    def changed(change):
        record["changes"].append([time.time(), change.step, change.members, change.lost, change.joined, change.rejoined])
        if change.rejoined:  # what it took over is a few steps old
            record["momentum"] = len(optimizer.state) > 0
            with torch.no_grad():
                model.module.row[:HALF] = change.step
            if dies:  # it is back, so all may finish
                (out / "new").write_text(str(change.step + 100))
                (out / "new").rename(out / "last")

    model.gossip(optimizer, on_change=changed)
    saves = "saves" in options
    record["loaded"] = saves and model.load(out / "kept")
    record["from"] = model.steps
    generator = torch.Generator().manual_seed(os.getpid())
    mine = out / f"{name}.pid"
    slow, dies = options.get("slow"), options.get("dies")  # RANK,STEP,SECONDS and RANK,STEP
    while model.steps < last_step(out, steps):
        began = time.time()
        optimizer.zero_grad()
        model(float(torch.randn(1, generator=generator))).backward()
        optimizer.step()
        time.sleep(pause)
        record["times"].append([model.steps, round(began, 4), round(time.time() - began, 4)])
        check(model, record)
        if not mine.exists():
            mine.write_text(str(os.getpid()))
        if slow and slow.split(",")[:2] == [str(rank), str(model.steps)]:
            time.sleep(float(slow.split(",")[2]))
        if saves and model.steps == 20:
            model.save(out / "kept")
        if "later" in options and model.steps % 50 == 0:
            model.save(out / "later", background=True)
        (out / f"{name}.step").write_text(str(model.steps))
        if dies == f"{rank},{model.steps}" and not record["changes"]:
            os.kill(os.getpid(), signal.SIGKILL)
    mean = model.mean(float(rank))
    model.average_()
    check(model, record)
    record["graphs"] = [(change.step, change.graph) for change in model.schedule.changes]
    record |= {"mean": mean, "members": model.members, "ended": model.steps, "value": float(model.module.row[-1].detach())}
    (out / f"{name}.json").write_text(json.dumps(record))
    print(f"done at {model.steps} with {model.members}")


def last_step(out, steps):
    """STEPS, or what is written into a file meanwhile."""
    with contextlib.suppress(FileNotFoundError, ValueError):
        return int((out / "last").read_text())
    return steps


def check(model, record):
    row = model.module.row.detach()
    step, other = row[:HALF], row[HALF:]
    rounded = model.schedule.describe().startswith("ada-auto")
    if rounded:
        other = other.reshape(PARTS, -1).mean(1)
    off = float((step - model.steps).abs().max())
    spread = float(other.max() - other.min())
    # A row of another step is off by 1, a torn or half-mixed one by a part of it; the momentum of 1e-9 adds as much in each step.
    if off > 1e-3 or spread > (0.05 if rounded else 1e-9) * max(1.0, float(other.abs().max())):
        record["wrong"].append([model.steps, off, spread])


if __name__ == "__main__":
    import tests.no_compiler  # noqa: F401

    out, graph, steps, *rest = sys.argv[1:]
    pause = float(rest[0]) if rest else 0.0
    main(Path(out), graph, int(steps), pause, dict(part.split("=") for part in rest[1:]))
