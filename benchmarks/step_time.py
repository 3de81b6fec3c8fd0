"""How long is one training step? No communication, torch DDP, decent-dp and Gossamer's graphs take turns in one run.

    python -m benchmarks.step_time                      # every setting; about 20 minutes; root for the lab
    python -m benchmarks.step_time --only loopback-4    # one of them

On loopback, and on the lab (hosts in network namespaces) at 1 Gbit and 200 Mbit. Writes JSON and a figure to ``docs/``. The MLP
has 6.3 M parameters (25 MB); SGD with momentum; one thread per process. All processes share this machine's cores, so what is
compared is ratios within one run, never seconds.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import socket
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gossamer
from benchmarks import chart
from benchmarks.timing import console, verdict

TURNSTILE = "GOSSAMER_BENCHMARK_TURNSTILE"  # the socket of benchmarks.versions, where a run is one of several
_WARM = 2  # steps of each turn that are not timed
_WINDOW = 4  # steps that are timed together, beside whole turns: one that stalls does not spoil the others


@dataclass(frozen=True)
class Setting:
    """One run. ``slow``: rank 1 takes so many times as long to compute; ``noise``: sigma of a lognormal delay."""

    name: str
    hosts: int  # 0: loopback
    workers: int  # in all
    rate: str | None
    batch: int
    methods: tuple[str, ...]
    slow: float = 1.0
    noise: float = 0.0


_CORE = ("none", "ddp", "decent-dp", "one-peer-exponential")
_FULL = (
    *_CORE,
    "plain isend",
    "ddp (no overlap)",
    "one-peer-ring",
    "one-peer-exponential, bfloat16",
    "one-peer-exponential, send_copy",
    "ring",
    "ring, bfloat16",
    "complete",
    "complete (atc)",
    "all-reduce",
    "one-peer-exponential, H=4",
)
_BF16 = (*_CORE, "one-peer-exponential, bfloat16", "complete")
_UNEVEN = (*_CORE, "one-peer-exponential, send_copy", "one-peer-exponential, bfloat16")

SETTINGS = (
    Setting("loopback-4", 0, 4, None, 128, _FULL),
    Setting("loopback-4-batch-32", 0, 4, None, 32, _BF16),
    Setting("loopback-2", 0, 2, None, 128, _CORE),
    Setting("loopback-8", 0, 8, None, 128, _CORE),
    Setting("1gbit-4", 4, 4, "1gbit", 128, _FULL),
    Setting("1gbit-4-batch-32", 4, 4, "1gbit", 32, _BF16),
    Setting("1gbit-2", 2, 2, "1gbit", 128, _BF16),
    Setting("1gbit-8", 8, 8, "1gbit", 128, _BF16),
    Setting("1gbit-2x2", 2, 4, "1gbit", 128, (*_BF16, "hierarchical", "alternating-exponential-ring")),
    Setting("200mbit-4", 4, 4, "200mbit", 128, _BF16),
    Setting("200mbit-4-batch-32", 4, 4, "200mbit", 32, _BF16),
    Setting("loopback-4-slow", 0, 4, None, 128, _UNEVEN, slow=1.5),
    Setting("1gbit-4-slow", 4, 4, "1gbit", 128, _UNEVEN, slow=1.5),
    Setting("loopback-4-noise", 0, 4, None, 128, _UNEVEN, noise=0.8),
    Setting("1gbit-4-noise", 4, 4, "1gbit", 128, _UNEVEN, noise=0.8),
)

# --- In each worker -------------------------------------------------------------------------------------------------------

Delay = Callable[[], float]


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(1024, 2048), nn.ReLU(), nn.Linear(2048, 2048), nn.ReLU(), nn.Linear(2048, 10))


class Contender:
    """One way to train; ``step()`` is one step of it, on data of its own."""

    def __init__(self, method: str, batch: int) -> None:
        generator = torch.Generator().manual_seed(dist.get_rank())
        self.x = torch.randn(batch, 1024, generator=generator)
        self.y = torch.randint(0, 10, (batch,), generator=generator)
        self.optimizer: torch.optim.Optimizer | None = None
        self.ours: gossamer.DecentralizedDataParallel | None = None
        self.plain: Plain | None = None
        model = mlp()
        name, _, option = method.partition(", ")
        if method == "none":
            self.model = model
        elif name.startswith("ddp"):
            # None: torch's own sizes. One that is given would hold for the first bucket too, and nothing would overlap.
            self.model = DistributedDataParallel(model, bucket_cap_mb=1000 if "no overlap" in name else None)
        elif name == "decent-dp":
            self.model = _decent_dp(model)
            return
        elif name == "plain isend":
            self.model, self.plain = model, Plain(model)
        else:
            self.model = self.ours = gossamer.DecentralizedDataParallel(
                model,
                name.removesuffix(" (atc)"),
                order="atc" if name.endswith("(atc)") else "awc",
                wire="bfloat16" if option == "bfloat16" else "float32",
                send_copy=option == "send_copy",
                local_steps=4 if option == "H=4" else 1,
            )
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3, momentum=0.9)
        if self.ours is not None:
            self.ours.gossip(self.optimizer)

    def step(self, delay: float) -> None:
        if self.optimizer is not None:
            self.optimizer.zero_grad()
        if self.plain is not None:
            self.plain.start()
        loss = nn.functional.cross_entropy(self.model(self.x), self.y)
        if delay:
            time.sleep(delay)  # a slower machine: it takes longer, and takes nothing from the others here
        loss.backward()
        if self.plain is not None:
            self.plain.finish()
        if self.optimizer is not None:
            self.optimizer.step()


class Plain:
    """One-peer exponential in as few lines as it takes, without any care: what averaging costs here at the least, whoever does it."""

    def __init__(self, model: nn.Module) -> None:
        parameters = list(model.parameters())
        self.row = torch.cat([p.detach().flatten() for p in parameters])
        for p, part in zip(parameters, self.row.split([p.numel() for p in parameters]), strict=True):
            p.data = part.view_as(p)
        self.received = torch.empty_like(self.row)
        self.t, self.works = 0, []  # type: ignore[var-annotated]

    def start(self) -> None:
        n, rank = dist.get_world_size(), dist.get_rank()
        away = 2 ** (self.t % max(1, (n - 1).bit_length()))
        self.t += 1
        pieces = zip(self.row.split(1 << 18), self.received.split(1 << 18), strict=True)
        for k, (mine, theirs) in enumerate(pieces):
            self.works += [dist.irecv(theirs, (rank - away) % n, tag=k), dist.isend(mine, (rank + away) % n, tag=k)]

    def finish(self) -> None:
        for work in self.works:
            work.wait()
        self.works = []
        self.row.lerp_(self.received, 0.5)


class Turnstile:
    """Jobs that take turns at a socket, so that only one of them computes at a time (benchmarks.versions)."""

    def __init__(self, path: str) -> None:
        self.socket = socket.socket(socket.AF_UNIX) if path else None
        if self.socket is not None:
            self.socket.connect(path)

    def enter(self) -> None:
        if self.socket is not None:
            self.socket.send(b"?")
            self.socket.recv(1)

    def leave(self) -> None:
        if self.socket is not None:
            self.socket.send(b".")


def _decent_dp(model: nn.Module) -> nn.Module:
    from decent_dp.ddp import DecentralizedDataParallel  # the benchmark extra

    def make(params: list[tuple[str, torch.Tensor]]) -> torch.optim.Optimizer:
        return torch.optim.SGD([p for _, p in params], lr=1e-3, momentum=0.9)

    topology = "one-peer-exp" if dist.get_world_size() > 2 else "complete"
    return DecentralizedDataParallel(model, make, topology=topology, _local_world_size=1)


def work(setting: Setting, turns: int, steps: int, out: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, n = dist.get_rank(), dist.get_world_size()
    turnstile = Turnstile(os.environ.get(TURNSTILE, "") if rank == 0 else "")
    contenders = {method: Contender(method, setting.batch) for method in setting.methods}
    order = random.Random(1)  # the same everywhere
    own = random.Random(rank)
    compute = 0.0
    # Where there are delays, each turn is run without them too: what they cost is a difference within one run.
    delayed = (False, True) if setting.slow > 1 or setting.noise else (True,)
    times: dict[str, list[float]] = {method: [] for method in setting.methods}
    undelayed: dict[str, list[float]] = {method: [] for method in setting.methods}
    windows: dict[str, list[float]] = {method: [] for method in setting.methods}
    traffic: dict[str, list[list[float]]] = {method: [] for method in setting.methods}
    for turn in range(turns + 1):
        runs = [(method, wait) for method in setting.methods for wait in delayed]
        for method, wait in order.sample(runs, len(runs)) if turn else runs:
            contender = contenders[method]
            # "none" goes first in the first turn, without delays, and tells how long computing takes.
            delays = [_delay(setting, rank, own, compute) if wait else 0.0 for _ in range(_WARM + steps)]
            turnstile.enter()
            dist.barrier()
            moments: list[float] = []
            before: tuple[int, float, float] = (0, 0.0, 0.0)
            for k, delay in enumerate(delays):
                if k == _WARM:
                    moments.append(time.perf_counter())
                    before = _traffic(contender)
                contender.step(delay)
                if moments:
                    moments.append(time.perf_counter())
            parts = [b - a for a, b in itertools.pairwise(moments[::_WINDOW])]
            all_taken = torch.tensor([moments[-1] - moments[0], *parts], dtype=torch.float64)
            after = _traffic(contender)
            dist.all_reduce(all_taken, dist.ReduceOp.MAX)  # the job is as fast as its last worker
            turnstile.leave()
            taken = all_taken[0]
            if method == "none" and turn == 0 and not compute:
                compute = float(taken) / steps
            if turn and not wait:
                undelayed[method].append(float(taken) / steps * 1e3)
            elif turn:
                times[method].append(float(taken) / steps * 1e3)
                windows[method] += [float(part) / _WINDOW * 1e3 for part in all_taken[1:]]
                traffic[method].append([(b - a) / steps for a, b in zip(before, after, strict=True)])
    dist.barrier()
    if rank == 0:
        methods = {}
        for method in setting.methods:
            sent, exposed, transfer = (statistics.median(column) for column in zip(*traffic[method], strict=True))
            hidden = 1 - exposed / transfer if transfer else None
            methods[method] = {
                "ms": statistics.median(times[method]),
                "all_ms": times[method],
                "windows_ms": windows[method],
                "undelayed_ms": statistics.median(undelayed[method]) if undelayed[method] else None,
                "sent_mb": sent / 1e6,
                "exposed_ms": exposed * 1e3,
                "hidden": hidden,
            }
        out.write_text(json.dumps({"setting": asdict(setting), "workers": n, "methods": methods}))


def _delay(setting: Setting, rank: int, own: random.Random, compute: float) -> float:
    slow = (setting.slow - 1) * compute if rank == 1 else 0.0
    return slow + (0.3 * compute * own.lognormvariate(-(setting.noise**2) / 2, setting.noise) if setting.noise else 0.0)


def _traffic(contender: Contender) -> tuple[int, float, float]:
    if contender.ours is None:
        return 0, 0.0, 0.0
    traffic = contender.ours.traffic
    return traffic.sent, traffic.exposed, traffic.transfer


# --- The run --------------------------------------------------------------------------------------------------------------


def measure(setting: Setting, turns: int, steps: int, scratch: Path, module: str = "benchmarks.step_time") -> dict:
    """``module``: whose ``--worker`` runs the setting."""
    from gossamer.runtime.lab import Lab

    out = scratch / f"{setting.name}.json"
    out.unlink(missing_ok=True)
    command = [
        "-m",
        module,
        "--worker",
        setting.name,
        "--turns",
        str(turns),
        "--steps",
        str(steps),
        "--out",
        str(out),
    ]
    if setting.hosts:
        with Lab(hosts=setting.hosts, rate=setting.rate) as lab:
            result = lab.run(["python", *command], workers_per_host=setting.workers // setting.hosts, timeout=1800, echo=False)
        if result.exit_code:
            raise SystemExit("\n".join(result.outputs))
    else:
        from tests import workers  # the same launcher as in the tests

        for worker in workers.run(setting.workers, command, timeout=1800):
            if worker.code:
                raise SystemExit(worker.out + worker.err)
    return json.loads(out.read_text())


def show(result: dict) -> None:
    setting, methods = result["setting"], result["methods"]
    none, ddp = methods["none"]["ms"], methods["ddp"]["ms"]
    console.print(
        f"\n[bold]{setting['name']}[/]: {setting['workers']} workers, batch {setting['batch']}, {setting['rate'] or 'loopback'}"
    )
    for method, m in methods.items():
        hidden = f"hidden {m['hidden']:4.0%}" if m["hidden"] is not None else ""
        sent = f"{m['sent_mb']:5.1f} MB" if m["sent_mb"] else ""
        console.print(
            f"  {method:34} {m['ms']:7.1f} ms   {m['ms'] / none:5.2f} × none   DDP / it {ddp / m['ms']:5.2f}   {sent:9} {hidden}"
        )


def bars(results: dict[str, dict]) -> bool:
    """The bars of this benchmark, for the settings that were run."""
    one, half, atc = "one-peer-exponential", "one-peer-exponential, bfloat16", "complete (atc)"

    def ms(setting: str, method: str) -> float:
        return results[setting]["methods"][method]["ms"]

    met = True
    for setting, top, bottom, bar, at_most in (
        ("loopback-4", one, "none", 1.10, True),
        ("loopback-4", one, "plain isend", 1.0, True),
        ("1gbit-4", "ddp", one, 1.5, False),
        ("1gbit-4", one, "decent-dp", 1.03, True),
        ("1gbit-4-batch-32", "ddp", half, 1.9, False),
        ("1gbit-4-batch-32", "decent-dp", half, 1.3, False),
        ("200mbit-4", "ddp", half, 2.5, False),
        ("200mbit-4-batch-32", "ddp", half, 2.5, False),
        ("loopback-4", atc, "ddp (no overlap)", 1.15, True),
        ("1gbit-4", atc, "ddp (no overlap)", 1.15, True),
    ):
        if setting in results:
            met &= verdict(f"{setting}: {top} / {bottom}", ms(setting, top) / ms(setting, bottom), bar, at_most)
    for name in ("loopback-4-slow", "1gbit-4-slow", "loopback-4-noise", "1gbit-4-noise"):
        if name in results:
            methods = results[name]["methods"]
            ours, ddp = (methods[method]["ms"] - methods[method]["undelayed_ms"] for method in (one, "ddp"))
            met &= verdict(f"{name}: the delays cost one-peer {ours:.0f} ms and DDP {ddp:.0f} ms; ratio", ours / ddp, 1.0)
    return met


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="settings, comma-separated: " + ", ".join(s.name for s in SETTINGS))
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--out", type=Path, default=Path("docs/step-time.json"))
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--ways", help=argparse.SUPPRESS)
    args = parser.parse_args()
    by_name = {s.name: s for s in SETTINGS}
    if args.worker:
        setting = by_name[args.worker]
        work(replace(setting, methods=tuple(args.ways.split("; "))) if args.ways else setting, args.turns, args.steps, args.out)
        return
    wanted = args.only.split(",") if args.only else list(by_name)
    if os.geteuid() != 0 and any(by_name[name].hosts for name in wanted):
        sys.exit("the lab needs root; --only loopback-4 does not")
    scratch = args.out.parent / "step-time.parts"
    scratch.mkdir(parents=True, exist_ok=True)
    results = {}
    try:
        for name in wanted:
            results[name] = measure(by_name[name], args.turns, args.steps, scratch)
            show(results[name])
            args.out.write_text(json.dumps(results, indent=1))  # after each: half an hour is long
            args.out.with_suffix(".svg").write_text(chart.step_time(results))
    finally:
        for part in scratch.glob("*"):
            part.unlink()
        scratch.rmdir()
    console.print()
    sys.exit(not bars(results))


if __name__ == "__main__":
    main()
