"""The frontier: what a byte that is not sent costs in loss, and what it gains in time. ``docs/frontier.md`` tells what was found.

    python -m studies run frontier-gpt          # the losses: hours, resumable
    python -m benchmarks.frontier               # the step times, in the lab: root; resumable, each way is kept once it is measured
    python -m benchmarks.frontier --only 200mbit-4 --ways "DDP; diloco:H=9,lr=0.7,momentum=0.5, 8bits"
    python -m benchmarks.frontier --page        # tables and figures of the page from both

Time to a loss = steps to that loss (real training, 4 replicas in one process, DBench) × time of a step (4 hosts of the lab, 31.5 M
parameters, 20 ms of computing that is pretended: benchmarks/frontier_steps.py).
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import chart
from benchmarks.frontier_steps import COMPUTE_MS, work
from benchmarks.timing import console, verdict
from gossamer.dbench.analysis import Estimate, estimate
from studies.experiment import Experiment, experiments, say
from studies.tables import with_tables

ROOT = Path(__file__).parent.parent
STEPS = ROOT / "docs" / "frontier.json"
PAGE = ROOT / "docs" / "frontier.md"
HOSTS = 4
SETTINGS = {"loopback-4": None, "5gbit-4": "5gbit", "1gbit-4": "1gbit", "200mbit-4": "200mbit", "50mbit-4": "50mbit"}
DDP, FP16, POWER, HOOK = "DDP", "DDP, fp16 hook", "DDP, PowerSGD rank 4", "DDP, our 8-bit hook"


@dataclass(frozen=True)
class Contender:
    """``label``: of the page. ``loss``: the method of the experiment that has its loss. ``way``: of ``frontier_steps``; its first ``ddp``
    steps take as long as DDP's."""

    label: str
    loss: str
    way: str
    kind: str = "ours"  # a key of chart.COLOURS
    ddp: int = 0


def _ours(text: str) -> Contender:
    return Contender(text, text, text)


CONTENDERS = (
    Contender("DDP", "all-reduce", DDP, "ddp"),
    Contender("DDP, fp16 hook", "fp16 hook", FP16, "other"),
    Contender("DDP, PowerSGD hook, rank 4", "PowerSGD, rank 4", POWER, "other", 110),
    Contender("post-local SGD, H=8", "post-local SGD, H=8", "post-local SGD, H=8", "other", 110),
    Contender("DiLoCo, H=32, as published", "DiLoCo, H=32, as published", "diloco:H=32,lr=0.7,momentum=0.9", "other"),
    Contender("decent-dp", "decent-dp", "decent-dp", "other"),
    Contender("DDP, our 8-bit hook", "all-reduce, 8bits", HOOK),
    Contender("DDP, our 4-bit hook with feedback", "all-reduce, 4bits with feedback", "DDP, our 4-bit hook"),
    _ours("all-reduce, 8bits"),
    Contender("one peer, 8bits", "one peer, 8bits", "one-peer-exponential, choco:cycle=2"),
    _ours("local:H=2, 8bits"),
    _ours("diloco:H=9,lr=0.7,momentum=0.5, 8bits"),
    _ours("diloco:H=32,lr=0.7,momentum=0.5, 8bits"),
    _ours("diloco:H=64,lr=0.7,momentum=0.5,delay=56, 4bits"),
    _ours("diloco:H=192,lr=0.7,momentum=0.5,delay=180, 4bits"),
)
BARS = {  # setting -> what must hold of step times (issue 22)
    "200mbit-4": ((DDP, 2.5), (FP16, 1.3)),
}
UTILIZATION = {"200mbit-4": 0.95, "50mbit-4": 0.80}

Measured = Mapping[str, Mapping[str, Mapping[str, float]]]  # setting -> way -> what Way's worker says


# --- Step times ----------------------------------------------------------------------------------------------------------------


def measure(setting: str, ways: list[str]) -> Iterator[dict[str, Any]]:
    """One job for all of them: a lab, and processes that take one way after the other."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "ways.jsonl"
        command = ["-m", "benchmarks.frontier", "--worker", "; ".join(ways), "--out", str(out)]
        try:
            _launch(setting, command)
        finally:
            if out.exists():  # what was measured before an interrupt, too
                yield from map(json.loads, out.read_text().splitlines())


def _launch(setting: str, command: list[str]) -> None:
    if SETTINGS[setting] is None:
        from tests import workers  # the same launcher as in the tests

        for worker in workers.run(HOSTS, command, timeout=3600):
            if worker.code:
                raise SystemExit(worker.out + worker.err)
        return
    from gossamer.runtime.lab import Lab

    with Lab(hosts=HOSTS, rate=SETTINGS[setting]) as lab:
        result = lab.run(["python", *command], timeout=3600, echo=False)
    if result.exit_code:
        raise SystemExit("\n".join(result.outputs))


def waiting_ms(way: Mapping[str, float]) -> float:
    """For the network, in a step: neither computing nor compressing, copying and arithmetic, which an accelerator does in next to no time;
    nor waiting for one of the two cores that four workers share here."""
    return max(0.0, way["ms"] - COMPUTE_MS - way["own_ms"] - way["queued_ms"])


def utilization(way: Mapping[str, float]) -> float:
    return COMPUTE_MS / (COMPUTE_MS + waiting_ms(way))


def show(setting: str, ways: Mapping[str, Mapping[str, float]]) -> None:
    console.print(f"\n[bold]{setting}[/]")
    for name, way in ways.items():
        console.print(
            f"  {name:52} {way['ms']:9.1f} ms   processor {way['own_ms']:7.1f} + {way['others_ms']:6.1f}, "
            f"no core {way['queued_ms']:6.1f}   "
            f"waiting {waiting_ms(way):9.1f}   utilization {utilization(way):6.1%} ({COMPUTE_MS / way['ms']:6.1%})   "
            f"{way['sent_mb']:7.2f} MB"
        )


def bars(steps: Measured) -> bool:
    """Those of issue 22 that are about step times."""
    met = True
    for setting, pairs in BARS.items():
        ways = steps.get(setting, {})
        for other, bar in pairs:
            for mine in (HOOK, "all-reduce, 8bits"):
                if mine in ways and other in ways:
                    met &= verdict(f"{setting}: {other} / {mine}", ways[other]["ms"] / ways[mine]["ms"], bar, at_most=False)
    for setting, bar in UTILIZATION.items():
        ours = {c.way for c in CONTENDERS if c.kind == "ours"} & set(steps.get(setting, {}))
        if ours:
            best = max(ours, key=lambda way: utilization(steps[setting][way]))
            met &= verdict(f"{setting}: utilization, {best}", utilization(steps[setting][best]), bar, at_most=False)
    return met


# --- Losses --------------------------------------------------------------------------------------------------------------------


class Losses:
    """Of an experiment: nats per byte (the logarithm of the perplexity) at the end of training."""

    def __init__(self, x: Experiment, longer: Experiment | None = None) -> None:
        self.x, self.longer = x, longer

    def of(self, method: str, x: Experiment | None = None) -> dict[int, float]:
        """By seed. A run that diverged has none."""
        runs = (x or self.x).runs
        return {r["seed"]: math.log(r["value"]) for r in runs if r["method"] == method and r["value"] is not None}

    def against(self, method: str, other: str) -> Estimate:
        """The difference in percent, seed by seed."""
        mine, theirs = self.of(method), self.of(other)
        return estimate(100 * (mine[seed] / theirs[seed] - 1) for seed in sorted({*mine} & {*theirs}))

    def share(self, method: str) -> float:
        """Of all-reduce's bytes."""
        a, b = (estimate(r["bytes"] for r in self.x.runs if r["method"] == m).mean for m in (method, "all-reduce"))
        return a / b

    @property
    def steps(self) -> int:
        return max(r["steps"] for r in self.x.runs)

    def slope(self) -> float | None:
        """Of all-reduce: by how much the loss falls while the steps become e times as many."""
        if self.longer is None:
            return None
        short, long = self.of("all-reduce"), self.of("all-reduce", self.longer)
        both = sorted({*short} & {*long})
        if not both:
            return None
        apart = math.log(max(r["steps"] for r in self.longer.runs) / self.steps)
        return estimate(short[seed] - long[seed] for seed in both).mean / apart

    def steps_to(self, method: str) -> float | None:
        """Until it is at the loss of all-reduce's end: training as long as that, each length with a schedule of its own."""
        slope, mine = self.slope(), self.of(method)
        if slope is None or not mine:
            return None
        theirs = self.of("all-reduce")
        behind = estimate(mine[seed] - theirs[seed] for seed in sorted({*mine} & {*theirs})).mean
        return self.steps * math.exp(behind / slope)


def seconds_to(contender: Contender, losses: Losses, ways: Mapping[str, Mapping[str, float]]) -> float | None:
    count = losses.steps_to(contender.loss)
    if count is None or contender.way not in ways or DDP not in ways:
        return None
    early = min(contender.ddp, count)
    return (early * ways[DDP]["ms"] + (count - early) * ways[contender.way]["ms"]) / 1e3


# --- The page ------------------------------------------------------------------------------------------------------------------


def loss_table(x: Experiment, longer: Experiment | None = None) -> Iterator[str]:
    yield "| | loss, nats per byte | against DDP, % | bytes of DDP's | learning rate | seeds |"
    yield "| --- | --- | --- | --- | --- | --- |"
    losses = Losses(x, longer)
    named = {c.loss: c.label for c in reversed(CONTENDERS)}
    for method in sorted({r["method"] for r in x.runs}, key=lambda m: -losses.share(m)):
        found = losses.of(method)
        beside = "" if method == "all-reduce" else say(losses.against(method, "all-reduce"), 2, sign=True)
        rate = next(r["lr"] for r in x.runs if r["method"] == method)
        label = named.get(method, method)
        yield (
            f"| {label} | {say(estimate(found.values()), 4)} | {beside} | {100 * losses.share(method):.2g} % | {rate:g} | {len(found)} |"
        )


def accuracy_table(x: Experiment) -> Iterator[str]:
    yield "| | accuracy, % | against DDP, points | bytes of DDP's | learning rate | seeds |"
    yield "| --- | --- | --- | --- | --- | --- |"
    losses, n = Losses(x), x.scales[0]
    named = {c.loss: c.label for c in reversed(CONTENDERS)}
    for method in sorted({r["method"] for r in x.runs}, key=lambda m: -losses.share(m)):
        beside = "" if method == "all-reduce" else say(x.against(method, "all-reduce", n), sign=True)
        runs, share = x.select(method, n), 100 * losses.share(method)
        yield f"| {named.get(method, method)} | {x.said(method, n)} | {beside} | {share:.2g} % | {runs[0]['lr']:g} | {len(runs)} |"


def step_table(steps: Measured) -> Iterator[str]:
    yield "| | " + " | ".join(s.removesuffix("-4") for s in SETTINGS if s in steps) + " | compressing, copying | sent |"
    yield "| --- " * (len([s for s in SETTINGS if s in steps]) + 3) + "|"
    for way in dict.fromkeys(way for ways in steps.values() for way in ways):
        cells, found = [], [ways[way] for ways in steps.values() if way in ways]
        for setting in SETTINGS:
            if setting in steps:
                one = steps[setting].get(way)
                cells.append(
                    "" if one is None else f"{one['ms']:.0f} ms, {utilization(one):.0%} ({COMPUTE_MS / one['ms']:.0%})"
                )
        own = min(one["own_ms"] + one["others_ms"] for one in found)
        yield f"| {way} | " + " | ".join(cells) + f" | {own:.0f} ms | {found[0]['sent_mb']:.3g} MB |"


def time_table(x: Experiment, longer: Experiment | None, steps: Measured) -> Iterator[str]:
    where = [s for s in SETTINGS if s in steps]
    yield "| | steps | " + " | ".join(s.removesuffix("-4") for s in where) + " |"
    yield "| --- " * (len(where) + 2) + "|"
    losses = Losses(x, longer)
    for contender in CONTENDERS:
        count = losses.steps_to(contender.loss)
        if count is not None:
            times = [seconds_to(contender, losses, steps[s]) for s in where]
            cells = ["" if t is None else f"{t:.0f} s" for t in times]
            yield f"| {contender.label} | {count:.0f} | " + " | ".join(cells) + " |"


def frontier_figure(x: Experiment) -> str:
    losses, kinds = Losses(x), {c.loss: (c.label, c.kind) for c in reversed(CONTENDERS)}
    dots = []
    for method in dict.fromkeys(r["method"] for r in x.runs):
        e, (label, kind) = estimate(losses.of(method).values()), kinds.get(method, (method, "ours"))
        dots.append(chart.Dot(label, 100 * losses.share(method), e.mean, e.mean - e.half, e.mean + e.half, kind))
    note = f"Nano GPT over bytes, AdamW, 4 replicas, {losses.steps:,} steps; each with the learning rate that is best for it."
    panel = chart.Scatter("", "loss, nats per byte", dots, reach=0.5, best="lowest")
    return chart.scatters([panel], "Loss against bytes", note, "bytes of DDP's, %", columns=1)


def utilization_figure(steps: Measured) -> str:
    rates = {"50mbit-4": 50, "200mbit-4": 200, "1gbit-4": 1000, "5gbit-4": 5000}
    lines = []
    for contender in CONTENDERS:
        points = [(mbit, steps[s][contender.way]) for s, mbit in rates.items() if contender.way in steps.get(s, {})]
        if len(points) > 1:
            lines.append(chart.Line(contender.label, [mbit for mbit, _ in points], [100 * utilization(w) for _, w in points]))
    note = "31.5 M parameters, 20 ms of computing in a step (pretended), four hosts; compressing is not counted."
    return chart.lines(
        lines, "Share of time that a worker does not wait", note, "Mbit/s of each host", "compute utilization, %", log_x=True
    )


def write_page() -> None:
    found = experiments(ROOT / "studies" / "results")
    steps: Measured = json.loads(STEPS.read_text()) if STEPS.exists() else {}
    x, longer = found.get("frontier-gpt"), found.get("frontier-gpt-long")
    tables: dict[str, Any] = {"steps": lambda: step_table(steps)} if steps else {}
    if steps:
        (ROOT / "docs" / "frontier-utilization.svg").write_text(utilization_figure(steps))
    if x is not None:
        tables["losses"] = lambda: loss_table(x, longer)
        (ROOT / "docs" / "frontier.svg").write_text(frontier_figure(x))
        tables["times"] = lambda: time_table(x, longer, steps)
    if (mlp := found.get("frontier-mlp")) is not None:
        tables["accuracies"] = lambda: accuracy_table(mlp)
    PAGE.write_text(with_tables(PAGE.read_text(), {}, {name: ((), rows) for name, rows in tables.items()}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="settings, comma-separated: " + ", ".join(SETTINGS))
    parser.add_argument("--ways", help="ways, separated by '; ' (default: those of the page)")
    parser.add_argument("--again", action="store_true", help="measure them once more")
    parser.add_argument("--page", action="store_true", help="tables and figures of the page")
    parser.add_argument("--out", type=Path, default=STEPS)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        work(args.worker.split("; "), args.out)
        return
    if args.page:
        write_page()
        return
    wanted = args.only.split(",") if args.only else list(SETTINGS)
    if os.geteuid() != 0 and any(SETTINGS[setting] for setting in wanted):
        sys.exit("the lab needs root; --only loopback-4 does not")
    ways = args.ways.split("; ") if args.ways else list(dict.fromkeys(c.way for c in CONTENDERS))
    steps = json.loads(args.out.read_text()) if args.out.exists() else {}
    for setting in wanted:
        known = steps.setdefault(setting, {})
        missing = [way for way in ways if args.again or way not in known]
        try:
            for result in measure(setting, missing) if missing else ():
                known[result.pop("way")] = result
        except KeyboardInterrupt:
            sys.exit("Stopped. Give the same command again to go on.")
        finally:
            args.out.write_text(json.dumps(steps, indent=1) + "\n")
            show(setting, known)
    sys.exit(not bars(steps))


if __name__ == "__main__":
    main()
