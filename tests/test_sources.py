"""Texts are read in order, each prediction once; what is drawn does not depend on how replicas are spread; BatchNorm's statistics."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gossamer.data.sampling import sampler
from gossamer.data.sources import Draw, Items, Source, Tensors, Text, source
from gossamer.data.tasks import Metric, Task
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


class Points(torch.utils.data.Dataset):
    """Samples one by one, with a random transform."""

    def __init__(self, task, noise=0.0):
        self.x, self.targets = task.train
        self.noise = noise

    def __len__(self):
        return len(self.x)

    def __getitem__(self, k):
        return self.x[k] + self.noise * torch.randn(8, 8), int(self.targets[k])


def trained(build, train, test, partition="reshuffled", **more):
    settings = Settings(replicas=4, epochs=1, batch=8, backend="loop", partition=partition)
    trainer = Trainer(Task("toy", build, train, test, **more), settings, "ring")
    trainer.run()
    return trainer.value(), trainer.history[-1].train_loss


def test_what_torch_and_numpy_call_data_is_a_source():
    toy = task()
    expected = trained(toy.build, toy.train, toy.test, "dirichlet:alpha=1")
    loader = torch.utils.data.DataLoader
    arrays = tuple(np.asarray(tensor.numpy(), dtype) for tensor, dtype in zip(toy.train, ("float64", "int32"), strict=True))
    kinds = (Points(toy), loader(Points(toy), batch_size=3, shuffle=True), torch.utils.data.TensorDataset(*toy.train), arrays)
    for data in kinds:
        assert trained(toy.build, data, toy.test, "dirichlet:alpha=1") == pytest.approx(expected, abs=1e-6), type(data)
    some = source(torch.utils.data.Subset(Points(toy), [5, 3]))
    assert some.classes.tolist() == toy.train[1][[5, 3]].tolist()
    assert some.describe() == [[2, 8, 8], [2]]
    assert source(toy.train[0]).describe() == [[640, 8, 8]]


def test_random_transforms_depend_on_step_and_replica_only():
    data = Items(Points(task(), noise=1.0))
    index = torch.arange(6).reshape(3, 2)
    whole = data.draw(index, Draw(1, 7, 0))[0]
    torch.randn(3)
    assert torch.equal(data.draw(index[1:], Draw(1, 7, 1))[0], whole[1:])
    assert not torch.equal(data.draw(index, Draw(1, 8, 0))[0], whole)


def test_data_that_replicas_cant_take_by_number_say_so():
    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self):
            return iter(())

    class Named(Points):
        def __getitem__(self, k):
            return {"x": self.x[k]}

    weighted = torch.utils.data.WeightedRandomSampler(torch.ones(640), 640)
    for data, message in (
        (Stream(), "Stream gives samples in an order of its own"),
        (torch.utils.data.DataLoader(Points(task()), sampler=weighted), "a DataLoader with a WeightedRandomSampler"),
        (Named(task()), "Named gives dict; a sample is a tuple"),
    ):
        with pytest.raises(GossamerError, match=message):
            source(data).take(torch.arange(2))


def test_two_inputs_go_to_the_model_with_the_usual_loss_and_metric():
    toy = task()

    class Two(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = toy.build()

        def forward(self, a, b):
            return self.inner(a - b)

    x, y = toy.train
    value, _ = trained(Two, (x, torch.zeros_like(x), y), (toy.test[0], torch.zeros_like(toy.test[0]), toy.test[1]))
    assert value > 0.15


def test_a_metric_that_is_not_per_sample_is_refused():
    toy = task()
    model, samples = toy.build(), (torch.zeros(2049, 8, 8), torch.zeros(2049, dtype=torch.long))
    right = Metric("error", lambda m, x, y: (m(x) - y[:, None]).square().mean(dim=1))
    assert right.of(model, samples) >= 0
    for score, found in (
        (lambda m, x, y: (m(x) - y[:, None]).square().mean(), r"a tensor \[\] for 2048 samples"),
        (lambda m, x, y: float(m(x).mean()), "a float for 2048 samples"),
        (lambda m, x, y: m(x)[:5, 0], r"a tensor \[5\] for 2048 samples"),
    ):
        with pytest.raises(GossamerError, match=f"metric 'error': score.. returned {found}; it gives one number per sample"):
            Metric("error", score).of(model, samples)
