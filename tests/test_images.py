"""Images in class folders, decoded in processes of their own."""

import gc
import io
import os
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
import torch

Image = pytest.importorskip("PIL.Image")

from gossamer.apps import data  # noqa: E402
from gossamer.apps.augment import IMAGENET  # noqa: E402
from gossamer.apps.data import decoders  # noqa: E402
from gossamer.apps.data.decoder import decode, part  # noqa: E402
from gossamer.data import seeds  # noqa: E402
from gossamer.errors import GossamerError  # noqa: E402

SIZE = 16
CLASSES = ("n01440764", "n01443537", "n02084071")


def write(path, width=60, height=40, colour=None, mode="RGB", format="JPEG"):
    draw = np.random.default_rng(width * 1000 + height)
    pixels = np.full((height, width, 3), colour, np.uint8) if colour else draw.integers(0, 256, (height, width, 3), np.uint8)
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).convert(mode).save(path, format=format)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("imagenet")
    for k, kind in enumerate(CLASSES):
        for j in range(3 - k):
            write(root / "train" / kind / f"{kind}_{j}.JPEG", 50 + 7 * j, 40 + 5 * k)
        write(root / "val" / kind / f"ILSVRC2012_val_{k:08d}.JPEG", 64, 48)
    return root


@pytest.fixture
def train(folder):
    images = data.ImageFolder(folder / "train", train=True, size=SIZE, seed=5, workers=2)
    yield images
    images.close()


def test_what_is_listed_and_taken(folder, train):
    assert train.classes == CLASSES
    assert len(train) == 6
    assert train.labels.tolist() == [0, 0, 0, 1, 1, 2]
    index = torch.tensor([[5, 0, 3], [1, 1, 4]])
    images, labels = train.take(index, step=7)
    assert images.shape == (2, 3, 3, SIZE, SIZE)
    assert images.dtype == torch.float32
    assert labels.tolist() == [[2, 0, 1], [0, 0, 1]]
    for place, sample in (((0, 0), 5), ((1, 2), 4)):
        raw = decode(str(train.path(sample)), SIZE, seeds.derive(5, 7, sample, -7))  # here, in this process
        pixels = np.frombuffer(raw, np.uint8).reshape(SIZE, SIZE, 3).transpose(2, 0, 1) / 255
        expected = (pixels - np.array(IMAGENET.mean)[:, None, None]) / np.array(IMAGENET.std)[:, None, None]
        assert images[place].numpy() == pytest.approx(expected, abs=1e-5)
    assert torch.equal(images[1, 0], images[1, 1])  # the same sample at the same step
    assert not torch.equal(train.take(index, step=8)[0], images)
    with data.ImageFolder(folder / "train", train=True, size=SIZE, seed=5, workers=1) as alone:
        assert torch.equal(alone.take(index, step=7)[0], images)  # whoever decodes it
    with data.ImageFolder(folder / "train", train=True, size=SIZE, seed=6, workers=1) as other:
        assert not torch.equal(other.take(index, step=7)[0], images)
    empty, none = train.take(torch.empty(0, dtype=torch.int64))
    assert empty.shape == (0, 3, SIZE, SIZE)
    assert len(none) == 0


def test_evaluation_takes_the_centre(folder, tmp_path):
    """Of a square image the middle 7/8: red there, blue around, gives red alone."""
    side, border = 256, 16
    pixels = np.zeros((side, side + 100, 3), np.uint8)
    pixels[..., 2] = 255
    pixels[border:-border, 50 + border : -50 - border] = (255, 0, 0)
    path = tmp_path / "val" / "c" / "x.png"
    path.parent.mkdir(parents=True)
    Image.fromarray(pixels).save(path)
    made = np.frombuffer(decode(str(path), 224, None), np.uint8).reshape(224, 224, 3)
    assert (made == (255, 0, 0)).all()
    with data.ImageFolder(tmp_path / "val", train=False, size=SIZE, workers=1) as images:
        assert torch.equal(images.take(torch.tensor([0]), 1)[0], images.take(torch.tensor([0]), 2)[0])


def test_random_parts_are_inside_and_of_all_sizes():
    import random

    for width, height in ((500, 375), (1, 1), (10, 2000), (2000, 10)):
        boxes = [part(width, height, random.Random(k)) for k in range(300)]
        assert all(0 <= a < c <= width and 0 <= b < d <= height for a, b, c, d in boxes)
        if width == 500:
            shares = sorted((c - a) * (d - b) / (width * height) for a, b, c, d in boxes)
            assert shares[0] < 0.15
            assert shares[-1] > 0.85
    assert {part(10, 2000, random.Random(k)) for k in range(5)} == {(0, 993, 10, 1006)}  # too narrow: the centre


@pytest.mark.parametrize(("mode", "format"), [("L", "JPEG"), ("CMYK", "JPEG"), ("RGBA", "PNG"), ("P", "PNG")])
def test_odd_images_that_imagenet_has(tmp_path, mode, format):
    write(tmp_path / "x.JPEG", mode=mode, format=format)
    assert len(decode(str(tmp_path / "x.JPEG"), SIZE, 3)) == SIZE * SIZE * 3


def test_broken_files_are_named_and_the_rest_goes_on(folder, train, tmp_path):
    root = tmp_path / "train"
    for name in ("good", "cut", "foreign", "empty", "gif"):
        write(root / "a" / f"{name}.JPEG")
    (root / "a" / "cut.JPEG").write_bytes((root / "a" / "cut.JPEG").read_bytes()[:700])
    (root / "a" / "foreign.JPEG").write_bytes(b"<!doctype html>")
    (root / "a" / "empty.JPEG").write_bytes(b"")
    buffer = io.BytesIO()
    Image.new("P", (4, 4)).save(buffer, format="GIF")
    (root / "a" / "gif.JPEG").write_bytes(buffer.getvalue())
    with data.ImageFolder(root, train=True, size=SIZE, workers=1) as images:
        for sample, reason in ((0, "truncated"), (1, "cannot identify"), (2, "cannot identify"), (3, "cannot identify")):
            with pytest.raises(GossamerError, match=f"{images.path(sample)} can't be decoded: .*{reason}.*JPEG was expected"):
                images.take(torch.tensor([4, sample, 4]))
        assert images.path(4).name == "good.JPEG"
        assert images.take(torch.tensor([4, 4]))[0].shape == (2, 3, SIZE, SIZE)


def processes(images):
    pool = images._decoders._started
    return [] if pool is None else [pool.free.get_nowait() for _ in range(images._decoders.workers)]


def test_processes_start_late_and_end_with_their_owner(folder):
    images = data.ImageFolder(folder / "train", train=True, size=SIZE, workers=2)
    assert images._decoders._started is None
    images.take(torch.arange(6))
    workers = processes(images)
    for worker in workers:
        images._decoders._started.free.put(worker)
        assert worker.poll() is None
    del images
    gc.collect()
    assert [worker.poll() for worker in workers] == [0, 0]


def test_a_worker_that_dies_is_replaced(folder):
    with data.ImageFolder(folder / "train", train=True, size=SIZE, workers=1) as images:
        expected = images.take(torch.arange(6))[0]
        (worker,) = processes(images)
        worker.kill()
        images._decoders._started.free.put(worker)
        with pytest.raises(GossamerError, match="the process that was decoding it ended by itself \\(exit code -9\\)"):
            images.take(torch.arange(6))
        assert torch.equal(images.take(torch.arange(6))[0], expected)


def test_ctrl_c_stops_a_take_and_leaves_the_processes_in_order(folder, train, no_gc):
    """To the whole foreground group, as a terminal does it: the processes that decode must not be in it."""
    expected = train.take(torch.arange(6))[0]
    groups = {os.getpgid(w.pid) for w in [*_put_back(train)]}
    assert os.getpgid(0) not in groups
    timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    begun = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        train.take(torch.arange(6).repeat(20_000))
    assert time.monotonic() - begun < 10
    timer.join()
    assert torch.equal(train.take(torch.arange(6))[0], expected)


def _put_back(images):
    workers = processes(images)
    for worker in workers:
        images._decoders._started.free.put(worker)
    return workers


def test_the_program_ends_when_its_input_does():
    program = [sys.executable, "-P", str(decoders._PROGRAM)]
    done = subprocess.run(program, input=b'{"path": "/none", "size": 4, "seed": null}\n', capture_output=True, timeout=30)
    assert done.returncode == 0
    assert b"No such file" in done.stdout


def test_without_pillow_the_extra_is_named(folder, monkeypatch):
    monkeypatch.setattr(decoders, "find_spec", lambda name: None)
    with pytest.raises(GossamerError, match=r"needs Pillow.*pip install 'gossamer\[images\]'"):
        data.ImageFolder(folder / "train", train=True)


def test_imagenet(folder, tmp_path):
    train, valid = data.imagenet(folder, size=SIZE, complete=False)
    assert (len(train), len(valid), train.train, valid.train) == (6, 3, True, False)
    with pytest.raises(GossamerError, match="has 6 images in 3 classes; 1281167 in 1000 were expected"):
        data.imagenet(folder)
    with pytest.raises(GossamerError, match="ImageNet-1K is not in .*register at image-net.org"):
        data.imagenet(tmp_path)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (["train/n01440764/a.JPEG", "val/a.JPEG"], "val/a.JPEG is not in a class folder"),
        (["train/n01440764/a.JPEG", "val/n01443537/a.JPEG"], "not the same classes: n01440764 is in one"),
        (["train/cats/a.JPEG", "val/cats/a.JPEG"], "train/cats is not a class of ImageNet; names such as n01440764"),
        (["train/n01440764/a.txt", "val/n01440764/a.JPEG"], "a.txt is not an image; files that end with .JPEG"),
        (["train/n01440764/a.JPEG"], "val can't be read: No such file"),
        (["train/n01440764/x/a.JPEG"], "x is not an image"),
    ],
)
def test_other_folders_are_refused(tmp_path, files, message):
    for name in files:
        write(tmp_path / name, 4, 4)
    with pytest.raises(GossamerError, match=message):
        data.imagenet(tmp_path, complete=False)
    (tmp_path / "empty" / "train").mkdir(parents=True)
    with pytest.raises(GossamerError, match="is empty; class folders"):
        data.imagenet(tmp_path / "empty")
