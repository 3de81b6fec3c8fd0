"""Workers are killed while they train: how long does a survivor stand still, and what does it cost in accuracy?

    python -m benchmarks.survival                 # 36 kills, 4 for each kind; about 18 minutes
    python -m benchmarks.survival --kills 200     # an hour
    python -m benchmarks.survival --graph all-reduce --kills 40 --out /tmp/all-reduce.json    # all of them with one kind
    python -m benchmarks.survival --overhead      # what survival costs when nothing happens

Five workers train an MLP on Fashion-MNIST under ``gossamer launch --restart``, one job for each kind: graphs with rows by edges and by
slices, a method with two vectors and state of its own, all-reduce, after which parameters must be the same to the bit on all workers, and
outer steps whose exchange is under way in most steps; of diloco the point from which all set out must be the same to the bit.
SIGKILL comes from outside at random times: rank 0; when all are together again two at once, and one more while the others
change to the graph without them. The same jobs without kills are the reference. All processes share this machine's cores, also with
those that start and load torch, so the longest step of the undisturbed job is shown too. Writes a table and a figure to ``docs/``;
``--graph`` replaces one graph's part of them.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import os
import random
import signal
import statistics
import struct
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import gossamer
from benchmarks import chart
from benchmarks.timing import console, verdict

N = 5
GRAPHS = {
    "one-peer-exponential": "permutation, edges",
    "complete": "mean, slices",
    "ring": "window, slices",
    "base:k=2": "groups, both",
    "exponential": "general, slices",
    "ring, tracking": "two vectors, own state",
    "all-reduce": "gradients",
    "diloco:H=8,delay=6,wire=8bits,momentum=0.5,fragments=2": "codes, slices, across steps",
    "noloco:H=8,delay=6": "permutation, edges, across steps",
}
_PER_CYCLE = 4  # kills
_RECORD = struct.Struct("<qdd")  # step, when it began, seconds
_DECAY = 300  # steps at the end in which the learning rate goes down to 0
_AFTER = 3.0  # seconds after a kill in which a step counts as held by it

# --- In each worker -------------------------------------------------------------------------------------------------------


def work(graph: str, out: Path, pause: float) -> None:
    from gossamer.apps import data, models
    from gossamer.members.roster import Change

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    (x, y), test = data.fashion_mnist()
    x, y = x[rank::N].clone(), y[rank::N].clone()
    torch.manual_seed(0)
    how = gossamer.Averaging.parse(graph)
    topology = "all-reduce" if how.averages_gradients else how.graph
    model = gossamer.DecentralizedDataParallel(models.mlp(784, 10, (256, 128)), topology, method=how.method)
    # Gradient tracking makes its own direction.
    momentum = 0.9 if how.method is None or how.method.optimizer == "any" else 0.0
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=momentum)
    name = f"{rank}.{os.getpid()}"
    changes = open(out / f"{name}.changes", "w", buffering=1)  # noqa: SIM115  (until the end of the process)

    def changed(change: Change) -> None:
        changes.write(
            json.dumps([time.time(), change.step, change.members, change.lost, change.joined, change.rejoined]) + "\n"
        )

    model.gossip(optimizer, on_change=changed)
    (out / f"{name}.ready").write_text(str(time.time()))  # imports and data are there
    generator = torch.Generator().manual_seed(100_000 * rank + model.steps)
    times = open(out / f"{name}.times", "wb", buffering=0)  # noqa: SIM115
    last = out / "last"
    left = _DECAY
    while left > 0:
        optimizer.param_groups[0]["lr"] = 0.05 * min(1.0, left / _DECAY)
        began = time.time()
        pick = torch.randint(len(y), (32,), generator=generator)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x[pick]), y[pick]).backward()
        optimizer.step()
        times.write(_RECORD.pack(model.steps, began, time.time() - began))
        time.sleep(pause)  # not part of the step: five workers share two cores with those who start
        if last.exists():
            left = int(last.read_text()) - model.steps
    anchor = model._driver.now.state.get("anchor")
    row = torch.cat([x.detach().flatten() for x in (anchor.tensors if anchor else model.parameters())])
    (out / f"{name}.digest").write_text(hashlib.sha256(row.numpy().tobytes()).hexdigest())
    model.average_()
    if model.leads:
        model.eval()
        with torch.no_grad():
            accuracy = float((model(test[0]).argmax(dim=1) == test[1]).float().mean())
        (out / "result.json").write_text(json.dumps({"accuracy": accuracy, "members": model.members, "steps": model.steps}))


# --- A job, and who kills its workers ---------------------------------------------------------------------------------------


class Job:
    def __init__(self, graph: str, folder: Path, pause: float, restart: int) -> None:
        self.folder, self.kills = folder, []  # type: ignore[var-annotated]
        command = [
            sys.executable,
            "-m",
            "gossamer",
            "launch",
            "-n",
            str(N),
            "--restart",
            str(restart),
            "-m",
            "benchmarks.survival",
        ]
        command += ["--worker", graph, "--out", str(folder), "--pause", str(pause)]
        env = os.environ | {"OMP_NUM_THREADS": "1"}
        self.said: list[str] = []
        self.process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        assert self.process.stdout is not None
        self.said += self.process.stdout

    def living(self) -> dict[int, int]:
        """Of each rank the process that trains, if one does. (One that was just killed may still be seen for a moment.)"""
        found = {}
        gone = {str(pid) for _, _, pids in self.kills for pid in pids}
        for path in self.folder.glob("*.times"):
            rank, pid, _ = path.name.split(".")
            if path.stat().st_size and pid not in gone and os.path.exists(f"/proc/{pid}"):
                found[int(rank)] = int(pid)
        return found

    def step(self) -> int:
        sizes = [(path, path.stat().st_size) for path in self.folder.glob("*.times")]
        return max((records(path)[-1][0] for path, size in sizes if size >= _RECORD.size), default=0)

    def wait_for_all(self, seconds: float = 180) -> None:
        deadline = time.time() + seconds
        while len(self.living()) < N:
            if time.time() > deadline or self.process.poll() is not None:
                raise SystemExit("not all came back:\n" + "".join(self.said[-60:]))
            time.sleep(0.02)

    def kill(self, *ranks: int) -> None:
        living = self.living()
        for rank in ranks:
            os.kill(living[rank], signal.SIGKILL)
        self.kills.append((time.time(), ranks, [living[rank] for rank in ranks]))

    def finish(self, step: int) -> dict[str, Any]:
        (self.folder / "new").write_text(str(step))
        (self.folder / "new").rename(self.folder / "last")
        code = self.process.wait(600)
        if code:
            raise SystemExit("".join(self.said[-60:]))
        return json.loads((self.folder / "result.json").read_text())


def records(path: Path) -> list[tuple[int, float, float]]:
    data = path.read_bytes()
    return list(_RECORD.iter_unpack(data[: len(data) // _RECORD.size * _RECORD.size]))


def campaign(graph: str, kills: int, steps: int, pause: float, seed: int) -> dict[str, Any]:
    """One job; ``kills`` 0 is the reference."""
    rng = random.Random(seed)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        job = Job(graph, folder, pause, restart=max(1, kills))
        try:
            job.wait_for_all()
            # A rank that dies twice within seconds is started again after a pause of up to 30 s, so rank 0 is killed a second time in
            # every third cycle only.
            chances = itertools.cycle((range(N), range(1, N), range(1, N)))
            while sum(len(ranks) for _, ranks, _ in job.kills) < kills:
                time.sleep(rng.uniform(1.0, 1.5))
                job.kill(0)
                time.sleep(rng.uniform(0.5, 1.0))
                job.wait_for_all()
                time.sleep(rng.uniform(1.0, 1.5))
                first, second, third = rng.sample(next(chances), 3)
                job.kill(first, second)
                time.sleep(rng.uniform(0.0, 0.15))  # while the others change to the graph without them
                job.kill(third)
                job.wait_for_all()
            result = job.finish(max(steps, job.step() + _DECAY + 50))
        finally:
            if job.process.poll() is None:
                job.process.kill()
        return result | look(folder, job)


def look(folder: Path, job: Job) -> dict[str, Any]:
    """What the survivors did after each kill, and how those who were started again came back."""
    killed = {pid: when for when, _, pids in job.kills for pid in pids}
    longest, longest_ever, after = [], 0.0, []
    traces = {}
    for path in folder.glob("*.times"):
        rank, pid, _ = path.name.split(".")
        steps = records(path)[1:]  # the first one includes joining
        traces[f"{rank}.{pid}"] = steps
    for when, _, pids in job.kills:
        held = [
            (seconds, name)
            for name, steps in traces.items()
            for _, began, seconds in steps
            if int(name.split(".")[1]) not in pids and when - seconds <= began <= when + _AFTER
        ]
        longest.append(max(held)[0] if held else 0.0)
    joins = []
    for path in folder.glob("*.changes"):
        rank, pid, _ = path.name.split(".")
        changes = [json.loads(line) for line in path.read_text().splitlines()]
        if changes and changes[0][5]:
            ready = float((folder / f"{rank}.{pid}.ready").read_text())
            joins.append(changes[0][0] - ready)
            others = [
                seconds
                for name, steps in traces.items()
                for _, began, seconds in steps
                if name != f"{rank}.{pid}" and abs(began - changes[0][0]) < 0.5 and int(name.split(".")[1]) not in killed
            ]
            after.append(max(others, default=0.0))
    every = [seconds for steps in traces.values() for _, _, seconds in steps]
    longest_ever = max(every, default=0.0)
    return {
        "kills": sum(len(ranks) for _, ranks, _ in job.kills),
        "killed_rank_0": sum(0 in ranks for _, ranks, _ in job.kills),
        "held": longest,
        "joins": joins,
        "held_by_joins": after,
        "longest": longest_ever,
        "median": statistics.median(every) if every else 0.0,
        "replicas": len({path.read_text() for path in folder.glob("*.digest")}),  # that differ at the end
        "when": [[when, ranks] for when, ranks, _ in job.kills],
        "traces": {name: [[began, seconds] for _, began, seconds in steps] for name, steps in traces.items()},
        "final_steps": sorted(
            {steps[-1][0] for name, steps in traces.items() if steps and int(name.split(".")[1]) not in killed}
        ),
        "said": [line for line in job.said if "gossamer:" in line or "rror" in line or "warn" in line.lower()],
    }


# --- With nothing failing --------------------------------------------------------------------------------------------------


MODELS = {  # sizes of the layers, batch, pairs of steps
    "118 thousand parameters": ((784, 128, 128), 32, 40_000),
    "6.3 million parameters": ((1024, 2048, 2048), 128, 1_500),
}


def overhead(out: Path, what: str, share: float) -> None:
    """In each worker: the same model with and without survival, step by step in turns. The very same one: of two models the one that was
    made first is slower by its place in memory alone, by as much as what is to be measured."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    sizes, batch, pairs = MODELS[what]
    torch.manual_seed(0)
    layers = [part for a, b in itertools.pairwise(sizes) for part in (nn.Linear(a, b), nn.ReLU())]
    model = gossamer.DecentralizedDataParallel(nn.Sequential(*layers, nn.Linear(sizes[-1], 10)), "one-peer-exponential")
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    model.gossip(optimizer)
    switch = _Switch(model)
    x, y = torch.randn(batch, sizes[0]), torch.randint(0, 10, (batch,))
    times: dict[bool, list[float]] = {True: [], False: []}
    order = random.Random(1)
    began_all, spent_all = time.perf_counter(), _thread_seconds()
    for turn in range(-10, round(share * pairs)):  # the first ones warm up
        for on in order.sample([True, False], 2):
            switch.turn(on)
            began = time.perf_counter()
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            if turn >= 0:
                times[on].append((time.perf_counter() - began) * 1e3)
    switch.turn(True)
    thread = (_thread_seconds() - spent_all) / (time.perf_counter() - began_all)
    if dist.get_rank() == 0:
        out.write_text(json.dumps({"on": times[True], "off": times[False], "thread": thread}))
    dist.barrier()


class _Switch:
    """Between two steps: what a model does that was not started by ``gossamer launch``, or what it does under it."""

    def __init__(self, model: gossamer.DecentralizedDataParallel) -> None:
        assert model._driver.survival is not None
        assert model._exchange is not None
        self.model, self.survival, self.exchange = model, model._driver.survival, model._exchange
        self.guard = self.exchange.guard

    def turn(self, on: bool) -> None:
        self.model._driver.survival = self.survival if on else None
        self.exchange.guard = self.guard if on else None


def _thread_seconds() -> float:
    """Processor time of the threads that watch over the members, so far."""
    ticks = 0
    for thread in threading.enumerate():
        if thread.name == "gossamer-membership":
            fields = Path(f"/proc/self/task/{thread.native_id}/stat").read_text().rpartition(")")[2].split()
            ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def measure_overhead(share: float) -> bool:
    """Two workers, a core for each: with more of them the scheduler decides. What a step does for survival is in the ratio of the two
    kinds of steps; the thread works beside both of them, so its share of the core is added."""
    good = True
    draws = random.Random(0)
    for what in MODELS:
        with tempfile.TemporaryDirectory() as name:
            out = Path(name) / "overhead.json"
            launch = [sys.executable, "-m", "gossamer", "launch", "-n", "2", "-m", "benchmarks.survival"]
            command = ["--worker", "overhead", "--out", str(out), "--model", what, "--share", str(share)]
            subprocess.run([*launch, *command], check=True)
            result = json.loads(out.read_text())
        on, off, thread = result["on"], result["off"], result["thread"]
        again = [draws.choices(range(len(on)), k=len(on)) for _ in range(400)]
        ratios = sorted(_middle([on[k] for k in some]) / _middle([off[k] for k in some]) for some in again)
        console.print(
            f"{what}: {_middle(on):.3f} ms with, {_middle(off):.3f} ms without, {len(on)} steps of each; 95 % of resampled ratios in "
            f"{ratios[10]:.4f} to {ratios[-11]:.4f}; its thread uses {100 * thread:.2f} % of a core"
        )
        good &= verdict(f"{what}: with / without, and the thread", _middle(on) / _middle(off) + thread, 1.01)
    return good


def _middle(times: list[float]) -> float:
    """The mean of the middle half: steps of a few ms have a long tail, and the machine makes it."""
    quarter = len(times) // 4
    return statistics.fmean(sorted(times)[quarter : len(times) - quarter])


# --- The run --------------------------------------------------------------------------------------------------------------


def draw(result: dict[str, Any], graph: str) -> str:
    """Step times of the survivors around the first kill and the return."""
    began = result["when"][0][0] - 2
    ended = result["when"][1][0] - 0.2 if len(result["when"]) > 1 else began + 12
    lines = []
    for name, steps in sorted(result["traces"].items()):
        some = [(b - began, 1e3 * s) for b, s in steps if began <= b <= ended]
        if some:
            lines.append(chart.Line(f"rank {name.split('.')[0]}", [x for x, _ in some], [y for _, y in some]))
    marks = [(when - began, f"SIGKILL of rank {', '.join(map(str, ranks))}") for when, ranks in result["when"] if when < ended]
    marks += [
        (steps[0][0] - began, f"rank {name.split('.')[0]} is back")
        for name, steps in result["traces"].items()
        if steps and result["when"][0][0] < steps[0][0] < ended
    ]
    return chart.lines(
        lines,
        "Step times through a kill and a return",
        f"Five workers on two cores, {graph}, Fashion-MNIST MLP. The one that is started again loads torch meanwhile.",
        "seconds",
        "milliseconds per step",
        marks=marks,
    )


def show(results: dict[str, dict[str, dict[str, Any]]]) -> str:
    rows = [
        "| graph | Round, verb | kills (of rank 0) | survivors' longest step after a kill | undisturbed: longest, median | "
        "step held by a return | return after imports | accuracy, undisturbed | with kills |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for graph, pair in results.items():
        plain, killed = pair["undisturbed"], pair["killed"]
        rows.append(
            f"| {graph} | {GRAPHS[graph]} | {killed['kills']} ({killed['killed_rank_0']}) | {max(killed['held']):.2f} s | "
            f"{plain['longest']:.2f} s, {1e3 * plain['median']:.0f} ms | {max(killed['held_by_joins'], default=0):.2f} s | "
            f"{max(killed['joins'], default=0):.2f} s | {100 * plain['accuracy']:.2f} % | {100 * killed['accuracy']:.2f} % |"
        )
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=36, help="over all kinds, as many for each")
    parser.add_argument("--graph", choices=list(GRAPHS), help="only this one")
    parser.add_argument("--steps", type=int, default=1000, help="at least; a job with kills goes on until all have come back")
    parser.add_argument("--pause", type=float, default=0.02, help="seconds between two steps")
    parser.add_argument("--verbose", action="store_true", help="what the launcher said")
    parser.add_argument("--overhead", action="store_true")
    parser.add_argument("--share", type=float, default=1.0, help="--overhead: of its pairs of steps")
    parser.add_argument("--model", choices=MODELS, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, default=Path("docs/survival.json"))
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker == "overhead":
        overhead(args.out, args.model, args.share)
        return
    if args.worker:
        work(args.worker, args.out, args.pause)
        return
    if args.overhead:
        sys.exit(0 if measure_overhead(args.share) else 1)
    chosen = [args.graph] if args.graph else list(GRAPHS)
    each = max(1, round(args.kills / len(chosen) / _PER_CYCLE)) * _PER_CYCLE
    results: dict[str, dict[str, dict[str, Any]]] = {}
    if args.graph and args.out.exists():
        results = json.loads(args.out.read_text())["results"]
    for k, graph in enumerate(chosen):
        results[graph] = {}
        with console.status(f"{graph}: {each} kills"):
            killed = results[graph]["killed"] = campaign(graph, each, args.steps, args.pause, seed=k)
        with console.status(f"{graph}: undisturbed, {killed['steps']} steps"):
            results[graph]["undisturbed"] = campaign(graph, 0, killed["steps"], args.pause, seed=k)
        if args.verbose:
            print("".join(killed["said"]))
        console.print(f"{graph}: longest steps after the kills {', '.join(f'{s:.2f}' for s in killed['held'])} s")
    table = show(results)
    print(table)
    good = verdict("longest step of a survivor after a kill, s", max(max(r["killed"]["held"]) for r in results.values()), 1.0)
    good &= verdict(
        "longest step because of a return, s", max(max(r["killed"]["held_by_joins"]) for r in results.values()), 0.5
    )
    good &= verdict("longest return after imports, s", max(max(r["killed"]["joins"]) for r in results.values()), 5.0)
    differences = [abs(r["killed"]["accuracy"] - r["undisturbed"]["accuracy"]) * 100 for r in results.values()]
    good &= verdict("accuracy against the undisturbed run, points", max(differences), 1.0)
    for graph in (graph for graph in results if graph.startswith(("all-reduce", "diloco"))):
        good &= verdict(f"{graph}: replicas that differ at the end", results[graph]["killed"]["replicas"], 1)
    if chosen[0] == next(iter(GRAPHS)):
        args.out.with_suffix(".svg").write_text(draw(results[chosen[0]]["killed"], chosen[0]))
    for graph in chosen:
        for result in results[graph].values():
            del result["traces"], result["said"]
    args.out.write_text(
        json.dumps({"settings": vars(args) | {"out": str(args.out)}, "table": table, "results": results}, indent=1)
    )
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
