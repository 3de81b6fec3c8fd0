"""Interleaved repeats, medians, and a table with ratios: what all benchmarks here share."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Mapping

from rich.console import Console
from rich.progress import track

console = Console(width=150)


def interleaved(ways: Mapping[str, Callable[[], object]], repeats: int, label: str) -> dict[str, float]:
    """Median milliseconds of each way. Each runs once to warm up; then all take turns, in a new order each time, so that
    noise and neighbours hit them alike."""
    for run in ways.values():
        run()
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in track(range(repeats), description=label, console=console, transient=True):
        for name in random.sample(list(ways), len(ways)):
            began = time.perf_counter()
            ways[name]()
            times[name].append((time.perf_counter() - began) * 1e3)
    return {name: statistics.median(values) for name, values in times.items()}


def verdict(what: str, value: float, bar: float, at_most: bool = True) -> bool:
    """Print one bar and whether it was met."""
    met = value <= bar if at_most else value >= bar
    word = "at most" if at_most else "at least"
    console.print(f"[{'green' if met else 'red'}]{'met ' if met else 'MISSED'}[/]  {what}: {value:.3f} ({word} {bar})")
    return met
