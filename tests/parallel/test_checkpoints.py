"""``save()`` and ``load()``."""

import warnings

import pytest
import safetensors.torch
import torch
import torch.distributed as dist

import gossamer
from gossamer import GossamerError
from tests.pool import on_workers
from tests.world import close, flat, norm, train


@on_workers(1, 2, 3)
def test_a_checkpoint_goes_on_bit_for_bit(world):
    def make():
        model = world.model(norm(), "one-peer-exponential")
        # Saved after 3, 6 and 9 steps, which is inside AccumAdamW's windows of four.
        kind = gossamer.AccumAdamW if world.size == 2 else torch.optim.AdamW
        optimizer = kind(model.parameters(), 0.01)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
        model.gossip(optimizer, profile_every=2)
        return model, optimizer, scheduler

    def go(model, optimizer, scheduler, start, steps):
        for step in range(start, start + steps):
            train(world, model, optimizer, 1, step)
            scheduler.step()

    folder = world.folder / f"checkpoint-{world.size}"
    model, optimizer, scheduler = make()
    assert model.load(folder, also={"scheduler": scheduler}) is False
    for start in (0, 3, 6):
        go(model, optimizer, scheduler, start, 3)
        model.save(folder, also={"scheduler": scheduler})
    on_disk = sorted(path.name for path in folder.glob(f"*.rank-{world.rank}-of-*"))
    assert on_disk == [f"step-{step:09d}.rank-{world.rank}-of-{world.size}.ckpt" for step in (6, 9)]
    means = {name: world.gather(t.double()).mean(0) for name, t in model.state_dict().items()}
    averaged = safetensors.torch.load_file(folder / "averaged.safetensors")
    norm().load_state_dict(averaged)
    for name, t in averaged.items():
        if t.is_floating_point():
            close(t, means[name], 1e-6)
    go(model, optimizer, scheduler, 9, 3)
    expected, lr = {k: v.clone() for k, v in model.state_dict().items()}, scheduler.get_last_lr()
    world.gather(torch.zeros(1))  # all have looked
    if world.rank == 0 and world.size > 1:  # as if it had been killed before its newest file was written
        (folder / on_disk[1]).unlink()
    start = 6 if world.size > 1 else 9
    model, optimizer, scheduler = make()
    with pytest.raises(GossamerError, match="scheduler"):
        model.load(folder)
    assert model.load(folder, also={"scheduler": scheduler}) is True
    assert model.steps == start
    assert model.signals
    go(model, optimizer, scheduler, start, 12 - start)
    for name, t in model.state_dict().items():
        assert torch.equal(t, expected[name]), name
    assert scheduler.get_last_lr() == lr
    other = world.model(norm(), "complete", order="atc")
    other.gossip(torch.optim.SGD(other.parameters(), 0.1))
    with pytest.raises(GossamerError, match="another set-up.*graph.*order"):
        other.load(folder)


@on_workers(2)
def test_a_fresh_run_in_the_folder_of_an_older_one_replaces_its_checkpoints(world):
    folder = world.folder / "older"
    for steps in (5, 2):
        model = world.model()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        model.gossip(optimizer)
        train(world, model, optimizer, steps)
        model.save(folder)
    again = world.model()
    again.gossip(torch.optim.SGD(again.parameters(), 0.1))
    assert again.load(folder)
    assert again.steps == 2
    assert torch.equal(flat(again), flat(model))


def saved_twice(world, folder):
    model = world.model()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model.gossip(optimizer)
    for step in range(2):
        train(world, model, optimizer, 1, step)
        model.save(folder)
    dist.barrier()
    return model


@on_workers(2)
def test_a_checkpoint_that_some_workers_lost_is_an_error(world):
    folder = world.folder / "lost"
    model = saved_twice(world, folder)
    if world.rank == 1:
        for path in folder.glob("*.rank-1-*"):
            path.unlink()
    with pytest.raises(GossamerError, match="rank 0 has 1, 2; rank 1 has none"):
        model.load(folder)

    class Odd:
        def state_dict(self):
            return {"what": object()}

    with pytest.raises(GossamerError, match="state_dict"):
        model.save(folder, also={"odd": Odd()})


@on_workers(2)
def test_a_damaged_file_is_left_for_the_step_before_it_by_all(world):
    folder = world.folder / "damaged"
    model = saved_twice(world, folder)
    if world.rank == 1:
        path = folder / "step-000000002.rank-1-of-2.ckpt"
        path.write_bytes(path.read_bytes()[:-3] + b"abc")
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        assert model.load(folder)
    assert model.steps == 1
    assert [str(w.message) for w in warned if "checksum" in str(w.message)] if world.rank else not warned
    other = world.model()
    other.gossip(torch.optim.AdamW(other.parameters(), 0.1))
    with pytest.raises(GossamerError, match="the optimizers .SGD there, AdamW here."):
        other.load(folder)
