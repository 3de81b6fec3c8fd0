"""Specs: what is read, and that every mistake is one clear line."""

import contextlib
import tomllib
from importlib import resources

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gossamer.dbench import report
from gossamer.dbench import spec as specs
from gossamer.errors import GossamerError

GOOD = """
name = "small"
replicas = [4, 8]
methods = ["centralized", "ring", { name = "slow ada", graph = "ada:reach=0.5", lr = 0.2, scaling = "sqrt" }]
seeds = [0, 1]
backend = "loop"

[task]
name = "digits/mlp"
epochs = 3
batch = 8
partition = "dirichlet:alpha=0.5"

[optimizer]
name = "adam"
lr = 0.01
options = { betas = [0.9, 0.99] }
clip = 1.0

[learning_rate]
shape = "step-decay"
milestones = [0.3, 0.6]
scaling = "linear"
reference = 4
"""


def test_a_spec_becomes_cells_and_settings():
    spec = specs.parse(GOOD)
    assert len(spec.cells()) == 12
    assert spec.cells()[0] == specs.Cell("centralized", 4, 0)
    central, ring, ada = (spec.settings(specs.Cell(m, 8, 1)) for m in ("centralized", "ring", "slow ada"))
    assert (central.algorithm, ring.algorithm) == ("allreduce", "dsgd-atc")
    assert ring.learning_rate.peak(8) == pytest.approx(0.02)
    assert ada.learning_rate.peak(8) == pytest.approx(0.2 * 2**0.5)
    assert ada.optimizer.lr == 0.2
    assert ring.optimizer.clip == 1.0
    assert ring.optimizer.options == {"betas": [0.9, 0.99]}
    assert ring.seed == 1
    assert ring.partition == "dirichlet:alpha=0.5"
    assert spec.method("slow ada").topology == "ada:reach=0.5"


def test_a_spec_survives_being_stored():
    spec = specs.parse(GOOD)
    assert specs.build(spec.model_dump(mode="json")) == spec
    other = spec.model_dump(mode="json") | {"seeds": [0]}
    assert specs.differences(spec.model_dump(mode="json"), other) == ["seeds: [0, 1] there, [0] here"]


ODD = GOOD.replace('name = "small"', 'name = "a \\"b\\" \\\\ ü \\u007f"\ntarget = { value = 1e-30 }')
FAILING = """
[failures.none]
[failures."for a while"]
events = [{ share = 0.25, at = 1.0, back = 2.0 }]
"""
SEARCHED = """
[search]
lr = [0.1, 0.2]
seeds = [100]
"""


@pytest.mark.parametrize("text", [GOOD, ODD, GOOD + FAILING, GOOD.replace("lr = 0.2, ", "") + SEARCHED, *specs.shipped()])
def test_the_spec_in_a_report_can_be_run(text):
    spec = specs.load(text) if text in specs.shipped() else specs.parse(text)
    assert specs.parse(report._spec(spec)) == spec


def test_results_of_a_method_that_is_not_known_here_can_be_read():
    raw = specs.parse(GOOD).model_dump(mode="json") | {"algorithm": "of-a-persons-own:beta=2"}
    with pytest.raises(GossamerError, match="algorithm.*'of-a-persons-own"):
        specs.build(raw)
    stored = specs.build(raw, stored=True)
    assert [method.centralized for method in stored.methods] == [True, False, False]


@pytest.mark.parametrize("name", specs.shipped())
def test_shipped_specs_are_valid_and_need_no_code(name):
    spec = specs.load(name)
    assert spec.name == name
    assert len(spec.cells()) > 1


def test_the_quickstart_is_what_it_promises():
    spec = specs.load("quickstart")
    assert spec.replicas == (8, 16, 32, 48)
    assert [m.name for m in spec.methods] == ["centralized", "ring", "torus", "exponential", "complete", "ada"]
    assert len(spec.seeds) == 3


def changed(old, new):
    assert old in GOOD
    return GOOD.replace(old, new)


BAD = [
    (changed("replicas =", "replica ="), "replica is not a known key; did you mean 'replicas'"),
    (changed("epochs = 3", "epoch = 3"), "task.epoch is not a known key; did you mean 'epochs'"),
    (changed("epochs = 3", 'epochs = "3"'), "task.epochs: .*valid integer.*'3'"),
    (changed("epochs = 3", "epochs = 0"), "task.epochs: .*greater than or equal to 1"),
    (changed("[4, 8]", "[]"), "replicas: .*at least 1 item"),
    (changed("[4, 8]", "[0]"), "replicas: .*from 1 to 100,000"),
    (changed("[4, 8]", "[4, 4]"), "replicas: .*names a number twice"),
    (changed("[4, 8]", "4"), "replicas: "),
    (changed('"ring"', '"rnig"'), "method 'rnig' with replicas=4 is impossible .*did you mean 'ring'"),
    (changed('"ring"', '"ring", "ring"'), "'ring' is there twice"),
    (changed('"ring"', '"torus"').replace("[4, 8]", "[4, 7]"), "method 'torus' with replicas=7 is impossible .*prime"),
    (changed('"ring"', '"lattice:k=6"'), "'lattice:k=6' with replicas=4 is impossible"),
    (changed("digits/mlp", "digits/mpl"), "task.name: there is no task 'digits/mpl'; did you mean 'digits/mlp'"),
    (changed("alpha=0.5", "alpha=0"), "task.partition: .*alpha above 0"),
    (changed('"adam"', '"adan"'), "optimizer.name: .*not in torch.optim"),
    (changed('"adam"', '"lbfgs"'), "optimizer.name: .*can't run on a block"),
    (changed("lr = 0.01", "lr = -1.0"), "optimizer.lr: .*greater than 0"),
    (changed("lr = 0.01", "lr = nan"), "optimizer.lr"),
    (changed('"step-decay"', '"cosine"'), "learning_rate.shape: "),
    (changed('shape = "step-decay"', 'shape = "inverse-sqrt"\nwarmup = inf'), "learning_rate.warmup: "),
    (changed("[0, 1]", "[9223372036854775808]"), "seeds: .*from 0 to 2"),
    (changed('backend = "loop"', 'algorithm = "allreduce"'), "algorithm: .*for the method 'centralized' only"),
    (changed('"linear"', '"cubic"'), "learning_rate.scaling: "),
    (changed('"loop"', '"magic"'), "backend: .*'magic' is not known"),
    (changed("lr = 0.2, ", "speed = 2, "), "methods.2.speed is not a known key"),
    # Nothing is said of the list on account of one method in it.
    (
        changed("lr = 0.2, ", 'wire = "sign", '),
        "^spec: methods.2.wire: wire='sign' is not for these rows, [^;]*; [^;]*'4bits'$",
    ),
    (changed("[0.3, 0.6]", "[30, 60]"), r"learning_rate: milestones=\[30(.0)?, 60(.0)?\]: they are fractions of all steps"),
    (
        changed('shape = "step-decay"\n', ""),
        "learning_rate.milestones has no effect with shape = 'constant'; it is for 'step-decay'",
    ),
    (changed('shape = "step-decay"', 'shape = "warmup-cosine"'), "milestones has no effect with shape = 'warmup-cosine'"),
    (changed('shape = "step-decay"', 'shape = "step-decay"\nfinal = 0.0'), "final has no effect with shape = 'step-decay'"),
    (changed('scaling = "linear"', "").replace(', scaling = "sqrt"', ""), "reference has no effect without scaling"),
    (changed('"ring"', '{ name = "gradients", algorithm = "allreduce", graph = "ring" }'), "graph = 'ring' has no effect"),
    (
        changed('"centralized"', '{ name = "centralized", graph = "ring" }'),
        "method 'centralized': graph = 'ring' has no effect",
    ),
    (changed('"centralized"', '{ name = "centralized", wire = "bfloat16" }'), "wire = 'bfloat16' has no effect"),
    (changed('shape = "step-decay"', 'shape = "step-decay"\nstart = 0.5'), "learning_rate.start has no effect without warmup"),
    (changed("epochs = 3", 'epochs = 3\ndata = "/there"'), "task.data has no effect: digits/mlp comes with its data"),
    ("name = ", "is not valid TOML"),
    ("", "name is missing"),
]


@pytest.mark.parametrize(("text", "message"), BAD)
def test_mistakes_are_named_in_one_line(text, message):
    with pytest.raises(GossamerError, match=message) as caught:
        specs.parse(text)
    assert "\n" not in str(caught.value)


def test_unknown_and_unreadable_files(tmp_path):
    with pytest.raises(GossamerError, match="did you mean 'quickstart'"):
        specs.load("quikstart")
    (tmp_path / "a.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(GossamerError, match="can't be read"):
        specs.load(tmp_path / "a.toml")


SHIPPED = tomllib.loads((resources.files("gossamer.dbench.specs") / "quickstart.toml").read_text())
ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=12),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)


@given(st.text(max_size=200))
@settings(max_examples=150, deadline=None)
def test_any_text_is_a_spec_or_a_clear_error(text):
    with contextlib.suppress(GossamerError):
        specs.parse(text)


@given(st.data())
@settings(max_examples=300, deadline=None)
def test_any_damage_to_a_good_spec_is_a_spec_or_a_clear_error(data):
    raw = {key: dict(value) if isinstance(value, dict) else value for key, value in SHIPPED.items()}
    for _ in range(data.draw(st.integers(1, 3))):
        owner = (
            raw if data.draw(st.booleans()) else raw[data.draw(st.sampled_from([k for k in raw if isinstance(raw[k], dict)]))]
        )
        if isinstance(owner, dict) and owner:
            words = st.sampled_from(["inverse-sqrt", "step-decay", "dirichlet:alpha=1", "allreduce", "ada:reach=2", "tape:0"])
            owner[data.draw(st.sampled_from(sorted(owner)) | st.text(max_size=8))] = data.draw(ANYTHING | words)
        if not any(isinstance(value, dict) for value in raw.values()):
            break
    with contextlib.suppress(GossamerError):
        specs.build(raw)
