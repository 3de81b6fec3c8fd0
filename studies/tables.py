"""The tables of the study's pages, made from the committed results."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import scipy.stats

from gossamer.dbench.analysis import estimate
from gossamer.rows.profile import MEASURES
from studies.experiment import CONTROL, Experiment, say


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


ALPHAS = {"hetero-alpha1": 1.0, "hetero": 0.1, "hetero-alpha001": 0.01}


def alpha_table(*by_alpha: Experiment) -> Iterator[str]:
    """All methods; the smaller alpha, the more the data differ."""
    base, last = "D-SGD, momentum", by_alpha[-1]
    (n,) = last.scales
    heads = [f"alpha {ALPHAS[x.name]:g} ({len(seeds := x.seeds(n))} seed{'s' * (len(seeds) > 1)})" for x in by_alpha]
    yield f"| method | learning rate | {' | '.join(heads)} | against {base} at 0.01, points | the worse of two replicas at 0.01 |"
    yield "| --- |" + " --- |" * (len(heads) + 3)
    for m in last.methods:
        versus = say(last.against(m, base, n), sign=True) if m != base else ""
        rate, worst = last.select(m, n)[0]["lr"], say(last.values(m, n, "worst"), digits=1)
        yield f"| {m} | {rate:g} | {' | '.join(x.said(m, n) for x in by_alpha)} | {versus} | {worst} |"


# Which of two methods is better was not told by three seeds.
PAIRS = (
    ("CHOCO, 8 bits", "CHOCO, float32"),
    ("CHOCO, 8 bits, lr 0.03", "CHOCO, float32"),
    ("QGM", "D-SGD, momentum"),
)


def seed_table(first: Experiment, *later: Experiment) -> Iterator[str]:
    """Differences over the seeds of the first experiment, over those that came later, and over all of them."""
    both = Experiment("both", {"metric": first.metric, "runs": [run for x in (first, *later) for run in x.runs]})
    (n,), few = both.scales, first.seeds(first.scales[0])
    more = {run["seed"] for run in both.runs} - few
    yield f"| difference | learning rates | seeds {min(few)} to {max(few)}, points | later ones | all | seeds in all | bytes |"
    yield "| --- |" + " --- |" * 6
    for m, other in PAIRS:
        rates = ", ".join(f"{both.select(name, n)[0]['lr']:g}" for name in (m, other))
        found = [both.against(m, other, n, seeds) for seeds in (few, more, few | more)]
        share = both.mean_of("bytes", m, n) / both.mean_of("bytes", other, n)
        points = " | ".join(say(e, sign=True) for e in found)
        yield f"| {m}, against {other} | {rates} | {points} | {found[-1].seeds} | {100 * share:.1f} % |"


def ring_table(*experiments: Experiment) -> Iterator[str]:
    """Methods on the ring of 96, and what the first study, which comes last, has there with the same seed."""
    x, scale = experiments[0], experiments[-1]
    (n,), (seed,) = x.scales, x.seeds(x.scales[0])
    yield "| method | accuracy, % | worst replica |"
    yield "| --- | --- | --- |"
    rows = [(f"D-SGD, momentum, {m}", m, scale) for m in ("complete", "ring")]
    for shown, name, source in rows + [(m, m, some) for some in experiments[:-1] for m in some.methods]:
        (run,) = (run for run in source.select(name, n) if run["seed"] == seed)
        if run["status"] == "diverged":
            yield f"| {shown} | diverged | |"
        else:
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
    "seeds": (("hetero", "hetero-seeds", "hetero-same"), seed_table),
    "exponential": (("hetero-exponential",), hetero_table),
    "n96": (("hetero-96", "scale"), ring_table),
    "cifar that differs": (("hetero-cifar",), hetero_table),
    "cifar, 4 labels": (("hetero-cifar-classes",), hetero_table),
}


def with_tables(text: str, found: Mapping[str, Any], tables: Mapping[str, Any] = TABLES) -> str:
    """``tables``: by name, what each is made from and how."""
    for name, (sources, rows) in tables.items():
        if all(source in found for source in sources):
            before, mark, after = text.partition(f"<!-- table: {name} -->\n")
            if mark:
                table = "\n".join(rows(*(found[source] for source in sources)))
                text = f"{before}{mark}\n{table}\n\n<!-- end -->{after.partition('<!-- end -->')[2]}"
    return text
