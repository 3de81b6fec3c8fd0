"""Checkpoints of one number of workers, for another one."""

import warnings

import pytest
import safetensors.torch
import torch

import gossamer
from gossamer import GossamerError
from gossamer.checkpoints import averaged
from gossamer.checkpoints.snapshot import load as read
from gossamer.checkpoints.worker import LAYOUT, layout
from tests.world import close, flat, norm, small, train


def make(world, graph="one-peer-exponential", method="awc", kind=torch.optim.SGD, module=None, **options):
    model = world.model(module or norm(), graph, method=method)
    optimizer = kind(model.parameters(), lr=0.05, **options)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    model.gossip(optimizer)
    return model, optimizer, scheduler


def go_on(world, resize, steps, saved=0, **options):
    """Load, look, train, save. ``saved``: the number of workers before."""
    model, optimizer, scheduler = make(world, **options)
    went_on = model.load(world.folder, {"lr": scheduler}, resize=resize)
    assert went_on is bool(saved)
    if saved:
        check(world, model, optimizer, scheduler, resize, saved)
    for step in range(model.steps, model.steps + steps):
        train(world, model, optimizer, 1, step)
        scheduler.step()
    model.save(world.folder, {"lr": scheduler})


def check(world, model, optimizer, scheduler, resize, saved):
    """Rows, momentum, step and schedule against what is in the files of ``saved`` workers."""
    part = model._driver.now.part
    paths = [world.folder / f"step-{model.steps:09d}.rank-{rank}-of-{saved}.ckpt" for rank in range(saved)]
    files = [read(path, layout(part, LAYOUT)).parts for path in paths]
    own = files[world.rank % saved]
    for name, t in model.state_dict().items():
        rows = torch.stack([file["model"][name] for file in files])
        if resize == "copy" or not t.is_floating_point():
            assert torch.equal(t, own["model"][name]), name
        else:
            close(t, rows.double().mean(0), 1e-6)
    if resize == "average":
        for name, t in safetensors.torch.load_file(world.folder / "averaged.safetensors").items():
            close(t, model.state_dict()[name], 1e-6)
            close(t, averaged(world.folder)[name], 1e-6)
    for number, state in optimizer.state_dict()["state"].items():
        for key, value in state.items():
            rows = torch.stack([torch.as_tensor(file["optimizers"][0]["state"]["state"][number][key]) for file in files])
            if resize == "copy" or rows.ndim == 1:
                assert torch.equal(torch.as_tensor(value), rows[world.rank % saved]), key
            else:
                close(value, rows.double().mean(0), 1e-6)
                assert value.abs().sum() > 0
    assert scheduler.last_epoch == model.steps
    assert f"step {model.steps} of {saved} workers goes on with {world.size}" in model.schedule.changes[-1].reason
    assert model._mixer.state_dict(model._flat.blocks) == [None]


@pytest.mark.parametrize(
    ("kind", "options"), [(torch.optim.SGD, {"momentum": 0.9}), (torch.optim.AdamW, {})], ids=["momentum", "moments"]
)
@pytest.mark.parametrize("resize", ["average", "copy"])
def test_a_job_goes_on_with_other_numbers_of_workers(pool, tmp_path, kind, options, resize):
    """4, 3 and 5: rows, the optimizer's state, the step and the scheduler."""
    for size, saved in ((4, 0), (3, 4), (5, 3)):
        pool.check(size, job, {"kind": kind.__name__, "options": options, "resize": resize, "saved": saved}, tmp_path)


def job(world, kind, options, resize, saved):
    go_on(world, resize, 4, saved, kind=getattr(torch.optim, kind), **options)


def test_a_method_and_a_schedule_go_on_too(pool, tmp_path):
    for size, saved in ((3, 0), (2, 3)):
        for name in ("tracking", "qgm", "choco", "ada-auto"):
            pool.check(size, with_method, {"name": name, "saved": saved}, tmp_path / name)


def with_method(world, name, saved):
    if name == "ada-auto":
        go_on(world, "average", 3, saved, graph=name, method=None, momentum=0.9)
        return
    go_on(world, "average", 3, saved, graph="ring", method=name)
    if saved and name == "tracking":
        model, optimizer, _ = make(world, "ring", name)
        assert model.load(world.folder, {"lr": torch.optim.lr_scheduler.StepLR(optimizer, 3)}, resize="average")
        train(world, model, optimizer, 1, model.steps)
        y, g = (world.gather(model._driver.now.state[key].tensors[0]).mean(0) for key in ("y", "g"))
        close(y, g, 1e-6)  # the mean of what is tracked


def test_what_can_not_go_on_is_refused(pool, tmp_path):
    pool.check(3, save_some, {}, tmp_path)
    pool.check(2, refuse_some, {}, tmp_path)


def save_some(world):
    for name, graph, module in (("ring", "ring", None), ("all", "all-reduce", None), ("own", own_graph(3), None)):
        model, optimizer, _ = make(world, graph, None, module=module)
        train(world, model, optimizer, 2)
        model.save(world.folder / name)
    model = world.model(small(), "ring", method="atc")
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1)
    model.gossip(optimizer)
    for step in range(2):
        batch = world.batch(step)

        def closure(batch=batch):
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(batch[0]), batch[1])
            loss.backward()
            return loss

        optimizer.step(closure)
    model.save(world.folder / "lbfgs")


def own_graph(n):
    matrix = torch.full((n, n), 1 / n).numpy()
    return gossamer.graphs.from_matrix(matrix, name="mine")


def refuse_some(world):
    model, _, _ = make(world, "ring", None)
    before = flat(model).clone()
    with pytest.raises(
        GossamerError, match="are of 3 workers .step 2., and there are 2; start with -n 3, or .*resize='average'"
    ):
        model.load(world.folder / "ring")
    with pytest.raises(GossamerError, match=r"graph \(all-reduce there, ring here\)"):
        model.load(world.folder / "all", resize="average")
    with pytest.raises(GossamerError, match="resize='half' is not known"):
        model.load(world.folder / "ring", resize="half")
    other = world.model(small(), "ring", method="atc")
    other.gossip(torch.optim.LBFGS(other.parameters(), lr=0.1))
    with pytest.raises(GossamerError, match="LBFGS. keeps a history .* resize='copy'"):
        other.load(world.folder / "lbfgs", resize="average")
    assert other.load(world.folder / "lbfgs", resize="copy")
    assert torch.equal(flat(model), before)
    assert model.load(world.folder / "own", resize="average")  # a graph of one's own is for its number only
    assert "the graph was mine and is ring" in model.schedule.changes[-1].reason
    if world.rank == 0:  # the newest step is damaged: no step of before is there
        path = world.folder / "ring" / "step-000000002.rank-2-of-3.ckpt"
        path.write_bytes(path.read_bytes()[:-1] + b"!")
    world.gather(torch.zeros(1))
    with pytest.raises(
        GossamerError, match="step-000000002.rank-2-of-3.ckpt can't be read, and no other step is there for all 2"
    ):
        model.load(world.folder / "ring", resize="average")


def test_a_damaged_step_is_left_for_the_one_before_it(pool, tmp_path):
    pool.check(3, save_twice, {}, tmp_path)
    path = tmp_path / "step-000000002.rank-2-of-3.ckpt"
    path.write_bytes(path.read_bytes()[:-1] + b"!")
    pool.check(2, load_the_older, {}, tmp_path)
    assert path.with_name(path.name + ".damaged").exists()


def save_twice(world):
    model, optimizer, _ = make(world)
    for step in range(2):
        train(world, model, optimizer, 1, step)
        model.save(world.folder)


def load_the_older(world):
    model, _, _ = make(world)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        assert model.load(world.folder, resize="average")
    assert model.steps == 1
    assert any("checksum is wrong; it is kept as" in str(w.message) for w in warned)
