"""The figures and tables of ``docs/study.md`` and ``docs/study-heterogeneous.md``: nothing but what the committed results say."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from benchmarks import chart
from studies.experiment import CONTROL, Experiment, experiments
from studies.tables import with_tables

PAGE = Path(__file__).parent.parent / "docs" / "study.md"
PAGES = (PAGE, PAGE.with_name("study-heterogeneous.md"))

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
