"""A worker for kills and pauses. Its parameters are checksums of themselves, and its log tells what it saw, also if it is killed.

One half of the row is the number of the step in every element, on every worker. The other half is another number on each worker, the same
in every element. Any Round keeps both, whatever its weights, as long as rows are of the right step and whole.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import struct
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import gossamer
from gossamer.members.roster import Change

HALF = 64 * 1024  # 64 numbers share a power of two in 8 bits
PARTS = 128  # of a half: what is rounded to 8 bits is right on the average only, of so many numbers
RECORD = struct.Struct("<cqddq")  # a kind, the step, the time, a value, the members as a sum of 2**rank
STEP, MEAN, SAVE, WRONG = b"s", b"m", b"v", b"w"


class Row(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.row = nn.Parameter(torch.zeros(2 * HALF, dtype=torch.float64))

    def forward(self, value: float) -> Tensor:
        return (self.row[HALF:] * value).sum() - self.row[:HALF].sum()


class Worker:
    """``out``: the job's folder. ``every``: the numbers of steps between two means, two consensus blocks, two saves; 0 for none."""

    def __init__(self, graph: str, out: Path, every: dict[str, int], pause: float) -> None:
        self.out, self.every, self.pause = out, every, pause
        self.wrong = self.rejoined = 0
        torch.set_num_threads(1)
        self.log = open(out / f"{os.environ['RANK']}.{os.getpid()}.log", "ab", buffering=0)  # noqa: SIM115  (until the end)
        self.model = gossamer.DecentralizedDataParallel(Row(), graph)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1.0, momentum=1e-9)
        self.generator = torch.Generator().manual_seed(os.getpid())
        self.tolerance = 0.05 if "bits=8" in graph else 1e-9
        self.model.gossip(self.optimizer, on_change=self.changed)

    @property
    def row(self) -> Tensor:
        row: Tensor = self.model.module.row  # type: ignore[assignment]
        return row.detach()

    def changed(self, change: Change) -> None:
        if change.rejoined:  # the state that it took over is a few steps old
            self.rejoined += 1
            self.row[:HALF] = change.step

    def write(self, kind: bytes, value: float = 0.0) -> None:
        members = sum(2**rank for rank in self.model.members)
        self.log.write(RECORD.pack(kind, self.model.steps, time.time(), value, members))

    def check(self) -> None:
        """A row of another step is off by 1, a torn or half-mixed one by a part of it."""
        off = float((self.row[:HALF] - self.model.steps).abs().max())
        other = self.row[HALF:].reshape(PARTS, -1).mean(1)
        spread = float(other.max() - other.min())
        if not (off <= 1e-3 and spread <= self.tolerance * max(1.0, float(other.abs().max()))):
            self.wrong += 1
            self.write(WRONG, max(off, spread))

    def step(self) -> None:
        model = self.model
        self.optimizer.zero_grad()
        model(float(torch.randn(1, generator=self.generator))).backward()
        self.optimizer.step()
        self.write(STEP)
        self.check()
        if self.due("mean"):
            self.write(MEAN, float(model.mean(2.0**model.rank)))
        if self.due("consensus"):
            with model.consensus():
                self.check()
        if self.due("save"):
            model.save(self.out / "kept")
            self.write(SAVE)
        time.sleep(self.pause)

    def due(self, what: str) -> bool:
        return bool(self.every[what]) and self.model.steps % self.every[what] == 0

    def train(self) -> None:
        while True:
            try:
                self.step()
                if self.model.steps >= self.last():
                    self.model.average_()
                    break
            except gossamer.Evicted:
                continue  # with its next step it joins the others again
        self.check()
        self.report(rejoined=self.rejoined, leads=self.model.leads)

    def load(self) -> None:
        loaded = self.model.load(self.out / "kept")
        self.check()
        self.report(loaded=loaded, wrong=self.wrong)

    def last(self) -> float:
        """The step to end with. It is written into a file when the job is to end."""
        with contextlib.suppress(FileNotFoundError):
            return int((self.out / "last").read_text())
        return float("inf")

    def report(self, **more: Any) -> None:
        digest = hashlib.blake2b(self.row.numpy().tobytes(), digest_size=8).hexdigest()
        found = {"rank": self.model.rank, "members": self.model.members, "steps": self.model.steps, "digest": digest}
        print("RESULT", json.dumps(found | more), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("graph")
    parser.add_argument("out", type=Path)
    parser.add_argument("--pause", type=float, default=0.01, help="seconds between two steps")
    parser.add_argument("--load", action="store_true", help="load the checkpoint, and end")
    for what in ("mean", "consensus", "save"):
        parser.add_argument(f"--{what}", type=int, default=0)
    args = parser.parse_args()
    every = {"mean": args.mean, "consensus": args.consensus, "save": args.save}
    worker = Worker(args.graph, args.out, every, args.pause)
    if args.load:
        worker.load()
    else:
        worker.train()


if __name__ == "__main__":
    main()
