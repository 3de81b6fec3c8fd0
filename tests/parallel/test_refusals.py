"""Bad input, and what differs between workers."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from gossamer import DecentralizedDataParallel, GossamerError, graphs
from gossamer.transport import link as links
from tests.pool import on_workers
from tests.world import flat, loss_of, norm, small, train


@on_workers(2)
def test_bad_arguments_are_refused(world):
    for graph, options, match in (
        (graphs.ring(3), {}, "for 3 replicas, but there are 2"),
        ("rong", {}, "no graph 'rong'; did you mean 'ring'"),
        (3, {}, "int is not a graph"),
        ("ring", {"order": "abc"}, "order='abc'"),
        ("ring", {"init": "abc"}, "init='abc'"),
        ("ring", {"wire": "float8"}, "wire='float8'"),
        ("ring", {"local_steps": 0}, "local_steps=0"),
    ):
        with pytest.raises(GossamerError, match=match):
            world.model(graph=graph, **options)
    frozen = small().requires_grad_(False)
    with pytest.raises(GossamerError, match="no trainable parameters"):
        world.model(frozen)
    with pytest.raises(GossamerError, match="'weight' has no shape yet"):
        world.model(nn.LazyLinear(3))
    with pytest.raises(GossamerError, match="meta"):
        world.model(nn.Linear(3, 3, device="meta"))
    with pytest.raises(GossamerError, match=" DistributedDataParallel already"):
        world.model(nn.parallel.DistributedDataParallel(small()))
    with pytest.raises(GossamerError, match=" DecentralizedDataParallel already; give Gossamer the bare module"):
        world.model(nn.Sequential(world.model()))


@on_workers(2)
def test_sharded_modules_are_refused(world):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2,))
    module = small()
    module[0].weight = nn.Parameter(distribute_tensor(module[0].weight.detach(), mesh, [Shard(0)]))
    with pytest.raises(GossamerError, match="'0.weight' is a DTensor.*FSDP"):
        world.model(module)
    try:
        from torch.distributed.fsdp import fully_shard

        sharded = fully_shard(small(), mesh=mesh)
    except (ImportError, RuntimeError, ValueError):
        return
    with pytest.raises(GossamerError, match="DTensor|sharded"):
        world.model(sharded)


@on_workers(3)
def test_what_differs_between_ranks_is_named_on_every_rank(world):
    odd = world.rank == 1

    def shaped():
        return nn.Sequential(nn.Linear(6, 4 if odd else 5), nn.Linear(4 if odd else 5, 3))

    def formatted():
        return nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last if odd else torch.contiguous_format)

    def frozen():
        module = small()
        module[2].bias.requires_grad_(not odd)
        return module

    here = f"^rank {world.rank}: "
    for module, options, match in (
        (
            shaped(),
            {},
            "parameter '0.weight' differs between ranks: float32 \\[5, 6\\].* on ranks 0, 2; float32 \\[4, 6\\].* on rank 1",
        ),
        (
            small(torch.float64 if odd else torch.float32),
            {},
            "parameter '0.weight' .*float32.* on ranks 0, 2; float64.* on rank 1",
        ),
        (formatted(), {}, "parameter 'weight' .*strides.* on ranks 0, 2; .*strides.* on rank 1"),
        (frozen(), {}, "parameter '2.bias' .*on ranks 0, 2; .*frozen on rank 1"),
        (norm() if odd else small(), {}, "parameter '0.weight' .* on ranks 0, 2; missing on rank 1"),
        (
            small(),
            {"graph": f"random-matching:seed={world.rank % 2}"},
            "graph differs.*seed=0 on ranks 0, 2; .*seed=1 on rank 1",
        ),
        (
            small(),
            {"graph": "ring" if odd else "complete"},
            "graph differs between ranks: complete on ranks 0, 2; ring on rank 1",
        ),
        (small(), {"order": "atc" if odd else "awc"}, "order differs"),
        (small(), {"wire": "bfloat16" if odd else "float32"}, "wire differs"),
    ):
        with pytest.raises(GossamerError, match=here + match):
            world.model(module, **options)
    model = world.model()
    with pytest.raises(GossamerError, match=here + "gossip\\(\\): profile_every differs .*0 on ranks 0, 2; 5 on rank 1"):
        model.gossip(torch.optim.SGD(model.parameters(), 0.1), profile_every=5 if odd else None)


@on_workers(2)
def test_gossip_wants_this_models_optimizers(world):
    model = world.model()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for given, match in (
        ((), "needs the optimizer"),
        ((torch.optim.SGD(small().parameters(), 0.1),), "SGD \\(argument 0\\) trains no parameter of this model"),
        ((optimizer, "adam"), "argument 1 is a str"),
        ((optimizer, optimizer), "twice"),
    ):
        with pytest.raises(GossamerError, match=match):
            model.gossip(*given)
    model.module.append(nn.Linear(3, 3))
    with pytest.raises(GossamerError, match="after it was wrapped"):
        model.gossip(torch.optim.SGD(model.module.parameters(), 0.1))
    del model.module[3]
    model.gossip(optimizer)
    model.gossip(optimizer, profile_every=1)  # in place of the first
    train(world, model, optimizer, 2)
    assert model.steps == 2
    assert len(model.profiles) == 2
    model.gossip(torch.optim.SGD(model.parameters(), 0.1))
    train(world, model, optimizer, 1)  # no longer hooked; and its change is not noticed, as this step was not begun
    assert model.steps == 2
    world.gather(torch.zeros(1))  # rows of the other one may still be under way


@on_workers(1, 2)
def test_what_ddp_has_is_there_or_refused_with_advice(world):
    for options, match in (
        ({"device_ids": [0]}, r"device_ids=\[0\], and the module is on cpu: .*move the module to its device first"),
        ({"graph": [0]}, "device_ids is an argument"),
        ({"output_device": "meta"}, "output_device='meta', and the module is on cpu"),
        ({"process_group": 3}, "leave it out: all workers take part"),
        ({"init_sync": False}, "leave it out: init='keep'"),
        ({"graph": "al-reduce"}, "no graph 'al-reduce'; did you mean 'all-reduce'"),
        ({"graph": "ada-autoo"}, "did you mean 'ada-auto'"),
    ):
        with pytest.raises(GossamerError, match=match):
            world.model(**options)
    with pytest.raises(TypeError, match="unexpected keyword argument 'grph'"):
        world.model(grph="ring")
    with pytest.raises(GossamerError, match="'1' is a SyncBatchNorm, which runs on GPUs only; leave convert_sync_batchnorm"):
        world.model(nn.SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(nn.Linear(6, 3), nn.BatchNorm1d(3))))
    harmless = {"find_unused_parameters": True, "static_graph": True, "gradient_as_bucket_view": True, "bucket_cap_mb": 25}
    nothing = dict.fromkeys(("output_device", "process_group", "mixed_precision", "device_mesh"))
    assert world.model(device_ids=None, broadcast_buffers=True, init_sync=True, **harmless, **nothing).steps == 0
    assert DecentralizedDataParallel(small(), None).schedule.describe() == "auto"
    assert DecentralizedDataParallel(small(), [torch.device("cpu")]).schedule.describe() == "auto"
    assert world.model(graph="all_reduce").averages_gradients
    assert world.model(graph="Ada_Auto").schedule.describe() == "ada-auto"
    model = world.model()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model.gossip(optimizer)
    for name, advice in (
        ("join", r"has no join\(\): train inside `with model.uneven\(\):`"),
        ("register_comm_hook", "bfloat16"),
    ):
        with pytest.raises(AttributeError, match=advice):
            getattr(model, name)
    with model.no_sync():
        loss_of(model, world.batch(0)).backward()
    loss_of(model, world.batch(1)).backward()
    if world.size > 1:
        with pytest.raises(GossamerError, match="also for micro-batches that are left over"):
            model.average_()
    optimizer.step()
    assert model.steps == 1
    saved = {f"module.{key}": torch.full_like(value, 0.5) for key, value in model.state_dict().items()}  # by torch's DDP
    model.load_state_dict(saved)
    assert (flat(model) == 0.5).all()
    with pytest.raises(RuntimeError, match="Missing key"):
        model.load_state_dict({"module.0.weight": saved["module.0.weight"]})
    with model.consensus():
        for call in (model.average_, lambda: model.save(world.folder / "no")):
            with pytest.raises(GossamerError, match=r"inside consensus\(\) \(step 1\): call it after the block"):
                call()


@on_workers(2)
def test_a_rank_that_never_arrives_is_named(world):
    if world.rank == 0:
        with pytest.raises(GossamerError, match="rank 0: rank 1 of 2 did not arrive within 1 s"):
            DecentralizedDataParallel(small(), "ring", timeout=1)
    else:
        links.next_name()  # so that the next model has the same number on both
    dist.barrier()
