"""The figures and tables of ``docs/study.md`` and ``docs/study-heterogeneous.md``: nothing but what the committed results say."""

from __future__ import annotations

import itertools
import json
import math
import re
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import scipy.stats

from benchmarks import chart
from gossamer.dbench.analysis import Estimate, estimate
from gossamer.rows.profile import MEASURES

PAGE = Path(__file__).parent.parent / "docs" / "study.md"
PAGES = (PAGE, PAGE.with_name("study-heterogeneous.md"))
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

    def against(self, method: str, other: str, n: int) -> Estimate:
        """Differences of runs with the same seed: in points, or in percent of the other's perplexity."""
        theirs = {run["seed"]: self.value(run) for run in self.select(other, n)}
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


# --- Figures ---------------------------------------------------------------------------------------------------------------------

Found = Mapping[str, "Experiment"]


ERRORS = (10.0, 20.0)  # percent: what the figures show


def off_scale(x: Experiment) -> str:
    """What is above ``ERRORS``, in words."""
    above = [(m, n, x.error(m, n)) for m in x.methods for n in x.scales if x.error(m, n) > ERRORS[1]]
    return " ".join(f"Off the scale: {m} with {n} replicas, {error:.0f} %." for m, n, error in above)


def by_scale(found: Found) -> str:
    x = found["scale"]
    lines = [chart.Line(m, x.scales, [x.error(m, n) for n in x.scales]) for m in x.methods]
    note = f"Fashion-MNIST, MLP; medians over seeds; linear learning-rate scaling. {off_scale(x)}"
    title = "Error of the averaged model against the number of replicas"
    return chart.lines(lines, title, note, "replicas", "error, %", log_x=True, span=ERRORS)


def by_connections(found: Found) -> str:
    x = found["scale"]
    lines = []
    for n in x.scales:
        some = [m for m in x.methods if m != "centralized"]
        points = sorted((x.mean_of("connections", m, n), x.error(m, n)) for m in some)
        lines.append(chart.Line(f"n={n}", [a for a, _ in points], [b for _, b in points]))
    note = f"Fashion-MNIST, MLP; ring, torus, exponential, complete; medians over seeds. {off_scale(x)}"
    title = "Error of the averaged model against the replicas that each one hears per step"
    return chart.lines(lines, title, note, "connections", "error, %", log_x=True, span=ERRORS)


def against_bytes(found: Found) -> str:
    """What each method reached, and what it sent for it."""
    panels = []
    for name, title, reach in TASKS:
        if name in found:
            x = found[name]
            n = x.scales[-1]
            dots = []
            for m in (m for m in x.methods if m != CONTROL):  # it would cover ada-auto
                e = x.against(m, "complete", n)
                kind = "ours" if m == "ada-auto" else "ddp" if m in ("centralized", "complete") else "none"
                dots.append(chart.Dot(SHORT.get(m, m), 100 * x.share(m, n), e.mean, e.low, e.high, kind))
            unit = "accuracy, points" if x.percent else "perplexity, % (less is better)"
            panels.append(chart.Scatter(f"{title}, {n} replicas", unit, dots, reach, "highest" if x.percent else "lowest"))
    note = "Differences to complete, seed by seed: mean, 95 % interval. Orange: all average all in every step. Blue: ours, one setting."
    return chart.scatters(panels, "What was reached, and what was sent for it", note, "bytes, % of all-reduce")


SHORT = {"periodic:every=8,gap=1": "periodic", "one-peer-exponential": "one-peer"}


TASKS = (
    ("fashion", "Fashion-MNIST, MLP", 6.0),
    ("cifar", "CIFAR-10, ResNet-8, 2 epochs", 12.0),
    ("cifar8", "CIFAR-10, ResNet-8, 8 epochs", 20.0),
    ("lstm", "WikiText-2 (a part), LSTM", 40.0),
    ("n1008", "Fashion-MNIST, MLP", 12.0),
)


def dispersion(found: Found) -> str:
    x = found["scale"]
    n = x.scales[-1]
    lines = []
    for method in x.methods:
        cell = [run for run in x.select(method, n) if run["looks"]]
        if cell and method != "centralized":
            width = min(len(run["looks"]) for run in cell)
            means = [sum(run["dispersion"]["gini"][k] or 1e-6 for run in cell) / len(cell) for k in range(width)]
            lines.append(chart.Line(method, cell[0]["looks"][:width], means))
    title, note = (
        f"Dispersion of the replicas' norms, {n} replicas",
        "Gini index before averaging, mean over tensors and seeds.",
    )
    return chart.lines(lines, title, note, "step", "Gini", log=True, span=(1e-4, 0.5))


def levels(found: Found) -> str:
    """How often the Ada that decides by itself averages; the first seed of each task."""
    lines = []
    for name, title, _ in TASKS:
        if name in found:
            x = found[name]
            run = x.select("ada-auto", x.scales[-1])[0]
            at, every = [], []
            for (step, graph), (until, _) in itertools.pairwise([*run["changes"], [run["steps"], ""]]):
                period = re.search(r"every=(\d+)", graph)
                at += [100 * step / run["steps"], 100 * until / run["steps"]]
                every += [int(period.group(1)) if period else 1] * 2
            lines.append(chart.Line(f"{title}, {x.scales[-1]}", at, every))
    note = "Seed 0 of each task, the same setting for all."
    return chart.lines(
        lines, "Steps between two averages of all, as ada-auto chose them", note, "% of training", "steps", log=True
    )


FIGURES: dict[str, tuple[Callable[[Found], str], tuple[str, ...]]] = {
    "scale": (by_scale, ("scale",)),
    "connections": (by_connections, ("scale",)),
    "dispersion": (dispersion, ("scale",)),
    "bytes": (against_bytes, ()),
    "levels": (levels, ()),
}

# --- Tables ----------------------------------------------------------------------------------------------------------------------


def scale_table(x: Experiment) -> Iterator[str]:
    yield "| method | " + " | ".join(f"n={n}" for n in x.scales) + " |"
    yield "| --- |" + " --- |" * len(x.scales)
    for m in x.methods:
        yield f"| {m} | " + " | ".join(x.said(m, n) for n in x.scales) + " |"


def early(x: Experiment) -> Iterator[str]:
    """When the replicas' norms are most dispersed."""
    yield "| method | Gini in the first tenth | largest | at, % of training | at the end |"
    yield "| --- | --- | --- | --- | --- |"
    n = x.scales[-1]
    for m in x.methods:
        runs = [run for run in x.select(m, n) if run["looks"] and m != "centralized" and run["status"] == "done"]
        if runs:
            ginis = [run["dispersion"]["gini"] for run in runs]
            peaks = [max(range(len(gini)), key=gini.__getitem__) for gini in ginis]
            at = [100 * run["looks"][k] / run["steps"] for run, k in zip(runs, peaks, strict=True)]
            first, most, last = (
                statistics.fmean(values)
                for values in (
                    [run["early"]["gini"] for run in runs],
                    [gini[k] for gini, k in zip(ginis, peaks, strict=True)],
                    [gini[-1] for gini in ginis],
                )
            )
            where = f"{min(at):.0f} to {max(at):.0f}" if round(min(at)) < round(max(at)) else f"{at[0]:.0f}"
            yield f"| {m} | {first:.4f} | {most:.4f} | {where} | {last:.4f} |"


def correlations(x: Experiment) -> Iterator[str]:
    """Early dispersion against what was reached: Spearman's ρ over the decentralized methods, of each seed."""
    measures = [*MEASURES, "consensus"]
    yield "| n | " + " | ".join(measures) + " |"
    yield "| --- |" + " --- |" * len(measures)
    for n in x.scales:
        row = []
        for measure in measures:
            found = []
            for seed in sorted(x.seeds(n)):
                cell = [
                    run
                    for run in x.runs
                    if run["seed"] == seed and run["replicas"] == n and run["method"] not in ("centralized", CONTROL)
                ]
                if len(cell) > 2:
                    # What is not finite is the most of all; a run that diverged is the worst.
                    pairs = [(math.inf if (seen := run["early"][measure]) is None else seen, x.value(run)) for run in cell]
                    found.append(float(scipy.stats.spearmanr(*zip(*pairs, strict=True)).statistic))
            row.append(", ".join(f"{rho:.1f}" if abs(rho) < 0.995 else f"{rho:.0f}" for rho in found))
        yield f"| {n} | " + " | ".join(row) + " |"


def method_table(x: Experiment) -> Iterator[str]:
    unit = "points" if x.percent else "%"
    yield f"| method | {x.unit} | worst replica | against complete, {unit} | against ada, {unit} | bytes of all-reduce | seeds |"
    yield "| --- | --- | --- | --- | --- | --- | --- |"
    n = x.scales[-1]
    for m in x.methods:
        versus = [
            say(x.against(m, other, n), sign=True) if m != other and other in x.methods else "" for other in ("complete", "ada")
        ]
        reached = f"{x.said(m, n)} | {x.values(m, n, 'worst').mean:.2f}"
        yield f"| {m} | {reached} | {versus[0]} | {versus[1]} | {100 * x.share(m, n):.0f} % | {len(x.select(m, n))} |"


def adam_table(x: Experiment) -> Iterator[str]:
    """Each against one-peer Adam, and against centralized Adam with its own learning rate."""
    yield "| method | perplexity per byte | against dadam, % | against centralized with that learning rate, % |"
    yield "| --- | --- | --- | --- |"
    n = x.scales[-1]
    for m in x.methods:
        others = ("dadam", "centralized" + "".join(m.partition(", lr ")[1:]))
        versus = [say(x.against(m, other, n), sign=True) if m != other else "" for other in others]
        yield f"| {m} | {x.said(m, n)} | {' | '.join(versus)} |"


def order_table(awc: Experiment, atc: Experiment) -> Iterator[str]:
    yield "| method | adapt then combine | adapt while combine | difference, points |"
    yield "| --- | --- | --- | --- |"
    n = awc.scales[-1]
    for m in awc.methods:
        then = {run["seed"]: atc.value(run) for run in atc.select(m, n)}
        pairs = [(awc.value(run), then[run["seed"]]) for run in awc.select(m, n)]
        columns = [say(estimate(column)) for column in ((b for _, b in pairs), (a for a, _ in pairs))]
        yield f"| {m} | {' | '.join(columns)} | {say(estimate(a - b for a, b in pairs), sign=True)} |"


def hetero_table(x: Experiment) -> Iterator[str]:
    """Each against D-SGD with momentum, and its bytes against those of D-SGD on the same graph in float32."""
    base, n = next(m for m in x.methods if m.startswith("D-SGD, momentum")), x.scales[-1]
    yield f"| method | learning rate | {x.unit} | against {base}, points | bytes of D-SGD |"
    yield "| --- | --- | --- | --- | --- |"
    for m in x.methods:
        versus = say(x.against(m, base, n), sign=True) if m != base else ""
        share = x.mean_of("bytes", m, n) / x.mean_of("bytes", base, n)
        yield f"| {m} | {x.select(m, n)[0]['lr']:g} | {x.said(m, n)} | {versus} | {100 * share:.0f} % |"


def alpha_table(*by_alpha: Experiment) -> Iterator[str]:
    """All methods, on the seeds that the last experiment has; the smaller alpha, the more the data differ."""
    base, last = "D-SGD, momentum", by_alpha[-1]
    (n,) = last.scales
    seeds = last.seeds(n)
    shown = f"seed{'s' * (len(seeds) > 1)} {', '.join(map(str, sorted(seeds)))}"
    yield f"| method | learning rate | alpha 0.1, {shown} | 0.01 | against {base} at 0.01, points | the worse of two replicas at 0.01 |"
    yield "| --- | --- | --- | --- | --- | --- |"
    for m in last.methods:
        versus = say(last.against(m, base, n), sign=True) if m != base else ""
        values = [say(estimate(x.value(run) for run in x.select(m, n) if run["seed"] in seeds)) for x in by_alpha]
        rate, worst = last.select(m, n)[0]["lr"], say(last.values(m, n, "worst"), digits=1)
        yield f"| {m} | {rate:g} | {' | '.join(values)} | {versus} | {worst} |"


def ring_table(x: Experiment, scale: Experiment) -> Iterator[str]:
    """Methods on the ring of 96, and what the first study has there with the same seed."""
    (n,), (seed,) = x.scales, x.seeds(x.scales[0])
    yield "| method | accuracy, % | worst replica |"
    yield "| --- | --- | --- |"
    for name, source in [(m, scale) for m in ("complete", "ring")] + [(m, x) for m in x.methods]:
        (run,) = (run for run in source.select(name, n) if run["seed"] == seed)
        shown = name if source is x else f"D-SGD, momentum, {name}"
        yield f"| {shown} | {x.value(run):.2f} | {x.value(run, 'worst'):.2f} |"


# The table, the experiments that it is made from, and how.
TABLES: dict[str, tuple[tuple[str, ...], Callable[..., Iterator[str]]]] = {
    "scale": (("scale",), scale_table),
    "early": (("scale",), early),
    "correlations": (("scale",), correlations),
    "correlations of fashion": (("fashion",), correlations),
    "sqrt": (("sqrt",), scale_table),
    "fashion": (("fashion",), method_table),
    "cifar": (("cifar",), method_table),
    "cifar8": (("cifar8",), method_table),
    "lstm": (("lstm",), method_table),
    "n1008": (("n1008",), method_table),
    "order": (("awc", "fashion"), order_table),
    "adam": (("adam",), adam_table),
    "hetero": (("hetero",), hetero_table),
    "alphas": (("hetero", "hetero-alpha001"), alpha_table),
    "exponential": (("hetero-exponential",), hetero_table),
    "n96": (("hetero-96", "scale"), ring_table),
    "cifar that differs": (("hetero-cifar",), hetero_table),
}

# --- All of it -------------------------------------------------------------------------------------------------------------------


def experiments(folder: Path) -> dict[str, Experiment]:
    return {path.stem: Experiment(path.stem, json.loads(path.read_text())) for path in sorted(folder.glob("*.json"))}


def write(results: Path, out: Path, pages: Sequence[Path] = PAGES) -> Sequence[Path]:
    """Figures into ``out``, and the tables into the pages, between ``<!-- table: NAME -->`` and ``<!-- end -->``."""
    found = experiments(results)
    out.mkdir(parents=True, exist_ok=True)
    written = []
    for name, (draw, needed) in FIGURES.items():
        if found and all(source in found for source in needed):
            path = out / f"{name}.svg"
            path.write_text(draw(found))
            written.append(path)
    for page in pages:
        page.write_text(with_tables(page.read_text(), found))
        written.append(page)
    return written


def with_tables(text: str, found: Mapping[str, Any], tables: Mapping[str, Any] = TABLES) -> str:
    """``tables``: by name, what each is made from and how."""
    for name, (sources, rows) in tables.items():
        if all(source in found for source in sources):
            before, mark, after = text.partition(f"<!-- table: {name} -->\n")
            if mark:
                table = "\n".join(rows(*(found[source] for source in sources)))
                text = f"{before}{mark}\n{table}\n\n<!-- end -->{after.partition('<!-- end -->')[2]}"
    return text
