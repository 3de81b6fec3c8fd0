"""Methods at equal cost, on small tables whose answers were worked out by hand."""

import dataclasses
import math

import pytest

from gossamer.dbench import budgets
from tests.test_analysis import run


def costly(data, factor):
    """The same run, with so many times the bytes."""
    epochs = tuple(dataclasses.replace(e, bytes=e.bytes * factor) for e in data.epochs)
    return dataclasses.replace(data, epochs=epochs)


RUNS = [
    run("cheap", 8, 0, 0.6, values=(0.4, 0.6)),
    costly(run("dear", 8, 0, 0.8, values=(0.5, 0.6, 0.7, 0.8)), 2),
    costly(run("dearest", 8, 0, 0.9, values=(0.5, 0.9)), 4),
    run("lost", 8, 0, None),
]


def test_at_equal_bytes_each_method_is_as_far_as_its_bytes_bring_it():
    budget, found = budgets.at_equal(RUNS, 8, "bytes")
    assert budget == 200  # two epochs of the cheapest, of 100 each
    by_name = {f.method: f for f in found}
    assert by_name["cheap"].value.mean == pytest.approx(0.6)
    assert by_name["cheap"].share == 1
    assert by_name["dear"].value.mean == pytest.approx(0.5)  # one epoch of 200
    assert by_name["dear"].share == pytest.approx(0.25)
    assert math.isnan(by_name["dearest"].value.mean)  # its first epoch costs 400
    assert math.isnan(by_name["lost"].value.mean)


def test_between_two_epochs_the_value_lies_between():
    _, found = budgets.at_equal(RUNS, 8, "bytes", 300)
    assert {f.method: f.value.mean for f in found}["dear"] == pytest.approx(0.55)
    assert {f.method: f.value.mean for f in found}["cheap"] == pytest.approx(0.6)  # it has spent no more


def test_at_equal_steps_and_without_a_clock():
    budget, found = budgets.at_equal(RUNS, 8, "steps")
    assert budget == 20
    assert {f.method: f.value.mean for f in found}["dear"] == pytest.approx(0.6)
    assert math.isnan(budgets.at_equal(RUNS, 8, "seconds")[0])


def test_at_equal_predicted_time():
    timed = [dataclasses.replace(r, step_seconds=s) for r, s in zip(RUNS[:2], (0.1, 0.05), strict=True)]
    budget, found = budgets.at_equal(timed, 8, "seconds")
    assert budget == pytest.approx(2.0)
    assert [f.value.mean for f in found] == pytest.approx([0.6, 0.8])


def test_the_section_names_budget_and_share():
    text = budgets.section(RUNS, "accuracy")
    assert "At equal cost, n=8" in text
    assert "0.0002 MB received" in text
    assert "(25%)" in text
    assert "predicted" not in text
    assert budgets.section(RUNS[:1], "accuracy") == ""
