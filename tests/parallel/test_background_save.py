"""``save(…, background=True)``."""

import contextlib
import gc
import io
import resource
import signal
import subprocess
import sys
import time
import warnings
import weakref
from types import SimpleNamespace

import pytest
import safetensors.torch
import torch

import gossamer
from gossamer import DecentralizedDataParallel, GossamerError
from gossamer.checkpoints import averaged, checkpoint
from gossamer.checkpoints.background import Commit, Writer
from tests import workers
from tests.pool import on_workers
from tests.world import close, flat, norm, train

DRIVER = """
import sys, time, torch, gossamer
from gossamer.checkpoints import checkpoint
folder, pieces = sys.argv[1], checkpoint._pieces
torch.manual_seed(0)
model = gossamer.DecentralizedDataParallel(torch.nn.Linear(1000, 600))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
model.gossip(optimizer)
def step():
    model(torch.randn(2, 1000)).sum().backward()
    optimizer.step()
step()
model.save(folder, background=True)
step()
def slow(*of):  # a disk that takes half a second
    for piece in pieces(*of):
        time.sleep(0.15)
        yield piece
model._writer.finish()
checkpoint._pieces = slow
model.save(folder, background=True)
print("saving", flush=True)
while True:
    step()
"""


@contextlib.contextmanager
def full_disk(full):
    """Files of this process can't get longer than 2 kB."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    if full:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def make(world):
    model = world.model(norm(), "one-peer-exponential")
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    model.gossip(optimizer)
    return model, optimizer


@on_workers(1, 2)
def test_the_file_is_that_of_the_step_though_training_goes_on(world):
    model, optimizer = make(world)
    for step in (0, 2, 4, 6):
        train(world, model, optimizer, 2, step)
        model.save(world.folder / "at-once")
        model.save(world.folder / "later", background=True)
    train(world, model, optimizer, 3, 8)
    model.close()
    world.gather(torch.zeros(1))
    paths = sorted((world.folder / "at-once").glob("*.ckpt"))
    assert len(paths) == 2 * world.size
    for path in paths:
        assert path.read_bytes() == (world.folder / "later" / path.name).read_bytes(), path
    # Perhaps one step more than at once: the last save may not have heard yet that all have written.
    assert len(list((world.folder / "later").glob("*.ckpt"))) in (2 * world.size, 3 * world.size)
    mean = safetensors.torch.load_file(world.folder / "at-once" / "averaged.safetensors")
    for name, t in averaged(world.folder / "later").items():
        close(t, mean[name], 1e-6)
    again, _ = make(world)
    assert again.load(world.folder / "later")
    assert again.steps == 8


def test_each_save_has_a_key_of_its_own():
    writer, link = Writer(), object()
    keys = [writer.key(link, step) for step in (50, 80, 50, 50, 60, 80, 45, 50)]
    assert len({*keys}) == len(keys)
    assert writer.key(object(), 50) == Writer().key(object(), 50), "a newcomer comes with new connections"


@on_workers(2)
def test_no_worker_waits_for_another_one_and_older_steps_go_when_all_have_written(world):
    model, optimizer = make(world)
    for step in range(4):
        train(world, model, optimizer, 1, step)
        returned = world.folder / f"returned-{step}"
        deadline = time.monotonic() + 20
        while world.rank and not returned.exists():
            assert time.monotonic() < deadline, "rank 0 waits in save()"
            time.sleep(0.001)
        model.save(world.folder, background=True)
        returned.touch()
        assert model._writer.finish(20) is None
        assert {path.name[:14] for path in world.folder.glob("*.ckpt")} == {f"step-{k:09d}" for k in (step, step + 1) if k}
    assert len(list(world.folder.glob("*.ckpt"))) == 4


@on_workers(2)
def test_an_error_of_the_writer_is_one_of_the_next_save_and_of_close(world):
    model, optimizer = make(world)
    train(world, model, optimizer, 1)
    for step in (1, 2, 3):
        if step > 1:
            why = (
                "the checkpoint .*rank-1-of-2.ckpt can't be written: .*too large"
                if world.rank
                else "what rank 1 saves was not written"
            )
            with pytest.raises(GossamerError, match=why):
                model.save(world.folder, background=step == 2)
        with full_disk(world.rank == 1 and step < 3):
            model.save(world.folder, background=True)
            model._writer._thread.join()
        train(world, model, optimizer, 1, step)
    assert not list(world.folder.glob("step-00000000[12].rank-1*"))
    model._writer.start(lambda: (_ for _ in ()).throw(OSError("no disk")))
    with pytest.raises(GossamerError, match="can't be written: no disk"):
        model.close()


@on_workers(2)
def test_parameters_that_are_not_finite_are_not_saved(world):
    model, optimizer = make(world)
    train(world, model, optimizer, 1)
    if world.rank:
        with torch.no_grad():
            model.out.bias.fill_(float("nan"))
        with pytest.raises(GossamerError, match="'out.bias' is not finite"):
            model.save(world.folder, background=True)
    else:
        model.save(world.folder, background=True)
        with pytest.raises(GossamerError, match="what rank 1 saves was not written"):
            model.save(world.folder, background=True)
    assert not list(world.folder.glob("*.rank-1-*"))


@on_workers(2)
def test_a_worker_that_does_not_save_is_named(world):
    model, optimizer = make(world)
    model._exchange.link.timeout = 1.0
    train(world, model, optimizer, 1)
    if world.rank == 0:
        model.save(world.folder, background=True)
        with pytest.raises(GossamerError, match=r"rank 1 did not say within 1 s that it has saved; save\(\) is called by all"):
            model.save(world.folder, background=True)


@on_workers(2)
def test_a_load_and_the_end_of_a_model_wait_for_its_writer(world):
    write, said = checkpoint.write, io.StringIO()

    def slow(*of):
        time.sleep(0.2)
        write(*of)

    model = DecentralizedDataParallel(norm(), "one-peer-exponential", timeout=30)  # the world would keep it
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    model.gossip(optimizer)
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(said):
        patch.setattr(checkpoint, "write", slow)
        train(world, model, optimizer, 1)
        model.save(world.folder, background=True)
        train(world, model, optimizer, 1, 1)
        assert model.load(world.folder)
        assert model.steps == 1
        train(world, model, optimizer, 1, 1)
        model.save(world.folder, background=True)
        gone = weakref.ref(model)
        del model, optimizer
        gc.collect()
        assert gone() is None
        assert list(world.folder.glob(f"step-000000002.rank-{world.rank}-*.ckpt"))
    assert not said.getvalue()
    world.gather(torch.zeros(1))


def test_a_word_that_comes_at_the_last_moment_is_heard():
    words = {"saved/k/0": b"written"}
    store = SimpleNamespace(check=lambda keys: words.keys() >= {*keys}, multi_get=lambda keys: [words[key] for key in keys])
    link = SimpleNamespace(ask=lambda question, timeout: question(store), rank=0, names=(0, 1), timeout=1.0, store=store)

    def pause(seconds):
        words["saved/k/1"] = b"written"
        raise TimeoutError

    assert Commit(SimpleNamespace(link=link, guard=None, living=(0, 1)), "k").heard(pause)


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGINT])
def test_a_kill_leaves_the_old_file_and_ctrl_c_finishes_the_new_one(end, tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-c", DRIVER, tmp_path], env=workers.environment(), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    try:
        assert process.stdout.readline() == b"saving\n"
        deadline = time.monotonic() + 20
        while not list(tmp_path.glob("step-000000002.*.tmp")) and time.monotonic() < deadline:
            time.sleep(0.01)
        process.send_signal(end)
        assert process.wait(30) != 0
    finally:
        process.kill()
    model = gossamer.DecentralizedDataParallel(torch.nn.Linear(1000, 600))
    before = flat(model).clone()
    model.gossip(torch.optim.SGD(model.parameters(), 0.1))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert model.load(tmp_path)
    assert model.steps == (1 if end is signal.SIGKILL else 2)
    assert not torch.equal(flat(model), before)
    model.close()
