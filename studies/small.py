"""One small cell of each experiment: minutes of training cut down to seconds, so that CI can repeat it.

What was committed must come out again: who sees which samples and what ada-auto decides to the letter, the metric within what the
committed seeds show, because floats may differ between processors.
"""

from __future__ import annotations

import hashlib
import json
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gossamer.apps import tasks
from gossamer.dbench import cell as cells
from gossamer.dbench import spec as specs

SPECS = Path(__file__).parent / "specs"
FILE = Path(__file__).parent / "small.json"
SEEDS = range(5)
_STEPS = 5  # whose samples are looked at


@dataclass(frozen=True)
class Small:
    """``task``: what is different from the experiment's."""

    experiment: str
    method: str
    replicas: int
    task: dict[str, Any]


CELLS = (
    Small("scale", "ring", 12, {"epochs": 1, "options": {"train": 9600, "test": 2000}}),
    Small("sqrt", "exponential", 48, {"epochs": 1, "options": {"train": 19200, "test": 2000}}),
    Small("fashion", "ada-auto", 96, {"epochs": 2, "options": {"train": 15360, "test": 2000}}),
    Small("n1008", "exponential", 1008, {"epochs": 3, "options": {"train": 24192, "test": 2000}}),
    Small("cifar", "ada-auto", 96, {"epochs": 1, "options": {"train": 7680, "test": 1000}}),
    Small("cifar8", "torus", 96, {"epochs": 1, "options": {"train": 7680, "test": 1000}}),
    Small("awc", "one-peer-exponential", 96, {"epochs": 2, "options": {"train": 15360, "test": 2000}}),
    Small("lstm", "ada-auto", 96, {"epochs": 1, "options": {"train": 40000, "test": 3000}}),
    Small("adam", "accumadam", 16, {"epochs": 1, "options": {"train": 131072, "test": 8192}}),
)


def run(small: Small, seed: int) -> dict[str, Any]:
    """Trains it; raises a GossamerError if its data are not on this machine."""
    raw = tomllib.loads((SPECS / f"{small.experiment}.toml").read_text())
    task = raw["task"]
    raw["task"] = task | small.task | {"options": task.get("options", {}) | small.task.get("options", {})}
    raw |= {"replicas": [small.replicas], "seeds": [seed], "backend": "tape"}
    raw.pop("profile", None)
    spec = specs.build(raw)
    (cell,) = (cell for cell in spec.cells() if cell.method == small.method)
    made = tasks.make(spec.task.name, None, spec.task.options, spec.task.batch)
    trainer = cells.trainer_for(spec, cell, made, "cpu")
    order = hashlib.sha256()
    for step in range(min(_STEPS, trainer.steps)):
        order.update(trainer.batches.batch(step, 0, small.replicas)[1].numpy().tobytes())
    trainer.run()
    return {
        "experiment": small.experiment,
        "method": small.method,
        "replicas": small.replicas,
        "seed": seed,
        "value": trainer.value(),
        "order": order.hexdigest()[:16],
        "changes": [[change.step, change.graph] for change in trainer.schedule.changes],
    }


def write() -> None:
    rows = [json.dumps(run(small, seed)) for small in CELLS for seed in SEEDS]
    FILE.write_text("[\n" + ",\n".join(rows) + "\n]\n")
