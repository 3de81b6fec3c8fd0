"""The loaders read the official layouts, and refuse whatever is truncated, mislabelled or something else."""

import gzip
import hashlib
import pickle
import re
import warnings

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gossamer.apps import data
from gossamer.apps.data import catalog
from gossamer.apps.data.pickles import read_pickle
from gossamer.errors import GossamerError
from tests import datasets

COUNTS = {"train": 20, "valid": 13, "test": 10}


def check_pair(pair, count, shape, dtype):
    images, labels = pair
    assert (images.shape, images.dtype) == ((count, *shape), dtype)
    assert (labels.shape, labels.dtype) == ((count,), torch.int64)
    assert 0 <= labels.min() <= labels.max() < 10


# --- Reading what is right -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("zipped", [True, False])
def test_fashion_mnist(tmp_path, zipped):
    datasets.fashion(tmp_path, 20, 10, zipped)
    train, test = data.fashion_mnist(tmp_path, counts=(20, 10))
    check_pair(train, 20, (28, 28), torch.float32)
    check_pair(test, 10, (28, 28), torch.float32)
    draw = np.random.default_rng(0)
    assert torch.equal(train[0], torch.from_numpy(draw.integers(0, 256, (20, 28, 28))).float() / 255)
    assert torch.equal(train[1], torch.from_numpy(draw.integers(0, 10, 20)))


@pytest.mark.parametrize("write", [datasets.cifar_binary, datasets.cifar_python])
@pytest.mark.parametrize("inside", [False, True])
def test_cifar10_in_both_layouts(tmp_path, write, inside):
    write(tmp_path)
    train, test = data.cifar10(next(tmp_path.iterdir()) if inside else tmp_path, per_file=8)
    check_pair(train, 40, (3, 32, 32), torch.uint8)
    check_pair(test, 8, (3, 32, 32), torch.uint8)
    arrays = datasets.cifar_arrays(8)
    images, labels = arrays["data_batch_2"]
    assert torch.equal(train[0][8:16], torch.from_numpy(images.reshape(8, 3, 32, 32)))
    assert torch.equal(train[1][8:16], torch.from_numpy(labels.astype(np.int64)))
    assert torch.equal(test[0], torch.from_numpy(arrays["test_batch"][0].reshape(8, 3, 32, 32)))


def test_our_pickles_are_those_of_python_2():
    """The archive's batches.meta has this published MD5, and other batches are what Python's own reader takes them for."""
    assert hashlib.md5(datasets.Python2Pickler.dumps(datasets.META)).hexdigest() == "5ff9c542aee3614f3951f8cda6e48888"
    images, labels = datasets.cifar_arrays(1200)["data_batch_1"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # numpy moved its module since
        read = pickle.loads(datasets.cifar_batch("x", images, labels), encoding="bytes")
    assert np.array_equal(read[b"data"], images)
    assert read[b"labels"] == labels.tolist()


def test_a_batch_of_many(tmp_path):
    images, labels = datasets.cifar_arrays(1200)["data_batch_1"]
    (tmp_path / "b").write_bytes(datasets.cifar_batch("b", images, labels))
    read = read_pickle(tmp_path / "b")
    assert np.array_equal(read[b"data"].content, images)
    assert read[b"labels"] == labels.tolist()
    assert len(read[b"filenames"]) == 1200


@pytest.mark.parametrize("official", [False, True])
def test_wikitext2(tmp_path, official):
    corpus = data.wikitext2(datasets.wikitext(tmp_path, official), counts=COUNTS)
    assert " ".join(corpus.vocabulary) == "<eos> = Ring A ring is a <unk> of few . It closes"
    train, valid, test = (" ".join(corpus.vocabulary[k] for k in part) for part in (corpus.train, corpus.valid, corpus.test))
    assert train == "<eos> = Ring = <eos> <eos> A ring is a <unk> of a few . <eos> It closes . <eos>"
    assert valid == "<eos> = <unk> = <eos> <eos> A <unk> is a ring . <eos>"
    assert test == "= <unk> = <eos> <eos> A <unk> closes . <eos>"
    assert {t.dtype for t in (corpus.train, corpus.valid, corpus.test)} == {torch.int64}


def test_a_vocabulary_of_the_most_frequent_words(tmp_path):
    corpus = data.wikitext2(datasets.wikitext(tmp_path), counts=COUNTS, vocabulary=3)
    assert " ".join(corpus.vocabulary) == "<eos> = <unk> a"
    assert " ".join(corpus.vocabulary[k] for k in corpus.test) == "= <unk> = <eos> <eos> <unk> <unk> <unk> <unk> <eos>"


def test_unknown_words_need_no_unk_in_train(tmp_path):
    datasets.wikitext(tmp_path)
    (tmp_path / "train.txt").write_text(" = A B = \n")
    corpus = data.wikitext2(tmp_path)
    assert corpus.vocabulary == ("=", "A", "B", "<eos>", "<unk>")
    assert corpus.valid.max() == 4


def test_plain_text(tmp_path):
    (tmp_path / "b.txt").write_text("bé" * 100)
    (tmp_path / "a.txt").write_text("a" * 100)
    train, valid = data.plain_text(tmp_path)
    assert train.dtype == valid.dtype == torch.uint8
    assert bytes(torch.cat([train, valid]).tolist()).decode() == "a" * 100 + "bé" * 100
    assert len(valid) == 40
    (tmp_path / "valid.txt").write_text("v")
    (tmp_path / "test.txt").write_text("t")
    train, valid = data.plain_text(tmp_path)
    assert (len(train), valid.tolist()) == (400, [ord("v")])
    train, valid = data.plain_text(tmp_path / "a.txt")
    assert (len(train), len(valid)) == (90, 10)


def test_digits():
    train, test = data.digits()
    check_pair(train, 1437, (8, 8), torch.float32)
    check_pair(test, 360, (8, 8), torch.float32)


def test_where_data_is_looked_for(tmp_path, monkeypatch):
    monkeypatch.setenv("GOSSAMER_DATA", str(tmp_path / "own"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert catalog.CIFAR10.places() == (tmp_path / "own/cifar10", tmp_path / "cache/gossamer/cifar10")
    with pytest.raises(GossamerError, match=f"CIFAR-10 is not in {tmp_path}/own/cifar10 or .*gossamer data get cifar10"):
        data.cifar10()
    datasets.cifar_binary(tmp_path / "cache/gossamer/cifar10")
    assert catalog.CIFAR10.find().is_relative_to(tmp_path / "cache")
    datasets.cifar_python(tmp_path / "own/cifar10")
    assert catalog.CIFAR10.find().is_relative_to(tmp_path / "own")
    assert len(data.cifar10(per_file=8)[1][1]) == 8
    with pytest.raises(GossamerError, match="is not in /nowhere"):
        data.cifar10(catalog.Path("/nowhere"))
    monkeypatch.delenv("GOSSAMER_DATA")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert catalog.WIKITEXT2.places() == (tmp_path / ".cache/gossamer/wikitext2",)


# --- Refusing what is wrong ------------------------------------------------------------------------------------------------


def refused(load, path, *parts):
    with pytest.raises(GossamerError) as caught:
        load()
    assert str(path) in str(caught.value)
    for part in parts:
        assert re.search(part, str(caught.value)), str(caught.value)


def test_fashion_mnist_refuses(tmp_path):
    datasets.fashion(tmp_path, zipped=False)
    load = lambda: data.fashion_mnist(tmp_path, counts=(20, 10))  # noqa: E731
    labels, images = tmp_path / "t10k-labels-idx1-ubyte", tmp_path / "train-images-idx3-ubyte"
    good = labels.read_bytes()
    labels.write_bytes(good[:-1])
    refused(load, labels, "has 9 bytes after offset 8; its header says 10")
    labels.write_bytes(good[:6])
    refused(load, labels, "ends at offset 6; its header of 1 dimensions ends at 8")
    labels.write_bytes(good[:11] + b"\x0a" + good[12:])
    refused(load, labels, "label 10 of sample 3 at offset 11", "0 to 9")
    labels.write_bytes(datasets.idx(np.zeros(9, np.uint8)))
    refused(load, labels, r"shape is \(9,\); \(10,\) was expected")
    labels.write_bytes(b"<!doctype html>")
    refused(load, labels, "is not an IDX file of bytes: it begins with 3c21646f, not 000008")
    labels.unlink()
    refused(load, labels, "No such file")
    labels.write_bytes(good)
    images.write_bytes(datasets.idx(np.zeros((20, 28, 27), np.uint8)))
    refused(load, images, r"\(20, 28, 27\); \(20, 28, 28\) was expected")
    refused(lambda: data.fashion_mnist(tmp_path), images, r"\(60000, 28, 28\) was expected")


def test_a_broken_gz_file_is_refused(tmp_path):
    path = tmp_path / "x.gz"
    whole = gzip.compress(datasets.idx(np.arange(200, dtype=np.uint8)))
    for broken in (whole[:-9], whole[:40] + bytes([whole[40] ^ 255]) + whole[41:], b"plain", b""):
        path.write_bytes(broken)
        refused(lambda: data.read_idx(path), path)


def test_cifar10_binary_refuses(tmp_path):
    inner = datasets.cifar_binary(tmp_path) / "cifar-10-batches-bin"
    load = lambda: data.cifar10(tmp_path, per_file=8)  # noqa: E731
    path = inner / "data_batch_3.bin"
    good = path.read_bytes()
    path.write_bytes(good[:-100])
    refused(load, path, "ends at offset 24484, 2973 bytes into image 7; 24584 bytes were expected: 8 images of 3073")
    path.write_bytes(good[: 3073 * 5])
    refused(load, path, "ends at offset 15365, before image 5")
    path.write_bytes(good + good[:3073])
    refused(load, path, "24584 bytes were expected")
    path.write_bytes(good[: 3073 * 2] + b"\x0b" + good[3073 * 2 + 1 :])
    refused(load, path, "label 11 of sample 2 at offset 6146 is out of range; labels are 0 to 9")
    path.write_bytes(good)
    (inner / "batches.meta.txt").write_text("apple\nbaby\n")
    refused(load, inner / "batches.meta.txt", "does not name CIFAR-10's classes")
    refused(lambda: data.cifar10(tmp_path), inner)
    (inner / "batches.meta.txt").unlink()
    (inner / "test_batch.bin").unlink()
    refused(load, inner / "test_batch.bin", "No such file")


def cifar_variants():
    images, labels = datasets.cifar_arrays(8)["data_batch_3"]
    good = {b"labels": labels.tolist(), b"data": images}
    whole = datasets.Python2Pickler.dumps(good)
    return {
        "truncated": (whole[:-1000], "is not a whole pickle: after offset .* of"),
        "without an end": (whole[:-1], "is not a whole pickle"),
        "not a pickle": (b"<!doctype html>", "not a whole pickle"),
        "empty": (b"", "is not a whole pickle"),
        "a list": (datasets.Python2Pickler.dumps([1]), "holds a list; a dict was expected"),
        "no data": (datasets.Python2Pickler.dumps({b"labels": labels.tolist()}), "'data' is no array of bytes; shape"),
        "fewer images": (datasets.Python2Pickler.dumps(good | {b"data": images[:7]}), r"\(7, 3072\); shape \(8, 3072\)"),
        "fewer labels": (datasets.Python2Pickler.dumps(good | {b"labels": [1]}), "'labels' has 1 entries; 8 labels"),
        "a wrong label": (
            datasets.Python2Pickler.dumps(good | {b"labels": [1] * 7 + [10]}),
            "label 10 of sample 7 is not one; labels are 0 to 9",
        ),
        "a short array": (whole.replace(b"M\x00\x0c", b"M\x01\x0c"), r"shape \(8, 3073\) has 24576 bytes; 24584 were expected"),
        "other numbers": (whole.replace(b"U\x02u1", b"U\x02i1"), "arrays of unsigned bytes"),
    }


@pytest.mark.parametrize("kind", list(cifar_variants()))
def test_cifar10_python_refuses(tmp_path, kind):
    path = datasets.cifar_python(tmp_path) / "cifar-10-batches-py" / "data_batch_3"
    content, message = cifar_variants()[kind]
    path.write_bytes(content)
    refused(lambda: data.cifar10(tmp_path, per_file=8), path, message)


class Evil:
    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return (open, (self.marker, "w"))


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_a_malicious_pickle_is_refused_and_does_nothing(tmp_path, protocol):
    folder, marker = datasets.cifar_python(tmp_path / "data"), tmp_path / "evil was here"
    path = folder / "cifar-10-batches-py" / "data_batch_3"
    path.write_bytes(pickle.dumps({b"data": Evil(str(marker))}, protocol))
    refused(lambda: data.cifar10(folder, per_file=8), path, "is refused at offset")
    assert not marker.exists()
    pickle.loads(path.read_bytes())  # it would have
    assert marker.exists()


@pytest.mark.parametrize(
    ("program", "message"),
    [
        (b"cos\nsystem\n(U\x02lstR.", "asks for 'os.system'"),
        (b"\x80\x02cnumpy\ndtype\n(U\x02u1tRcbuiltins\neval\n.", "asks for 'builtins.eval'"),
        (b"\x80\x02cnumpy\nndarray\n(K\x01tR.", "calls something other"),
        (b"\x80\x02cnumpy.core.multiarray\n_reconstruct\n(K\x01tR.", "calls something other"),
        (b"\x80\x02cnumpy\nload\n(K\x01tR.", "asks for 'numpy.load'"),
        (b"\x80\x04\x8c\x05numpy\x8c\x0cndarray.dump\x93.", "asks for 'numpy.ndarray.dump'"),
        (b"\x80\x04\x8c\x02os\x8c\x06system\x93.", "asks for 'os.system'"),
        (b"(i__main__\nEvil\n.", "asks for '__main__.Evil'"),
        (b"\x80\x02\x82\x01.", "asks for extension 1"),
        (b"\x80\x02cnumpy\nndarray\n}U\x08__call__K\x01sb.", "not a whole pickle"),  # no attribute is set
        (b"\x80\x02cnumpy\nndarray\nN}U\x08__call__K\x01s\x86b.", "not a whole pickle"),
        (b"\x80\x02cnumpy\nndarray\n)\x81.", "not a whole pickle"),  # no class to make an instance of
        (b"\x80\x02}]K\x01s.", "unhashable"),
        (b"\x80\x02K\x01K\x02a.", "not a whole pickle"),
        (b"\x80\x02e.", "not a whole pickle"),
        (b"\x80\x02h\x07.", "Memo value not found"),
        (b"\x80\x02}r\xff\xff\xff\x7f0K\x01.", "holds a int"),  # an entry with a large number takes no memory
        (b"\x80\x05B\xff\xff\xff\x7f.", "not a whole pickle"),
        (b"\x80\x02R.", "not a whole pickle"),
        (b"\x80\x02}K\x01.", "holds a int"),
        (b"\x80\x02}Ptext\n.", "persistent id"),
    ],
)
def test_programs_that_plain_data_does_not_need(tmp_path, program, message):
    (tmp_path / "x").write_bytes(program)
    refused(lambda: read_pickle(tmp_path / "x"), tmp_path / "x", message)


def test_wikitext2_refuses(tmp_path):
    datasets.wikitext(tmp_path, official=True)
    load = lambda: data.wikitext2(tmp_path, counts=COUNTS)  # noqa: E731
    path = tmp_path / "wiki.valid.tokens"
    path.write_text(datasets.VALID.removesuffix("\n"))
    refused(load, path, "ends at offset 35 in the middle of a line")
    path.write_text(datasets.VALID + " a line \n")
    refused(load, path, "has 16 words and line ends when it ends at offset \\d+; 13 were expected")
    path.write_bytes(datasets.VALID.encode() + b"\xc3")
    refused(load, path, "not UTF-8 text: byte 0xc3 at offset 36 of 37")
    path.write_bytes(b"PK\x03\x04\x00\x00")
    refused(load, path, "zero byte at offset 4")
    path.write_text(" \n")
    refused(load, path, "holds no text")
    path.write_text("\n<!doctype html>\n")
    refused(load, path, "line 2 at offset 1 is '<!doctype html>'; an article's title")
    path.unlink()
    refused(load, path, "No such file")
    refused(lambda: data.wikitext2(tmp_path / "none"), tmp_path / "none", "gossamer data get wikitext2")


def test_plain_text_refuses(tmp_path):
    refused(lambda: data.plain_text(tmp_path), tmp_path, "put .txt files into")
    path = tmp_path / "a.txt"
    path.write_bytes(b"abc\xffdef")
    refused(lambda: data.plain_text(tmp_path), path, "byte 0xff at offset 3 of 7")
    path.write_text("abc")
    refused(lambda: data.plain_text(tmp_path), path, "has 3 bytes; that is too short")
    path.rename(tmp_path / "valid.txt")
    refused(lambda: data.plain_text(tmp_path), tmp_path, "no text to train on: only valid.txt")


# --- Random damage ---------------------------------------------------------------------------------------------------------


def check_corpus(corpus):
    for part in (corpus.train, corpus.valid, corpus.test):
        assert part.dtype == torch.int64
        assert part.ndim == 1
        assert 0 <= part.min() <= part.max() < len(corpus.vocabulary)


def damaged(draw, raw):
    """Cut, overwritten, lengthened or with a piece taken out: never what it was."""
    last = len(raw) - 1  # mostly near the ends: what is between is mostly pixels
    where = draw(st.one_of(st.integers(0, min(300, last)), st.integers(max(0, last - 300), last), st.integers(0, last)))
    kind = draw(st.sampled_from(["cut", "flip", "insert", "remove"]))
    if kind == "cut":
        return raw[:where]
    if kind == "flip":
        return raw[:where] + bytes([raw[where] ^ draw(st.integers(1, 255))]) + raw[where + 1 :]
    if kind == "insert":
        return raw[:where] + draw(st.binary(min_size=1, max_size=20)) + raw[where:]
    return raw[:where] + raw[where + draw(st.integers(1, 50)) :]


def tried(load):
    try:
        return load(), ""
    except GossamerError as error:
        return None, str(error)


WAYS = {
    "fashion": (datasets.fashion, "train-labels-idx1-ubyte.gz", lambda f: data.fashion_mnist(f, counts=(20, 10))),
    "fashion, plain": (lambda f: datasets.fashion(f, zipped=False), "t10k-images-idx3-ubyte", lambda f: data.fashion_mnist(f, counts=(20, 10))),
    "cifar, binary": (datasets.cifar_binary, "cifar-10-batches-bin/data_batch_2.bin", lambda f: data.cifar10(f, per_file=8)),
    "cifar, python": (datasets.cifar_python, "cifar-10-batches-py/data_batch_2", lambda f: data.cifar10(f, per_file=8)),
    "cifar, python's head": (datasets.cifar_python, "cifar-10-batches-py/batches.meta", lambda f: data.cifar10(f, per_file=8)),
    "wikitext2": (datasets.wikitext, "train.txt", data.wikitext2),
}  # fmt: skip


@pytest.mark.parametrize("way", list(WAYS))
def test_random_damage_is_refused_or_leaves_well_formed_tensors(tmp_path_factory, way):
    write, name, load = WAYS[way]
    folder = write(tmp_path_factory.mktemp("damage"))
    path = folder / name
    good = path.read_bytes()

    @settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck), database=None)
    @given(st.data())
    def attempt(draw):
        path.write_bytes(damaged(draw.draw, good))
        made, message = tried(lambda: load(folder))
        if made is None:
            assert str(folder) in message  # it says where
            return
        if way == "wikitext2":
            check_corpus(made)
        else:
            fashion = way.startswith("fashion")
            shape, kind = ((28, 28), torch.float32) if fashion else ((3, 32, 32), torch.uint8)
            check_pair(made[0], 20 if fashion else 40, shape, kind)
            check_pair(made[1], 10 if fashion else 8, shape, kind)

    attempt()


@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck), database=None)
@given(st.lists(st.sampled_from([b"}", b"]", b"(", b")", b"N", b"K\x01", b"U\x02u1", b"q\x01", b"h\x01", b"a", b"e", b"s", b"u", b"t", b"R", b"b", b"\x85", b"\x86", b"\x87", b"\x88", b"0", b"cnumpy\ndtype\n", b"cnumpy\nndarray\n", b"cnumpy.core.multiarray\n_reconstruct\n", b"cos\nsystem\n", b"\x8a\x01\x05"]), max_size=25))  # fmt: skip
def test_any_program_gives_a_dict_or_a_refusal(tmp_path_factory, program):
    path = tmp_path_factory.getbasetemp() / "program"
    path.write_bytes(b"\x80\x02" + b"".join(program) + b".")
    made, message = tried(lambda: read_pickle(path))
    assert isinstance(made, dict) or str(path) in message
