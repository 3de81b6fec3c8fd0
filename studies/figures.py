"""The figures and tables of ``docs/study.md`` from the committed results. Nothing is computed that is not in them."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import scipy.stats

from benchmarks import chart
from gossamer.dbench.analysis import Estimate, estimate
from gossamer.profile import MEASURES

PAGE = Path(__file__).parent.parent / "docs" / "study.md"
ORDER = (
    "centralized",
    "complete",
    "ada-auto",
    "ada",
    "periodic:every=8",
    "periodic:every=8,gap=1",
    "exponential",
    "one-peer-exponential",
    "torus",
    "ring",
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
        return sorted({run["method"] for run in self.runs}, key=ORDER.index)

    def value(self, run: dict[str, Any]) -> float:
        """Accuracy in percent, or perplexity; a run that diverged has nothing, which counts as a guess."""
        value = run["value"]
        if value is None:
            return 10.0 if self.percent else float("nan")
        return 100 * value if self.percent else value

    def values(self, method: str, n: int) -> Estimate:
        return estimate(self.value(run) for run in self.select(method, n))

    def against(self, method: str, other: str, n: int) -> Estimate:
        """Differences of runs with the same seed: in points, or in percent of the other's perplexity."""
        theirs = {run["seed"]: self.value(run) for run in self.select(other, n)}
        pairs = [(self.value(run), theirs[run["seed"]]) for run in self.select(method, n) if run["seed"] in theirs]
        return estimate(a - b if self.percent else 100 * (a / b - 1) for a, b in pairs)

    def share(self, method: str, n: int) -> float:
        """Of the bytes of all-reduce training."""
        whole = estimate(run["bytes"] for run in self.select("complete", n)).mean
        return estimate(run["bytes"] for run in self.select(method, n)).mean / whole


def say(e: Estimate, digits: int = 2, sign: bool = False) -> str:
    spread = f" ± {e.half:.{digits}f}" if e.seeds > 1 else ""
    return f"{e.mean:{'+' if sign else ''}.{digits}f}{spread}"


# --- Figures ---------------------------------------------------------------------------------------------------------------------


def by_scale(x: Experiment) -> str:
    lines = [chart.Line(m, x.scales, [x.values(m, n).mean for n in x.scales]) for m in x.methods]
    note = "Means over seeds; linear learning-rate scaling. One more replica is one more batch in each step."
    return chart.lines(lines, "Accuracy of the averaged model against the number of replicas", note, "replicas", _unit(x))


def by_epoch(title: str) -> Callable[[Experiment], str]:
    def draw(x: Experiment) -> str:
        lines = []
        for method in x.methods:
            cell = [run for run in x.select(method, x.scales[-1]) if run["epochs"]]
            if cell:
                last = min(len(run["epochs"]) for run in cell)
                factor = 100 if x.percent else 1
                means = [sum(run["epochs"][k][1] for run in cell) / len(cell) * factor for k in range(last)]
                lines.append(chart.Line(method, list(range(1, last + 1)), means))
        return chart.lines(lines, title, "Means over seeds.", "epoch", _unit(x), log=not x.percent)

    return draw


def by_bytes(title: str) -> Callable[[Experiment], str]:
    """What each method reached, and what it sent for it: a bar of accuracy with the share of bytes beside it."""

    def draw(x: Experiment) -> str:
        n = x.scales[-1]
        bars = [
            chart.Bar(
                m,
                x.values(m, n).mean,
                "ours" if m == "ada-auto" else "ddp" if m == "centralized" else "none",
                f"{say(x.values(m, n))}   {100 * x.share(m, n):.0f} % of the bytes",
            )
            for m in x.methods
        ]
        return chart.bars([chart.Panel(f"{_unit(x)}, {n} replicas", bars)], title, "", columns=1)

    return draw


def dispersion(x: Experiment) -> str:
    n = x.scales[-1]
    lines = []
    for method in x.methods:
        cell = [run for run in x.select(method, n) if run["looks"]]
        if cell and method not in ("centralized", "complete"):
            width = min(len(run["looks"]) for run in cell)
            means = [sum(run["dispersion"]["gini"][k] or 0 for run in cell) / len(cell) for k in range(width)]
            lines.append(chart.Line(method, cell[0]["looks"][:width], means))
    return chart.lines(lines, f"Dispersion of the replicas' norms, {n} replicas", "Gini index, mean over tensors and seeds.", "step", "Gini")


def levels(x: Experiment) -> str:
    """How often the Ada that decides by itself averages."""
    lines = []
    for run in x.select("ada-auto", x.scales[-1]):
        at, every = [], []
        changes = [*run["changes"], [run["steps"], run["changes"][-1][1]]]
        for (step, graph), (until, _) in itertools.pairwise(changes):
            found = re.search(r"every=(\d+)", graph)
            at += [step, until]
            every += [int(found.group(1)) if found else 1] * 2
        lines.append(chart.Line(f"seed {run['seed']}", at, every))
    return chart.lines(lines, "Steps between two averages of all, as ada-auto chose them", "", "step", "steps", log=True)


def _unit(x: Experiment) -> str:
    return "accuracy, %" if x.percent else "perplexity"


FIGURES: dict[str, tuple[str, Callable[[Experiment], str]]] = {
    "scale": ("scale", by_scale),
    "dispersion": ("scale", dispersion),
    "fashion": ("fashion", by_bytes("Fashion-MNIST, MLP")),
    "fashion-levels": ("fashion", levels),
    "cifar": ("cifar", by_bytes("CIFAR-10, ResNet-8")),
    "cifar-levels": ("cifar", levels),
    "lstm": ("lstm", by_epoch("A word LSTM on a part of WikiText-2")),
    "n1008": ("n1008", by_bytes("Fashion-MNIST, MLP")),
}

# --- Tables ----------------------------------------------------------------------------------------------------------------------


def scale_table(x: Experiment) -> Iterator[str]:
    yield "| method | " + " | ".join(f"n={n}" for n in x.scales) + " |"
    yield "| --- |" + " --- |" * len(x.scales)
    for m in x.methods:
        yield f"| {m} | " + " | ".join(say(x.values(m, n)) for n in x.scales) + " |"


def correlations(x: Experiment) -> Iterator[str]:
    """Early dispersion against accuracy, over methods, per seed."""
    yield "| n | " + " | ".join(MEASURES) + " |"
    yield "| --- |" + " --- |" * len(MEASURES)
    for n in x.scales:
        row = []
        for measure in MEASURES:
            found = []
            for seed in sorted({run["seed"] for run in x.runs}):
                cell = [run for run in x.runs if run["seed"] == seed and run["replicas"] == n and run["early"].get(measure) is not None]
                if len(cell) > 2:
                    pairs = [(run["early"][measure], x.value(run)) for run in cell]
                    found.append(float(scipy.stats.spearmanr(*zip(*pairs, strict=True)).statistic))
            row.append(say(estimate(found)))
        yield f"| {n} | " + " | ".join(row) + " |"


def method_table(x: Experiment) -> Iterator[str]:
    unit = "points" if x.percent else "%"
    yield f"| method | {_unit(x)} | against complete, {unit} | against ada, {unit} | bytes of all-reduce | seeds |"
    yield "| --- | --- | --- | --- | --- | --- |"
    n = x.scales[-1]
    for m in x.methods:
        versus = [say(x.against(m, other, n), sign=True) if m != other and other in x.methods else "" for other in ("complete", "ada")]
        yield f"| {m} | {say(x.values(m, n))} | {versus[0]} | {versus[1]} | {100 * x.share(m, n):.0f} % | {len(x.select(m, n))} |"


TABLES: dict[str, tuple[str, Callable[[Experiment], Iterator[str]]]] = {
    "scale": ("scale", scale_table),
    "correlations": ("scale", correlations),
    "sqrt": ("sqrt", scale_table),
    "fashion": ("fashion", method_table),
    "cifar": ("cifar", method_table),
    "lstm": ("lstm", method_table),
    "n1008": ("n1008", method_table),
}

# --- All of it -------------------------------------------------------------------------------------------------------------------


def experiments(folder: Path) -> dict[str, Experiment]:
    return {path.stem: Experiment(path.stem, json.loads(path.read_text())) for path in sorted(folder.glob("*.json"))}


def write(results: Path, out: Path, page: Path = PAGE) -> Sequence[Path]:
    """Figures into ``out``, and the tables into the page, between ``<!-- table: NAME -->`` and ``<!-- end -->``."""
    found = experiments(results)
    out.mkdir(parents=True, exist_ok=True)
    written = []
    for name, (source, draw) in FIGURES.items():
        if source in found:
            path = out / f"{name}.svg"
            path.write_text(draw(found[source]))
            written.append(path)
    if page.exists():
        page.write_text(with_tables(page.read_text(), found))
        written.append(page)
    return written


def with_tables(text: str, found: dict[str, Experiment]) -> str:
    for name, (source, rows) in TABLES.items():
        if source in found:
            table = "\n".join(rows(found[source]))
            pattern = re.compile(rf"(<!-- table: {name} -->\n).*?(<!-- end -->)", re.DOTALL)
            text = pattern.sub(lambda match, table=table: f"{match[1]}\n{table}\n\n{match[2]}", text)
    return text
