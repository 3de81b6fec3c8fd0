"""What DBench adds to training, and how heavy its report gets.

    python -m benchmarks.dbench

Overhead: the training of fashion-96 (ring, one thread, as in a bench) with a profile every 10 steps and the store, against the
same without, in alternating stretches of 40 steps. Report: a store of 200 runs (10 methods, 4 scales, 5 seeds), made by copying
real runs, opened in headless Chromium.
"""

from __future__ import annotations

import shutil
import sqlite3
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from benchmarks.timing import console, interleaved, verdict
from gossamer import Trainer
from gossamer.apps import tasks
from gossamer.dbench import bench, report
from gossamer.dbench import spec as specs
from gossamer.dbench.records import RecordFile, Rows
from gossamer.dbench.store import FILE, Store
from gossamer.rows.backends import Backend
from gossamer.rows.profile import Profile


def overhead(folder: Path) -> float:
    torch.set_num_threads(1)
    spec = specs.load("fashion-96")
    task = tasks.make(spec.task.name)
    cell = specs.Cell("ring", 96, 0)
    file = RecordFile(folder / "ring.records", "")
    file.begin({}, "vmap:64", 1, [])
    seen: list[Profile] = []

    def trainer(every: int) -> Trainer:
        made = Trainer(task, replace(spec.settings(cell), epochs=100, profile_every=every), "ring", on_profile=seen.append)
        made.replicas.backend = Backend("vmap", 64)
        return made

    plain, watched = trainer(0), trainer(10)
    plain.value = watched.value = lambda: 0.0  # type: ignore[method-assign]  # evaluation is not what is compared

    def stretch(trainer: Trainer) -> None:
        trainer.run(until=trainer.step + 40)
        if trainer is watched:
            file.add(Rows(seen, trainer.history[-1:], trainer.schedule.changes))
            seen.clear()

    ways: dict[str, Callable[[], object]] = {"plain": lambda: stretch(plain), "watched": lambda: stretch(watched)}
    times = interleaved(ways, 11, "profile and records")
    console.print(f"40 steps of fashion-96: {times['plain']:.0f} ms plain, {times['watched']:.0f} ms with profile and records")
    return times["watched"] / times["plain"] - 1


def large_store(folder: Path, seeds: int) -> Path:
    """The output of a bench of 10 methods, 4 scales and so many seeds: real runs of one seed, and copies."""
    names = [
        "ring",
        "torus",
        "exponential",
        "complete",
        "ada",
        "star",
        "hypercube",
        "one-peer-exponential",
        "one-peer-ring",
        "base:k=1",
    ]
    raw = {
        "name": "large",
        "replicas": [8, 16, 32, 64],
        "methods": names,
        "seeds": list(range(seeds)),
        "backend": "tape",
        "task": {"name": "digits/mlp", "epochs": 10, "batch": 2},
        "optimizer": {"lr": 0.1},
        "profile": {"every": 5},
    }
    seed = specs.build(raw | {"seeds": [0]})
    bench(seed, folder / "seed", quiet=True)
    out = folder / "large"
    out.mkdir()
    Store.create(out / FILE, specs.build(raw), ("accuracy", True), {}).close()
    shutil.copy(folder / "seed" / FILE, folder / "copy.sqlite")
    db = sqlite3.connect(out / FILE)
    db.execute("ATTACH ? AS real", (str(folder / "seed" / FILE),))
    pairs = "main.runs m JOIN real.runs r ON m.method = r.method AND m.replicas = r.replicas"
    for table in ("epochs", "profiles", "events"):
        columns = ", ".join(f"t.{row[1]}" for row in db.execute(f"PRAGMA real.table_info({table})") if row[1] != "run")
        db.execute(f"INSERT INTO main.{table} SELECT m.id, {columns} FROM {pairs} JOIN real.{table} t ON t.run = r.id")
    for column in (row[1] for row in db.execute("PRAGMA real.table_info(runs)").fetchall()):
        if column not in ("id", "method", "replicas", "seed"):
            same = f"SELECT r.{column} FROM real.runs r WHERE r.method = m.method AND r.replicas = m.replicas"
            db.execute(f"UPDATE main.runs AS m SET {column} = ({same})")
    db.commit()
    db.close()
    return out


def large_report(folder: Path) -> tuple[float, float]:
    """Seconds to open, and megabytes."""
    path = report.write(large_store(folder, seeds=5))
    return _open(path), path.stat().st_size / 1e6


def _open(path: Path) -> float:
    from selenium import webdriver
    from selenium.webdriver.chrome.options import Options
    from selenium.webdriver.chrome.service import Service

    options = Options()
    options.binary_location = shutil.which("chromium") or ""
    for flag in (
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-background-networking",
        "--disable-component-update",
    ):
        options.add_argument(flag)
    driver = webdriver.Chrome(options=options, service=Service(shutil.which("chromedriver")))
    times = []
    for _ in range(3):
        began = time.perf_counter()
        driver.get(f"file://{path}")
        assert driver.execute_script("return document.documentElement.dataset.ready") == "yes"
        times.append(time.perf_counter() - began)
    driver.quit()
    return sorted(times)[1]


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        met = [verdict("profile every 10 steps and store, share of training time", overhead(folder), 0.05)]
        seconds, megabytes = large_report(folder)
        met.append(verdict("report of 200 runs, seconds to open", seconds, 3))
        met.append(verdict("report of 200 runs, MB", megabytes, 12))
    raise SystemExit(0 if all(met) else 1)


if __name__ == "__main__":
    main()
