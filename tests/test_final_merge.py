"""``+ merge``: after the last step every replica is the mean of all. (1×8 = 2×4 = 8×1: ``test_parity.py``; the library: ``average_()``.)"""

from dataclasses import replace

import pytest
import torch

from gossamer import GossamerError, Recipe, Settings, Trainer, graphs
from gossamer.dbench import bench
from gossamer.dbench import spec as specs
from gossamer.dbench.results import results
from gossamer.dbench.store import FILE, Store
from gossamer.graphs.rounds import Mean
from gossamer.methods import method
from tests.models import OWN_METHODS, Cnn, stopped_and_loaded, task

SETTINGS = Settings(8, 2, 8, optimizer=Recipe("sgd", 0.1), backend="loop", seed=3, partition="dirichlet:alpha=0.3")
AROUND = [name for name in OWN_METHODS if name != "merge" and method(name).averages == "parameters"]


def made(algorithm, graph="ring", build=None, **more):
    rule = method(algorithm)
    recipe = Recipe("adam", 0.01) if rule.optimizer == "Adam" else Recipe("sgd", 0.1)
    graph = "directed-random" if rule.sums == "columns" else "complete" if rule.graphless else graph
    settings = replace(SETTINGS, algorithm=algorithm, optimizer=recipe, **more)
    return Trainer(task(build) if build else task(), settings, graph)


@pytest.mark.parametrize("name", AROUND)
def test_every_replica_becomes_the_mean_and_its_bytes_are_counted(name):
    free, merged = made(name), made(f"{name} + merge")
    free.run()
    merged.run(until=merged.steps - 1)
    assert merged.history[-1].consensus_distance > 0  # not before the end
    merged.run()
    (there,), (here,) = free.replicas.blocks, merged.replicas.blocks
    assert (there.x[0] != there.x[1]).any()
    assert all(torch.equal(here.x[0], row) for row in here.x)
    assert float((here.x[0] - there.x.mean(0)).abs().max()) < 1e-6
    assert merged.bytes == free.bytes + Mean(8).cost(merged.replicas.row_bytes)
    assert merged.history[-1].bytes == merged.bytes
    assert merged.history[-1].consensus_distance == 0 < free.history[-1].consensus_distance
    seen, before = merged.evaluate(), free.evaluate()
    assert seen.spread == 0
    assert (seen.mean, seen.worst, seen.value) == pytest.approx((before.value,) * 3)


@pytest.mark.parametrize("more", [{"local_steps": 7}, {"wire": "bfloat16"}, {"replicas": 2, "wire": "bfloat16"}])
def test_the_merge_is_exact_and_comes_whatever_the_last_step_does(more):
    free, merged = made("atc", **more), made("atc + merge", **more)
    free.run()
    merged.run()
    here = merged.replicas.blocks[0].x
    assert float((here - free.replicas.blocks[0].x.mean(0)).abs().max()) < 1e-6
    assert merged.bytes - free.bytes == Mean(len(here)).cost(merged.replicas.row_bytes)  # in full precision on any wire


@pytest.mark.parametrize("batch_norm", ["reestimate", "average"])
def test_buffers_are_those_of_the_averaged_model(batch_norm):
    free, merged = made("atc", build=Cnn, batch_norm=batch_norm), made("atc + merge", build=Cnn, batch_norm=batch_norm)
    free.run()
    merged.run()
    assert free.evaluate().spread > 0
    seen = merged.evaluate()
    assert seen.spread == 0
    assert seen.worst == pytest.approx(seen.value) == pytest.approx(free.evaluate().value)
    with free.averaged() as model:
        for key, b in model.named_buffers():
            if b.is_floating_point():
                torch.testing.assert_close(merged.replicas.buffers[key], b.expand(8, *b.shape), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["qgm + merge", "awc + control + merge", "atc + merge + pga"])
def test_a_run_that_was_stopped_ends_the_same(name, tmp_path):
    for stop in (3, 19):
        one, other = stopped_and_loaded(lambda: made(name), stop, tmp_path / f"{stop}.ckpt")
        other.run()
        assert torch.equal(one.replicas.blocks[0].x, other.replicas.blocks[0].x)
        assert one.bytes == other.bytes
        assert one.history[-1].consensus_distance == other.history[-1].consensus_distance == 0


def test_a_checkpoint_of_the_end_is_of_the_merged_model(tmp_path):
    one, other = made("atc + merge"), made("atc + merge")
    one.run(save=tmp_path / "end.ckpt")
    assert other.load(tmp_path / "end.ckpt")
    other.run()
    assert torch.equal(one.replicas.blocks[0].x, other.replicas.blocks[0].x)
    assert one.bytes == other.bytes


def test_one_that_diverged_is_named_and_not_merged():
    broken = made("atc + merge", local_steps=7)  # no average in the last step
    broken.run(until=broken.steps - 1)
    update = broken.optimizer.step

    def step():
        update()
        broken.replicas.blocks[0].x[5] = torch.nan

    broken.optimizer.step = step
    with pytest.raises(GossamerError, match="the parameters of replica 5 are not finite"):
        broken.run()


def test_what_it_can_not_go_around_and_how_it_is_written():
    assert method("qgm:beta=0.5 + merge").describe() == "qgm:beta=0.5 + merge"
    assert method("merge").around.name == "atc"
    assert method("atc + merge + control").does("merge")
    assert not method("atc + control").does("merge")
    why = method("all-reduce + merge").check(graphs.parse("complete", 8))
    assert why == "method 'merge' makes one model of all replicas, and with 'all-reduce' they are one already; leave it out"
    with pytest.raises(GossamerError, match="method 'merge' has no parameter 'at'; it takes none"):
        method("atc + merge:at=end")
    with pytest.raises(GossamerError, match="there is no method 'marge'; did you mean 'merge'"):
        method("atc + marge")


def test_in_a_spec(tmp_path):
    raw = {
        "name": "merged",
        "replicas": [4],
        "methods": ["ring, qgm", "ring, qgm + merge", "ada-auto, atc + merge"],
        "backend": "loop",
        "task": {"name": "digits/mlp", "epochs": 2, "batch": 16, "partition": "dirichlet:alpha=0.3"},
        "optimizer": {"lr": 0.1},
    }
    bench(specs.build(raw), tmp_path, jobs=1, quiet=True)
    free, merged, auto = results(Store(tmp_path / FILE))
    assert merged["value"] == pytest.approx(free["value"])
    assert (merged["value_worst"], merged["value_mean"]) == pytest.approx((merged["value"],) * 2)
    assert merged["value_spread"] == auto["value_spread"] == 0 < free["value_spread"]
    assert merged["fairness"] == 1 > free["fairness"] > 1 / 4  # Jain's index
    assert merged["bytes_per_replica"] > free["bytes_per_replica"]
