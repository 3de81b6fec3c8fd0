"""Rows in flight, from a forward to ``step()``: when, and what may not be done meanwhile."""

import pytest
import torch

from gossamer import GossamerError
from tests.pool import on_workers
from tests.world import flat, in_flight, loss_of, small, train


@on_workers(2)
def test_rows_are_on_their_way_from_the_first_training_forward_to_step_only(world):
    model = world.model()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model.gossip(optimizer)
    x = world.batch(0)[0]
    sent = model.traffic.sent
    model.eval()
    model(x)
    model.train()
    with torch.no_grad():
        model(x)
    assert not in_flight(model)
    assert model.traffic.sent == sent
    model(x).sum().backward()
    assert model.traffic.sent > sent
    for refused in (model.average_, lambda: model.load_state_dict(model.state_dict()), lambda: model.save(world.folder / "no")):
        with pytest.raises(GossamerError, match="before step\\(\\) \\(step 0\\)"):
            refused()
    with pytest.raises(GossamerError, match="gossip\\(\\)"):
        model.gossip(optimizer)
    optimizer.step()
    sent = model.traffic.sent
    assert not in_flight(model)
    with torch.no_grad():  # all of this is allowed now
        for p in model.parameters():
            p.clamp_(-1, 1)
    model.load_state_dict({k: v + 1 for k, v in model.state_dict().items()})
    assert model.traffic.sent == sent
    train(world, model, optimizer, 1)


@on_workers(2)
def test_a_parameter_that_is_changed_while_it_is_sent_is_noticed(world):
    model = world.model()
    known = torch.optim.SGD(model.module[0].parameters(), 0.1)
    stranger = torch.optim.SGD(model.module[2].parameters(), 0.1)
    model.gossip(known)
    loss_of(model, world.batch(0)).backward()
    stranger.step()
    with pytest.raises(GossamerError, match="'2.weight' was changed between forward and step"):
        model(world.batch(1)[0])
    with pytest.raises(GossamerError, match="send_copy=True"):
        known.step()
    model = world.model(send_copy=True)
    known = torch.optim.SGD(model.module[0].parameters(), 0.1)
    stranger = torch.optim.SGD(model.module[2].parameters(), 0.1)
    model.gossip(known)
    for step in range(3):
        loss_of(model, world.batch(step)).backward()
        stranger.step()
        known.step()


@on_workers(2)
def test_new_memory_is_mended_and_other_dtypes_or_objects_are_refused(world):
    model = world.model()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model.gossip(optimizer)
    train(world, model, optimizer, 1)
    before, pointers = flat(model).clone(), [p.data_ptr() for p in model.parameters()]
    for p in model.parameters():
        p.data = p.data.clone()
    assert torch.equal(flat(model), before)
    assert not any(p.data_ptr() == pointer for p, pointer in zip(model.parameters(), pointers, strict=True))
    train(world, model, optimizer, 1)
    assert [p.data_ptr() for p in model.parameters()] == pointers
    model.half()
    with pytest.raises(GossamerError, match="'0.weight', now float16 .*float32.*before DecentralizedDataParallel"):
        model(world.batch(0)[0].half())
    model = world.model()
    model.gossip(torch.optim.SGD(model.parameters(), 0.1))
    model.module.load_state_dict(small().state_dict(), assign=True)
    with pytest.raises(GossamerError, match="'0.weight'.*replaced.*model.load_state_dict"):
        model(world.batch(0)[0])
    model = world.model()
    model.load_state_dict(small(seed=4).state_dict(), assign=True)  # this one is mended
    model.gossip(torch.optim.SGD(model.parameters(), 0.1))
    model(world.batch(0)[0])
