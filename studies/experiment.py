"""An experiment of the study: its committed runs, and what they say of a method."""

from __future__ import annotations

import json
import statistics
from collections.abc import Collection
from pathlib import Path
from typing import Any

from gossamer.dbench.analysis import Estimate, estimate

CONTROL = "periodic:every=1,bits=8"  # ada-auto if it stayed where it begins
ORDER = (
    "centralized",
    "complete",
    "ada-auto",
    CONTROL,
    "ada",
    "periodic:every=8,gap=1",
    "exponential",
    "one-peer-exponential",
    "torus",
    "ring",
    "dadam",
    "accumadam",
    "centralized, lr 0.012",
    "complete, lr 0.012",
    "ada-auto, lr 0.012",
)


class Experiment:
    def __init__(self, name: str, data: dict[str, Any]) -> None:
        self.name, self.metric, self.runs = name, data["metric"], data["runs"]
        self.percent = self.metric["name"] == "accuracy"

    def select(self, method: str, n: int) -> list[dict[str, Any]]:
        return [run for run in self.runs if run["method"] == method and run["replicas"] == n]

    @property
    def scales(self) -> list[int]:
        return sorted({run["replicas"] for run in self.runs})

    @property
    def methods(self) -> list[str]:
        names = list(dict.fromkeys(run["method"] for run in self.runs))
        return sorted(names, key=lambda name: ORDER.index(name) if name in ORDER else len(ORDER) + names.index(name))

    def value(self, run: dict[str, Any], what: str = "value") -> float:
        """Accuracy in percent, or perplexity; a run that diverged has nothing, which counts as a guess among ten classes."""
        value = run[what]
        if value is None:
            return 10.0 if self.percent else float("nan")
        return 100 * value if self.percent else value

    def values(self, method: str, n: int, what: str = "value") -> Estimate:
        """Over the seeds that all methods have: some have more, for pairs."""
        return estimate(self.value(run, what) for run in self.select(method, n) if run["seed"] in self.seeds(n))

    def seeds(self, n: int) -> set[int]:
        return set.intersection(*({run["seed"] for run in self.select(m, n)} for m in self.methods))

    def error(self, method: str, n: int) -> float:
        """In percent: the median over seeds, because one that goes astray would be all that one sees in a mean."""
        return 100 - statistics.median(self.value(run) for run in self.select(method, n))

    def said(self, method: str, n: int, what: str = "value") -> str:
        runs = self.select(method, n)
        diverged = sum(run["status"] == "diverged" for run in runs)
        return say(self.values(method, n, what)) + (f" ({diverged} of {len(runs)} diverged)" if diverged else "")

    def against(self, method: str, other: str, n: int, seeds: Collection[int] | None = None) -> Estimate:
        """Differences of runs with the same seed: in points, or in percent of the other's perplexity. ``seeds``: of these only."""
        theirs = {run["seed"]: self.value(run) for run in self.select(other, n) if seeds is None or run["seed"] in seeds}
        pairs = [(self.value(run), theirs[run["seed"]]) for run in self.select(method, n) if run["seed"] in theirs]
        return estimate(a - b if self.percent else 100 * (a / b - 1) for a, b in pairs)

    @property
    def unit(self) -> str:
        return "accuracy, %" if self.percent else "perplexity"

    def mean_of(self, what: str, method: str, n: int) -> float:
        return estimate(run[what] for run in self.select(method, n)).mean

    def share(self, method: str, n: int) -> float:
        """Of the bytes of all-reduce training."""
        whole = self.mean_of("bytes", "complete" if "complete" in self.methods else "centralized", n)
        return self.mean_of("bytes", method, n) / whole


def say(e: Estimate, digits: int = 2, sign: bool = False) -> str:
    spread = f" ± {e.half:.{digits}f}" if e.seeds > 1 else ""
    return f"{e.mean:{'+' if sign else ''}.{digits}f}{spread}"


def experiments(folder: Path) -> dict[str, Experiment]:
    return {path.stem: Experiment(path.stem, json.loads(path.read_text())) for path in sorted(folder.glob("*.json"))}
