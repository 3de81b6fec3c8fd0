"""Does the runtime model predict what the lab measures? Calibrated on 4 hosts, it predicts the median step of each method at both rates.

    python -m benchmarks.runtime_model                   # about half an hour; root, and a quiet machine
    python -m benchmarks.runtime_model --only 1gbit-128 --turns 3

Settings: 1 Gbit and 200 Mbit × batch 32 and 128 on the MLP of ``step_time.py``, whose workers do the measuring. This machine has
slow minutes: both rates are calibrated before each setting, and of each value the median is taken. Each rate is predicted twice: from
the calibrations at that rate, and from those at the other rate with nothing but the bandwidth exchanged.
What is compared is the median over windows of four steps (local steps average in every fourth).
Bars: mean absolute error at most 12 %, none above 25 %, and the methods in the right order. Two may change places if the measurement does
not tell them apart: medians within 5 % of each other, or neither is faster in three of four windows.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import sys
import tomllib
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks import step_time
from benchmarks.step_time import Setting, mlp
from benchmarks.timing import console, verdict
from gossamer.runtime import DDP, Gossip, Method, simulate
from gossamer.runtime import cluster as clusters
from gossamer.runtime.cluster import Cluster

METHODS: dict[str, Method] = {
    "ddp": DDP(),
    "one-peer-exponential": Gossip("one-peer-exponential"),
    "one-peer-exponential, bfloat16": Gossip("one-peer-exponential", wire="bfloat16"),
    "ring": Gossip("ring"),
    "ring, bfloat16": Gossip("ring", wire="bfloat16"),
    "complete": Gossip("complete"),
    "one-peer-exponential, H=4": Gossip("one-peer-exponential", local_steps=4),
}
RATES = ("1gbit", "200mbit")
BATCHES = (32, 128)
SETTINGS = {
    f"{rate}-{batch}": Setting(f"{rate}-{batch}", 4, 4, rate, batch, ("none", *METHODS)) for rate in RATES for batch in BATCHES
}
_ALIKE, _MOSTLY = 1.05, 0.75


def _job(batch: int) -> tuple[nn.Module, object, torch.optim.Optimizer]:
    model = mlp()
    x, y = torch.randn(batch, 1024), torch.randint(0, 10, (batch,))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    return model, lambda: nn.functional.cross_entropy(model(x), y), optimizer


def batch_32() -> tuple[nn.Module, object, torch.optim.Optimizer]:
    return _job(32)


def batch_128() -> tuple[nn.Module, object, torch.optim.Optimizer]:
    return _job(128)


def calibrate(rate: str, out: Path) -> Cluster:
    from gossamer.runtime.lab import Lab

    command = ["python", "-m", "gossamer", "calibrate", "--out", str(out), "--name", f"lab, {rate}"]
    for batch in BATCHES:
        command += ["--module", f"benchmarks.runtime_model:batch_{batch}"]
    with Lab(hosts=4, rate=rate) as lab:
        result = lab.run(command, timeout=300, echo=False)
    if result.exit_code:
        raise SystemExit("\n".join(result.outputs))
    cluster = clusters.load(out)
    assert cluster.inter is not None
    console.print(f"calibrated at {rate} in {result.seconds:.0f} s: {cluster.inter.gbit:.3g} Gbit/s")
    return cluster


def merged(calibrations: list[Cluster]) -> Cluster:
    """The median of each number."""

    def median(values: list[Any]) -> Any:
        first = values[0]
        if isinstance(first, dict):
            return {key: median([value[key] for value in values]) for key in first}
        if isinstance(first, list):
            return [median(list(parts)) for parts in zip(*values, strict=True)]
        # What is the same everywhere stays as it is, and so does text. (A cost of 0 is written, and read, as an integer.)
        return first if isinstance(first, str) or len(set(values)) == 1 else statistics.median(values)

    return clusters.build(median([tomllib.loads(clusters.dumps(cluster)) for cluster in calibrations]), "merged")


def at_rate(cluster: Cluster, other: Cluster) -> Cluster:
    """The cluster as calibrated, with the other's bandwidth between hosts and nothing else of it."""
    assert cluster.inter is not None
    assert other.inter is not None
    return cluster.model_copy(update={"inter": cluster.inter.model_copy(update={"gbit": other.inter.gbit})})


def predict(cluster: Cluster, batch: int) -> dict[str, float]:
    work = next(w.made() for w in cluster.workload if w.name == f"batch_{batch}")
    return {label: simulate(cluster, work, method, 120).seconds * 1e3 for label, method in METHODS.items()}


def in_order(turns: dict[str, list[float]], predicted: dict[str, float]) -> list[str]:
    """Pairs whose order is predicted wrongly, although the measurement tells them apart."""
    wrong = []
    for a, b in itertools.combinations(METHODS, 2):
        first, second = statistics.median(turns[a]), statistics.median(turns[b])
        near = max(first, second) / min(first, second) <= _ALIKE
        won = statistics.fmean(x < y for x, y in zip(turns[a], turns[b], strict=True))
        if not near and max(won, 1 - won) >= _MOSTLY and (first < second) != (predicted[a] < predicted[b]):
            wrong.append(f"{a} / {b}")
    return wrong


def report(results: dict[str, dict]) -> bool:
    met, errors, crossed = True, [], []
    for name, result in results.items():
        measured = result["measured"]
        console.print(
            f"\n[bold]{name}[/]{'measured':>38} {'predicted':>10} {'error':>7} {'from the other rate':>20} {'error':>7}"
        )
        for label in METHODS:
            own, cross = (result[key][label] for key in ("predicted", "crossed"))
            errors.append((own / measured[label] - 1, f"{name}: {label}"))
            crossed.append((cross / measured[label] - 1, f"{name}: {label}"))
            console.print(
                f"  {label:32} {measured[label]:9.1f} ms {own:7.1f} ms {errors[-1][0]:+7.1%} {cross:17.1f} ms {crossed[-1][0]:+7.1%}"
            )
        for key, what in (("predicted", ""), ("crossed", ", from the other rate")):
            wrong = in_order(result["turns"], result[key])
            met &= verdict(f"{name}{what}: pairs in the wrong order {wrong or ''}", len(wrong), 0)
    for found, what in ((errors, "calibrated at the same rate"), (crossed, "calibrated at the other rate")):
        worst, where = max(found, key=lambda pair: abs(pair[0]))
        met &= verdict(f"{what}: mean absolute error, %", 100 * sum(abs(e) for e, _ in found) / len(found), 12)
        met &= verdict(f"{what}: the largest error, % ({where})", abs(worst) * 100, 25)
    return met


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="settings, comma-separated: " + ", ".join(SETTINGS))
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--steps", type=int, default=8, help="a multiple of 4, for H=4")
    parser.add_argument("--out", type=Path, default=Path("docs/runtime-model.json"))
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        step_time.work(SETTINGS[args.worker], args.turns, args.steps, args.out)
        return
    if os.geteuid() != 0:
        sys.exit("the lab needs root")
    wanted = args.only.split(",") if args.only else list(SETTINGS)
    scratch = args.out.parent / "runtime-model.parts"
    scratch.mkdir(parents=True, exist_ok=True)
    results: dict[str, dict] = {}
    try:
        calibrations: dict[str, list[Cluster]] = {rate: [] for rate in RATES}
        measured = {}
        for name in wanted:
            for rate in RATES:
                calibrations[rate].append(calibrate(rate, scratch / f"{rate}.toml"))
            found = step_time.measure(SETTINGS[name], args.turns, args.steps, scratch, "benchmarks.runtime_model")
            measured[name] = {label: found["methods"][label]["windows_ms"] for label in ("none", *METHODS)}
        calibrated = {rate: merged(made) for rate, made in calibrations.items()}
        for name in wanted:
            setting, rate = SETTINGS[name], str(SETTINGS[name].rate)
            other = calibrated[next(r for r in RATES if r != rate)]
            results[name] = {
                "setting": asdict(setting),
                "measured": {label: statistics.median(times) for label, times in measured[name].items()},
                "turns": measured[name],
                "predicted": predict(calibrated[rate], setting.batch),
                "crossed": predict(at_rate(other, calibrated[rate]), setting.batch),
            }
        met = report(results)
        kept = {rate: clusters.dumps(cluster) for rate, cluster in calibrated.items()}
        single = {rate: [clusters.dumps(cluster) for cluster in made] for rate, made in calibrations.items()}
        args.out.write_text(json.dumps({"clusters": kept, "calibrations": single, "results": results}, indent=1))
    finally:
        for part in scratch.glob("*"):
            part.unlink()
        scratch.rmdir()
    sys.exit(not met)


if __name__ == "__main__":
    main()
