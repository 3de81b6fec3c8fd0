"""The tasks that a spec can name, on small files in the official layouts: they train, and their metric is what it says."""

import math

import numpy as np
import pytest
import torch
from PIL import Image
from torch.nn.functional import cross_entropy

from gossamer.apps import tasks
from gossamer.apps.data import CIFAR10_CLASSES
from gossamer.dbench import spec as specs
from gossamer.errors import GossamerError
from gossamer.optim import Recipe
from gossamer.trainer import Settings, Trainer

WORDS = ["the", "a", "gossip", "ring", "mean", "worker", "row", "step", "graph", "edge", "of", "and", "to", "in"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """CIFAR-10, a WikiText cut (which is plain text too) and class folders, all of them made up."""
    root = tmp_path_factory.mktemp("data")
    rng = np.random.default_rng(0)
    records = np.zeros((10_000, 3073), np.uint8)
    records[:, 0] = rng.integers(0, 10, 10_000)
    records[:64, 1:] = rng.integers(0, 255, (64, 3072))
    (root / "cifar-10-batches-bin").mkdir()
    for name in [*(f"data_batch_{k}" for k in range(1, 6)), "test_batch"]:
        records.tofile(root / "cifar-10-batches-bin" / f"{name}.bin")
    (root / "cifar-10-batches-bin" / "batches.meta.txt").write_text("\n".join(CIFAR10_CLASSES))
    for split, count in {"train": 900, "valid": 100, "test": 200}.items():
        (root / f"{split}.txt").write_text(" = Title = \n" + " ".join(rng.choice(WORDS, count)) + "\n")
    for split in ("train", "val"):
        for kind in ("n00000001", "n00000002", "n00000003"):
            (root / split / kind).mkdir(parents=True)
            for k in range(8):
                pixels = rng.integers(0, 255, (40, 36, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(root / split / kind / f"{k}.JPEG")
    return root


SMALL = {
    "cifar10/densenet100": {"depth": 10, "growth": 4, "train": 64, "test": 20},
    "cifar10/resnet20": {"depth": 8, "width": 4, "train": 64, "test": 20},
    "cifar10/resnet8": {"train": 64, "test": 20},
    "digits/mlp": {"hidden": [16], "train": 64, "test": 20},
    "imagenet/resnet50": {"complete": False, "width": 4, "size": 32, "blocks": [1, 1, 1, 1], "test": 12},
    "text/gpt-nano": {"context": 16, "layers": 1, "heads": 2, "width": 8},
    "wikitext2/lstm": {"embedding": 8, "hidden": 8, "window": 5},
}


@pytest.mark.parametrize("name", SMALL)
def test_each_trains_and_has_a_value(name, folder):
    task = tasks.make(name, folder, SMALL[name], batch=2)
    trainer = Trainer(task, Settings(3, 1, 2, optimizer=Recipe("sgd", 0.01), backend="loop"), "ring")
    start = trainer.replicas.blocks[0].x.clone()
    trainer.run(until=2)
    assert not torch.equal(trainer.replicas.blocks[0].x, start)
    value = trainer.value()
    if task.metric.higher_is_better:
        assert 0 <= value <= 1
    else:
        assert 2 < value < 300  # near the size of the vocabulary: nothing is learned yet
    assert task.name == name


def test_augmented_images_are_the_same_in_every_layout(folder):
    task = tasks.make("cifar10/resnet8", folder, SMALL["cifar10/resnet8"])
    batches = Trainer(task, Settings(4, 1, 2, backend="loop"), "ring").batches
    whole, part = batches.batch(3)[0], batches.batch(3, first=2, rows=2)[0]
    assert torch.equal(part, whole[2:])
    plain = tasks.make("cifar10/resnet8", folder, SMALL["cifar10/resnet8"] | {"augment": False})
    assert not torch.equal(Trainer(plain, Settings(4, 1, 2, backend="loop"), "ring").batches.batch(3)[0], whole)


def test_decoded_images_are_the_same_in_every_layout_and_their_labels_are_known(folder):
    task = tasks.make("imagenet/resnet50", folder, SMALL["imagenet/resnet50"])
    assert sorted(task.train.labels.tolist()) == sorted([0, 1, 2] * 8)
    assert sorted(task.test.labels.tolist()) == sorted([0, 1, 2] * 4)  # half of them, evenly
    batches = Trainer(task, Settings(4, 1, 2, backend="loop", partition="dirichlet:alpha=1"), "ring").batches
    assert torch.equal(batches.batch(1, first=2, rows=2)[0], batches.batch(1)[0][2:])


def test_hidden_states_are_a_replicas_own_and_begin_anew_with_an_epoch(folder):
    """What a replica carries is what the whole stream of an epoch, read at once, leaves behind."""
    task = tasks.make("wikitext2/lstm", folder, SMALL["wikitext2/lstm"] | {"dropout": 0.0}, batch=2)
    trainer = Trainer(task, Settings(3, 2, 2, optimizer=Recipe("sgd", 1e-30), backend="loop"), "complete")
    per_epoch = trainer.batches.steps_per_epoch
    assert per_epoch > 10
    for epoch in (0, 1):
        trainer.run(until=(epoch + 1) * per_epoch)
        steps = range(epoch * per_epoch, (epoch + 1) * per_epoch)
        whole = torch.cat([trainer.batches.batch(step)[0] for step in steps], dim=2)
        for i in range(3):
            with trainer.replicas.replica(i) as one, torch.no_grad():
                torch.testing.assert_close(trainer.replicas.buffers["h"][i], one.read(whole[i])[1][0])


def test_perplexity_carries_the_state_through_the_text(folder):
    task = tasks.make("wikitext2/lstm", folder, SMALL["wikitext2/lstm"], batch=2)
    model = task.build().eval()
    text = task.test.tokens
    streams = min(task.metric.batch, (len(text) - 1) // 5)
    length = (len(text) - 1) // streams
    x = torch.stack([text[k * length : (k + 1) * length] for k in range(streams)])
    y = torch.stack([text[k * length + 1 : (k + 1) * length + 1] for k in range(streams)])
    with torch.no_grad():
        whole = cross_entropy(model.read(x)[0].flatten(0, 1), y.flatten())
    assert task.metric.of(model, task.test) == pytest.approx(math.exp(float(whole)), rel=1e-5)


BAD = [
    ("wikitext2/lstm", {"windw": 5}, r"task.options.windw: .*; wikitext2/lstm takes train, test, embedding"),
    ("cifar10/resnet20", {"norm": "layer"}, "task.options.norm: Input should be 'batch' or 'group'"),
    ("text/gpt-nano", {"dropout": 1.5}, "task.options.dropout: Input should be less than 1 .it is 1.5"),
    ("cifar10/resnet21", {}, "there is no task 'cifar10/resnet21'; did you mean 'cifar10/resnet20'"),
]


@pytest.mark.parametrize(("name", "options", "message"), BAD)
def test_mistakes_are_named(name, options, message):
    with pytest.raises(GossamerError, match=message):
        tasks.check(name, options)


def test_missing_data_says_how_to_get_it(tmp_path):
    with pytest.raises(GossamerError, match="gossamer data get cifar10"):
        tasks.make("cifar10/resnet20", tmp_path)


@pytest.mark.parametrize("name", specs.shipped())
def test_every_shipped_spec_is_a_possible_experiment(name):
    spec = specs.load(name)
    assert [spec.settings(cell).replicas for cell in spec.cells()]
    if name.endswith("-laptop"):
        assert len(spec.methods) >= 3
        assert min(spec.replicas) >= 16
        assert specs.load(name.removesuffix("-laptop")).task.name == spec.task.name
