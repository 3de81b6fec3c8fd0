"""Texts are read in order, each prediction once; what is drawn does not depend on how replicas are spread; BatchNorm's statistics."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gossamer.data.sampling import sampler
from gossamer.data.sources import Draw, Source, Tensors, Text
from gossamer.errors import GossamerError
from gossamer.trainer import Settings, Trainer
from tests.models import Cnn, task

SIZES = {"tokens": st.integers(30, 400), "window": st.integers(1, 9), "n": st.integers(1, 5), "batch": st.integers(1, 3)}


@given(**SIZES, partition=st.sampled_from(["reshuffled", "shards"]))
def test_an_epoch_reads_every_stream_once_and_in_order(tokens, window, n, batch, partition):
    text = Text(torch.arange(tokens), window)
    length = (tokens - 1) // (n * batch)
    if length < window:
        with pytest.raises(GossamerError, match="does not split over"):
            sampler(partition, text, n, batch, seed=1)
        return
    batches = sampler(partition, text, n, batch, seed=1)
    for epoch in (0, 1):
        steps = range(epoch * batches.steps_per_epoch, (epoch + 1) * batches.steps_per_epoch)
        seen = [batches.batch(step) for step in steps]
        assert all(torch.equal(y, x + 1) and x.shape == (n, batch, window) for x, y, _ in seen)
        assert [bool(fresh.all()) for *_, fresh in seen] == [True] + [False] * (len(seen) - 1)
        streams = torch.cat([x for x, *_ in seen], dim=2).reshape(n * batch, -1)  # tokens are their own places
        assert torch.equal(streams, streams[:, :1] + torch.arange(streams.shape[1]))
        assert sorted(streams[:, 0].tolist()) == [k * length for k in range(n * batch)]
        assert length - window < streams.shape[1] <= length
    middle = batches.batch(1, first=n // 2, rows=1)
    assert all(torch.equal(part[0], whole[n // 2]) for part, whole in zip(middle, batches.batch(1), strict=True))


@given(tokens=st.integers(3, 300), window=st.integers(1, 9), size=st.integers(1, 7))
def test_evaluation_sees_each_prediction_once(tokens, window, size):
    if tokens <= window:
        with pytest.raises(GossamerError, match="no window of"):
            Text(torch.arange(tokens), window)
        return
    predicted = torch.cat([y.flatten() for _, y in Text(torch.arange(tokens), window).parts(size)]).tolist()
    assert len(set(predicted)) == len(predicted)
    assert len(predicted) > tokens - 1 - size  # streams are of equal length: fewer than `size` tokens are left over
    assert set(predicted) <= set(range(1, tokens))


def test_texts_have_no_labels():
    with pytest.raises(GossamerError, match="not for a text"):
        sampler("dirichlet:alpha=0.3", Text(torch.arange(100), 5), 2, 1, 0)


class Noisy(Tensors):
    """Adds to each sample a number that depends on the step and the replica, as an augmentation may."""

    def draw(self, index, draw: Draw):
        x, y = self.take(index)
        rows = torch.arange(len(index)) + draw.first
        return x + 100 * draw.step + rows.reshape(-1, *[1] * (x.ndim - 1)), y

    def to(self, device) -> Source:
        return Noisy(*(tensor.to(device) for tensor in self.tensors))


def test_what_is_drawn_depends_on_step_and_replica_only():
    batches = sampler("reshuffled", Noisy(*task().train), 8, 4, seed=3)
    whole = batches.batch(5)
    parts = [batches.batch(5, first, 2) for first in range(0, 8, 2)]
    assert torch.equal(torch.cat([x for x, _ in parts]), whole[0])
    assert not torch.equal(whole[0], sampler("reshuffled", task().train, 8, 4, seed=3).batch(5)[0])


def made(batch_norm, replicas=4):
    return Trainer(task(Cnn), Settings(replicas, 1, 8, batch_norm=batch_norm, backend="loop"), "ring")


def test_batch_norm_is_estimated_anew_on_the_averaged_model():
    trainer = made("reestimate")
    trainer.run(until=6)
    own = {name: stacked.clone() for name, stacked in trainer.replicas.buffers.items()}
    with trainer.averaged() as model:
        assert not model.training
        got = model.norm.running_mean.clone()
        batches = task(Cnn).train[0][torch.randperm(640, generator=torch.Generator().manual_seed(0))].split(128)
        with torch.no_grad():
            features = [model.conv(x.unflatten(-2, (1, -1))) for x in batches]
        torch.testing.assert_close(got, torch.stack([f.mean(dim=(0, 2, 3)) for f in features]).mean(0), rtol=1e-4, atol=1e-5)
        assert model.norm.momentum == 0.1
    assert all(torch.equal(own[name], stacked) for name, stacked in trainer.replicas.buffers.items())
    averaging = made("average")
    averaging.run(until=6)
    with averaging.averaged() as model:
        torch.testing.assert_close(model.norm.running_mean, own["norm.running_mean"].mean(0))
        assert not torch.allclose(model.norm.running_mean, got, atol=1e-3)


def test_the_estimate_does_not_disturb_training_and_is_the_same_each_time():
    plain, watched = made("reestimate"), made("reestimate")
    plain.run(until=8)
    values = []
    watched.on_step = lambda *_: values.append([watched.value() for _ in range(2)])
    watched.run(until=8)
    assert all(first == second for first, second in values)
    assert torch.equal(plain.replicas.blocks[0].x, watched.replicas.blocks[0].x)
    assert all(
        torch.equal(a, b) for a, b in zip(plain.replicas.buffers.values(), watched.replicas.buffers.values(), strict=True)
    )


def test_sources_of_different_length_are_refused():
    with pytest.raises(GossamerError, match=r"have \[3, 2\] samples"):
        Tensors(torch.zeros(3), torch.zeros(2))
    with pytest.raises(GossamerError, match="at least one tensor"):
        Tensors()
