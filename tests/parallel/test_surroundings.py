"""What else in a process works on a model: DDP around it, optimizers that gossip() does not know, savers."""

import copy
import io
import warnings

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_model, save_model
from torch import nn

from gossamer import GossamerError
from tests.pool import on_workers
from tests.world import close, flat, loss_of, small, train


@on_workers(2)
def test_ddp_around_is_an_error_in_the_first_forward(world):
    for graph in ("ring", "all-reduce"):
        model = world.model(graph=graph)
        model.gossip(torch.optim.SGD(model.parameters(), 0.1))
        outer = nn.parallel.DistributedDataParallel(model)
        with pytest.raises(GossamerError, match="DistributedDataParallel is around this DecentralizedDataParallel"):
            outer(world.batch(0)[0])


@on_workers(2)
def test_a_model_that_is_called_by_a_ddp_model_is_none_of_its_parts(world):
    model = world.model()
    model.gossip(torch.optim.SGD(model.parameters(), 0.1))

    class Taught(nn.Linear):
        def forward(self, x):
            return super().forward(x) - model(x)

    nn.parallel.DistributedDataParallel(Taught(6, 3))(world.batch(0)[0]).sum().backward()


@on_workers(2)
@pytest.mark.parametrize("graph", ["ring", "all-reduce"])
def test_a_step_of_an_optimizer_that_gossip_does_not_know_is_a_warning_at_its_line(world, graph):
    model = world.model(graph=graph, order="atc")
    known, other = (torch.optim.SGD(model.parameters(), 0.1) for _ in range(2))
    model.gossip(known)
    bystander = small()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(world, model, known, 1)
        train(world, bystander, torch.optim.SGD(bystander.parameters(), 0.1), 1)
    loss_of(model, world.batch(0)).backward()
    with pytest.warns(UserWarning, match=r"SGD.step\(\) trains '0.weight' .*gossip\(\) was not given this optimizer") as seen:
        other.step()
    assert [w.filename for w in seen] == [__file__]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        other.step()  # once is enough
        model.close()
        torch.optim.SGD(model.parameters(), 0.1).step()


@on_workers(1, 2)
def test_forgetting_gossip_is_a_warning_at_the_line_that_trains(world):
    for whole in (True, False):
        model = world.model()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            for _ in range(2):
                loss_of(model if whole else model.module, world.batch(0)).backward()
                optimizer.step()
        expected = [f"{__file__}: model.gossip(optimizer) was not called, so nothing is averaged"] if world.size > 1 else []
        if whole:
            expected = [text.replace(__file__, loss_of.__code__.co_filename) for text in expected]
        assert [f"{w.filename}: {w.message}" for w in seen] == expected


@on_workers(2)
def test_what_is_saved_of_a_part_is_no_larger_than_it(world):
    """Parameters lie in one row, and each looks as if it had memory of its own."""

    def size(thing):
        file = io.BytesIO()
        torch.save(thing, file)
        return file.tell()

    def big():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 20_000), nn.Linear(20_000, 3))

    model = world.model(big())
    bare = big()
    for averaged in (False, True):
        with model.consensus() if averaged else warnings.catch_warnings():
            assert size(model.module[0].bias) < 90_000
            assert size(model.module[1].state_dict()) == size(bare[1].state_dict())
            assert size(model.state_dict()) == size(bare.state_dict())
            save_model(model, world.folder / f"{world.rank}.safetensors")
    other = big()
    nn.init.zeros_(other[1].weight)
    load_model(other, world.folder / f"{world.rank}.safetensors")
    close(flat(other), flat(bare), 0.0)


@on_workers(2)
def test_a_model_as_an_object_is_saved_and_copied_without_its_place_among_the_workers(world):
    for graph in ("ring", "all-reduce"):
        model = world.model(graph=graph)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        model.gossip(optimizer)
        train(world, model, optimizer, 2)
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        for made in (torch.load(file, weights_only=False), copy.deepcopy(model)):
            close(flat(made), flat(model), 0.0)
            assert made.is_copy
            assert list(made.state_dict()) == list(model.state_dict())
            made(world.batch(0)[0]).sum().backward()
            with pytest.raises(GossamerError, match="a copy of one"):
                made.average_()
        train(world, model, optimizer, 1)  # the original goes on


@on_workers(2)
def test_a_distributed_checkpoint_is_no_mixture_of_replicas(world):
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    def trained(graph):
        model = world.model(graph=graph)
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        model.gossip(optimizer)
        train(world, model, optimizer, 3)
        return model, optimizer

    model, optimizer = trained("one-peer-exponential")
    for state in ({"model": model.state_dict()}, {"app": dict(zip("ab", get_state_dict(model, optimizer), strict=True))}):
        with pytest.raises(dcp.CheckpointException, match=r"mixture of replicas: '.*' is not the same on all 2 ranks"):
            dcp.save(state, checkpoint_id=world.folder / "mixed")
    own = flat(model).clone()
    with model.consensus():
        mean = flat(model).clone()
        dcp.save({"model": model.state_dict()}, checkpoint_id=world.folder / "mean")
    dcp.save({f"rank {world.rank}": model.state_dict()}, checkpoint_id=world.folder / "each")
    state = {"model": model.state_dict()}
    dcp.load(state, checkpoint_id=world.folder / "mean")  # in place, as with DDP
    close(flat(model), mean, 0.0)
    dcp.load({f"rank {world.rank}": model.state_dict()}, checkpoint_id=world.folder / "each")
    close(flat(model), own, 0.0)
    model.average_()
    dcp.save({"model": model.state_dict()}, checkpoint_id=world.folder / "averaged")

    model, optimizer = trained("all-reduce")
    parts = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    assert set(parts["optimizer"]["state"]) == set(dict(small().named_parameters()))
    dcp.save(parts, checkpoint_id=world.folder / "alike")
    after = flat(model).clone()
    train(world, model, optimizer, 2, start=3)
    dcp.load(parts, checkpoint_id=world.folder / "alike")
    set_state_dict(model, optimizer, model_state_dict=parts["model"], optim_state_dict=parts["optimizer"])
    close(flat(model), after, 0.0)
    dist.barrier()


@on_workers(2)
def test_a_step_that_one_worker_skips_is_named_in_the_error(world):
    """A NaN check of its own, or a GradScaler that gossip() was not given."""
    model = world.model(graph="ring", order="atc")
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model.gossip(optimizer)
    train(world, model, optimizer, 1)
    loss_of(model, world.batch(1)).backward()

    def go_on():
        if world.rank == 0:
            optimizer.step()
        model.average_()

    with pytest.raises(GossamerError) as caught:
        go_on()
    both = world.gather_objects(str(caught.value))
    assert any("A step() that one worker skips" in text and "model.mean" in text for text in both), both
