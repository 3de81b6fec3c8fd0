"""``[search]`` in a spec: each method gets its own learning rate, on seeds of its own, by data that were held out."""

import pytest
import torch

from gossamer.data.sources import Tensors, Text, held_out, source
from gossamer.dbench import report, results, search
from gossamer.dbench import spec as specs
from gossamer.dbench.runner import bench
from gossamer.dbench.store import FILE, Store
from gossamer.errors import GossamerError

RAW = {
    "name": "searched",
    "replicas": [4],
    "methods": [
        {"name": "centralized", "options": {"momentum": 0.9}},
        {"name": "ring"},
        {"name": "choco", "graph": "ring", "algorithm": "choco:wire=8bits"},
    ],
    "seeds": [0, 1],
    "task": {"name": "digits/mlp", "epochs": 2, "batch": 16, "options": {"train": 600, "test": 200}},
    "profile": {"every": 0},
    "search": {"lr": [1e-4, 0.2], "seeds": [100], "option": "gamma", "values": [0.5, 1.0], "epochs": 1},
}


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    folder = tmp_path_factory.mktemp("search")
    assert bench(specs.build(RAW), folder, jobs=2, quiet=True).complete
    return folder


def test_each_method_is_run_with_what_was_best_for_it_on_other_seeds(out):
    store = Store(out / FILE)
    rows = store.meta(search.KEY)
    assert len(rows) == 2 + 2 + 4  # only choco has the option
    for name in ("centralized", "ring", "choco"):
        mine = [row for row in rows if row["method"] == name]
        best = max(mine, key=lambda row: row["mean"])
        assert [row for row in mine if row["chosen"]] == [best]
        assert best["lr"] == 0.2
    ran = search.ran(store)
    assert [method.lr for method in ran.methods] == [0.2] * 3
    assert (
        f"gamma={next(row['value'] for row in rows if row['chosen'] and row['method'] == 'choco')}" in ran.methods[2].algorithm
    )
    assert store.spec() == specs.build(RAW)  # as the person wrote it
    assert {row["lr"] for row in results.results(store)} == {0.2}
    searched = Store(out / search.FOLDER / FILE)
    assert {run.seed for run in searched.runs()} == {100}
    assert searched.spec().task.validation == 0.1


def test_the_results_are_those_of_a_spec_that_names_the_settings(out, tmp_path):
    rows = Store(out / FILE).meta(search.KEY)
    plain = search.tuned(specs.build(RAW), rows).model_copy(update={"search": None})
    bench(plain, tmp_path, jobs=2, quiet=True)
    one, other = ({run.cell: run.value for run in Store(folder / FILE).runs()} for folder in (out, tmp_path))
    assert one == other


def test_a_second_call_repeats_nothing_and_more_methods_are_searched_alone(out):
    before = {run.cell: run.seconds for run in Store(out / search.FOLDER / FILE).runs()}
    more = RAW | {"methods": [*RAW["methods"], {"name": "torus"}]}
    assert bench(specs.build(more), out, jobs=2, quiet=True).complete
    after = {run.cell: run.seconds for run in Store(out / search.FOLDER / FILE).runs()}
    assert after.items() >= before.items()
    assert len(after) == len(before) + 2


def test_the_report_shows_the_grid(out):
    text = report.write(out).read_text()
    assert "The settings that were tried" in text
    assert "lr=0.2, gamma=0.5" in text
    assert "At the edge of the grid" in text


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"seeds": [0, 100]}, r"search.seeds: \[0\] are seeds of the results as well"),
        ({"option": "mu"}, "no method here has an option 'mu'; their options are"),
        ({"option": None}, "option and values belong together"),
        ({"lr": [0.1, 0.1]}, "names a value twice"),
        ({"lr": []}, "search.lr"),
        ({"lr": [0.0]}, "search.lr"),
        ({"validation": 1.5}, "search.validation"),
        ({"runs": 7}, "8 settings with 1 seeds are 8 runs, and its budget is runs=7"),
    ],
)
def test_what_can_not_be_searched_is_said_in_one_line(changed, said, tmp_path):
    with pytest.raises(GossamerError, match=said) as error:
        bench(specs.build(RAW | {"search": RAW["search"] | changed}), tmp_path, quiet=True)
    assert "\n" not in str(error.value)


def test_a_method_with_a_learning_rate_of_its_own_is_not_searched():
    with pytest.raises(GossamerError, match="'ring' has a learning rate already"):
        specs.build(RAW | {"methods": [{"name": "ring", "lr": 0.1}]})


def test_a_setting_that_diverges_is_not_chosen(tmp_path):
    raw = RAW | {"methods": [{"name": "ring"}], "seeds": [0], "search": {"lr": [0.05, 1e30], "seeds": [100], "epochs": 1}}
    bench(specs.build(raw), tmp_path, jobs=1, quiet=True)
    rows = Store(tmp_path / FILE).meta(search.KEY)
    assert [(row["lr"], row["chosen"], row["diverged"]) for row in rows] == [(0.05, True, 0), (1e30, False, 1)]


def test_what_is_held_out_is_not_trained_on():
    data = Tensors(torch.arange(100.0).unsqueeze(1), torch.arange(100) % 7)
    train, test = held_out(data, 0.25)
    seen = [set(part.take(torch.arange(len(part)))[0].flatten().tolist()) for part in (train, test)]
    assert len(seen[0]) == 75
    assert len(seen[1]) == 25
    assert not seen[0] & seen[1]
    assert train.labels is not None
    assert torch.equal(train.labels, train.take(torch.arange(75))[1])
    again = held_out((data.tensors[0], data.tensors[1]), 0.25)[1]
    assert torch.equal(again.take(torch.arange(25))[0], test.take(torch.arange(25))[0])
    text_train, text_test = held_out(Text(torch.arange(1000), 8), 0.1)
    assert isinstance(text_train, Text)
    assert isinstance(text_test, Text)
    assert int(text_train.tokens[-1]) < int(text_test.tokens[0])
    with pytest.raises(GossamerError, match="at least one must be on each side"):
        held_out(source(data), 0.001)
