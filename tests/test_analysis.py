"""Analysis on small tables whose answers were worked out by hand."""

import math

import numpy as np
import pytest

from gossamer.dbench import analysis as a
from gossamer.dbench import summary
from gossamer.dbench.figures import colours, figures
from gossamer.dbench.findings import findings, shown
from gossamer.dbench.spec import load
from gossamer.dbench.store import Run
from gossamer.rows.profile import MEASURES
from gossamer.trainer import EpochRecord


def run(method, n, seed, value, degree=2.0, dispersion=((0.4, 0.2), (0.1, 0.1)), worst=None, values=(), train=None):
    """A finished run: two looks (steps 0 and 10) at two tensors."""
    numbers = {"value": value, "value_mean": value, "value_worst": worst if worst is not None else value, "value_train": train}
    made = Run(
        0,
        method,
        n,
        seed,
        "done" if value is not None else "diverged",
        None,
        "{}",
        "loop",
        1,
        ("w", "b"),
        20,
        **numbers,
        bytes=1000 * n,
        seconds=1.0,
        consensus_distance=0.1,
    )
    epochs = tuple(
        EpochRecord(e, 10 * (e + 1), 0.1, 1.0, v, method, degree, 100 * (e + 1), 0.1, 1.0)
        for e, v in enumerate(values or (0.5, value or 0.1))
    )
    return a.RunData(
        made,
        method == "centralized",
        epochs,
        np.array([0, 10]),
        {m: np.array(dispersion) for m in MEASURES},
        np.array([1.0, 0.5]),
        (),
    )


def test_estimate_is_a_t_interval():
    e = a.estimate([1.0, 2.0, 3.0])
    assert e.mean == 2
    assert e.half == pytest.approx(4.302653 * 1.0 / math.sqrt(3), rel=1e-5)  # t with 2 degrees of freedom, s = 1
    assert math.isnan(a.estimate([5.0]).low)
    assert a.estimate([5.0]).mean == 5
    assert a.estimate([]).seeds == 0
    assert a.estimate([1.0, math.nan, 3.0]).seeds == 2
    assert a.estimate([0.1, 0.1, 0.1]).above_zero()
    assert not a.estimate([-1.0, 1.0]).above_zero()


RUNS = [
    run("centralized", 8, 0, 0.9, 7, ((0, 0), (0, 0)), train=0.95),
    run("ring", 8, 0, 0.5, 2, ((0.4, 0.2), (0.3, 0.3)), worst=0.4, train=0.5),
    run("torus", 8, 0, 0.7, 3, ((0.3, 0.1), (0.2, 0.2)), train=0.8),
    run("complete", 8, 0, 0.9, 7, ((0.1, 0.3), (0.1, 0.1)), train=0.9),
    run("centralized", 8, 1, 0.8, 7, ((0, 0), (0, 0))),
    run("ring", 8, 1, 0.6, 2, ((0.4, 0.2), (0.3, 0.3)), worst=0.3),
    run("torus", 8, 1, None, 3, ((0.3, 0.1), (0.2, 0.2))),
    run("complete", 8, 1, 0.8, 7, ((0.1, 0.3), (0.1, 0.1))),
]


def test_finals():
    found = {f.method: f for f in a.finals(RUNS)}
    assert found["ring"].value.mean == pytest.approx(0.55)
    assert found["ring"].worst_replica.mean == pytest.approx(0.35)
    assert found["torus"].value.mean == pytest.approx(0.7)
    assert found["torus"].diverged == 1
    assert found["ring"].connections == 2
    assert found["ring"].bytes == 8000
    assert found["torus"].gap.mean == pytest.approx(0.1)
    assert a.finals(RUNS, higher_is_better=False)[2].gap.mean == pytest.approx(-0.1)


def test_paired_differences_go_seed_by_seed():
    e = a.paired_difference(RUNS, "ring", "complete", 8)
    assert e.mean == pytest.approx((-0.4 - 0.2) / 2)
    assert e.seeds == 2
    assert a.paired_difference(RUNS, "torus", "complete", 8).seeds == 1  # the other seed diverged


def test_connections_correlate_with_the_metric():
    # Seed 0: connections 2, 3, 7 and values .5, .7, .9: ρ = 1. Seed 1: torus diverged, so values rank 2, 1, 3: ρ = 0.5.
    assert a.metric_against_connections(RUNS, 8).mean == pytest.approx(0.75)
    assert a.metric_against_connections(RUNS, 8, higher_is_better=False).mean != pytest.approx(0.75)
    assert a.metric_against_connections(RUNS, 8).high == 1.0  # the interval is cut at 1


def test_early_dispersion():
    # The first tenth holds the look before the first average only, where a seed's methods are equal; so the second one counts as well:
    # ring (.3 + .3) / 2 = .3, torus .2, complete (.2 + .1) / 2 = .15. Ranks 3, 2, 1.
    assert [r.early("gini") for r in RUNS[1:4]] == pytest.approx([0.3, 0.2, 0.15])
    # Seed 0 against .5, .7, .9 (ranks 1, 2, 3): ρ = -1. Seed 1, ranks (2, 1, 3): -0.5.
    assert a.metric_against_early_dispersion(RUNS, 8, "gini").mean == pytest.approx(-0.75)


def test_no_interval_is_shown_over_two_seeds():
    assert shown(a.estimate([0.5, 0.6])) == "0.550"
    assert shown(a.estimate([0.5, 0.6, 0.7])) == "0.600 ± 0.248"
    assert "There are two seeds only, so there are no intervals" in findings(RUNS, load("quickstart"), "accuracy", True)[-1]


def test_the_best_is_told_apart_only_if_it_is():
    def best(*values, higher=True):
        finals = a.finals([run(m, 8, s, v + s / 1000) for m, v in zip("abc", values, strict=False) for s in range(3)], higher)
        found = summary._best(finals, higher)
        return found and found.method

    assert best(0.979, 0.976) is None
    assert best(0.9, 0.9) is None
    assert best(0.9, 0.7, 0.6) == "a"
    assert best(0.9, 0.7, 0.6, higher=False) == "c"


def test_ranks_by_hand():
    steps, ranks = a.ranks_over_time(RUNS, 8, "gini")
    assert steps.tolist() == [0, 10]
    # Step 0, tensor w: ring .4, torus .3, complete .1 → 3, 2, 1; tensor b: .2, .1, .3 → 2, 1, 3. Means 2.5, 1.5, 2.
    assert {m: r.tolist() for m, r in ranks.items()} == {"ring": [2.5, 3], "torus": [1.5, 2], "complete": [2, 1]}
    # Mean ranks over time 2.75, 1.75, 1.5 against .5, .7, .9: ρ = -1; against seed 1's order 2, 1, 3: ρ = -0.5.
    assert a.metric_against_rank(RUNS, 8, "gini").mean == pytest.approx((-1 + -0.5) / 2)


def test_dispersion_over_time():
    curve = a.dispersion_over_time(RUNS, "ring", 8, "cv")
    assert curve.steps.tolist() == [0, 10]
    assert curve.mean.tolist() == pytest.approx([0.3, 0.3])
    assert len(a.dispersion_over_time(RUNS, "ring", 99, "cv").steps) == 0


def test_to_target():
    runs = [run("ring", 4, 0, 0.9, values=(0.2, 0.6, 0.9)), run("ring", 4, 1, 0.5, values=(0.2, 0.3, 0.5))]
    (found,) = a.to_target(runs, 0.6)
    assert (found.epochs.mean, found.bytes.mean, found.reached, found.seeds) == (2, 200, 1, 2)
    (found,) = a.to_target(runs, 0.25, higher_is_better=False)
    assert (found.epochs.mean, found.reached) == (1, 2)


FIVE = (("ring", 0.5, 2), ("torus", 0.6, 3), ("exponential", 0.7, 4), ("ada", 0.8, 5), ("complete", 0.9, 7))


def test_sentences_claim_only_what_intervals_support():
    spec = load("quickstart")
    text = " ".join(findings(RUNS, spec, "accuracy", True))
    assert "1 of 8 runs diverged (torus at n=8)" in text
    assert "not ranked" in text
    assert "“More connections, better results”: no verdict with fewer than 5 decentralized methods" in text
    assert "torus (" not in text.partition("From")[0].replace("(torus at", "")  # the seed that is left would flatter it
    strong = [run(m, 8, s, v + s / 1000, d) for s in range(3) for m, v, d in FIVE]
    text = " ".join(findings(strong, spec, "accuracy", True))
    assert "“More connections, better results”: supported (Spearman's ρ = +1.00" in text
    assert "Worse than complete at n=8, seed by seed: ring (-0.400" in text
    mixed = [run(m, 8, s, v if s else 1.4 - v, d) for s in range(3) for m, v, d in FIVE]
    text = " ".join(findings(mixed, spec, "accuracy", True))
    assert "“More connections, better results”: not supported by these seeds" in text
    assert "No difference to complete that the seeds support" in text
    text = " ".join(findings(strong, spec, "perplexity", False))
    assert "Better than complete at n=8, seed by seed: ring (-0.400" in text
    one = [r for r in strong if r.run.seed == 0]
    text = " ".join(findings(one, spec, "accuracy", True))
    assert "one seed only" in text
    assert "supported (" not in text
    assert findings([], spec, "accuracy", True) == ["No run is finished yet."]


def test_a_diverged_run_ranks_last_and_leaves_the_curves_alone():
    runs = [
        run("ring", 4, 0, 0.5),
        run("torus", 4, 0, None, dispersion=((0.1, 0.1), (math.nan, math.inf))),
        run("complete", 4, 0, 0.9),
    ]
    _, ranks = a.ranks_over_time(runs, 4, "gini")
    assert ranks["torus"].tolist() == [1, 3]
    assert len(a.dispersion_over_time(runs, "torus", 4, "gini").steps) == 0
    assert math.isnan(next(f for f in a.finals(runs) if f.method == "torus").bytes)


def test_a_method_has_the_same_colour_in_each_report_and_the_last_epoch_is_seen():
    few, many = ([run(m, 8, 0, 0.5) for m in methods] for methods in (("ada", "mine"), ("centralized", "mine", "other", "ada")))
    assert colours(few)["ada"] == colours(many)["ada"]
    assert len(set(colours(many).values())) == 4
    drawn = {figure.id: figure for figure in figures([run("ada", 8, 0, 0.5, degree=3.0)], "accuracy", True)}
    models = drawn["models"].variants[0]["data"][0]
    assert models["x"] == [30, 60]  # 10 steps in each epoch, 3 connections


def test_curves_have_bands_from_three_seeds_on_and_log_axes_of_counts_have_plain_numbers():
    three = [run(m, 8, seed, 0.5 + seed / 10) for m in ("ring", "ada") for seed in range(3)]
    drawn = {figure.id: figure.variants[0] for figure in figures(three, "accuracy", True)}
    band = next(trace for trace in drawn["epochs"]["data"] if trace.get("fill"))
    last = a.estimate([0.5, 0.6, 0.7])
    assert band["x"] == [1, 2, 2, 1]
    assert band["y"][1:3] == pytest.approx([last.high, last.low], abs=1e-4)
    assert [trace["name"] for trace in drawn["epochs"]["data"]] == ["", "", "ring", "ada"]
    assert drawn["connections"]["layout"]["xaxis"]["ticktext"][:5] == ["1", "2", "5", "10", "20"]
    two = {figure.id: figure.variants[0] for figure in figures(three[:2], "accuracy", True)}
    assert not any(trace.get("fill") for trace in two["epochs"]["data"])
