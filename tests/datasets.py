"""Tiny data sets in the official layouts, written byte by byte."""

import gzip
import struct
from pathlib import Path

import numpy as np

CLASSES = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]


def idx(array: np.ndarray) -> bytes:
    return bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()


def fashion(folder: Path, train: int = 20, test: int = 10, zipped: bool = True) -> Path:
    draw = np.random.default_rng(0)
    for split, count in (("train", train), ("t10k", test)):
        parts = {"images-idx3": draw.integers(0, 256, (count, 28, 28)), "labels-idx1": draw.integers(0, 10, count)}
        for name, array in parts.items():
            raw = idx(array.astype(np.uint8))
            path = folder / f"{split}-{name}-ubyte{'.gz' if zipped else ''}"
            path.write_bytes(gzip.compress(raw) if zipped else raw)
    return folder


def cifar_arrays(per_file: int) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    draw = np.random.default_rng(1)
    names = [*(f"data_batch_{k}" for k in range(1, 6)), "test_batch"]
    return {
        name: (
            draw.integers(0, 256, (per_file, 3072)).astype(np.uint8),
            draw.integers(0, 10, per_file).astype(np.uint8),
        )
        for name in names
    }


def cifar_binary(folder: Path, per_file: int = 8) -> Path:
    inner = folder / "cifar-10-batches-bin"
    inner.mkdir(parents=True)
    for name, (images, labels) in cifar_arrays(per_file).items():
        (inner / f"{name}.bin").write_bytes(np.concatenate([labels[:, None], images], axis=1).tobytes())
    (inner / "batches.meta.txt").write_text("\n".join(CLASSES) + "\n\n")
    return folder


class Python2Pickler:
    """Writes what Python 2's cPickle wrote with protocol 2 (the memo counts from 1; lists come in thousands)."""

    def __init__(self) -> None:
        self.stored = 0
        self.out = bytearray(b"\x80\x02")

    def put(self) -> None:
        self.stored += 1
        self.out += b"q" + bytes([self.stored]) if self.stored < 256 else b"r" + struct.pack("<I", self.stored)

    def value(self, value: object) -> None:
        if isinstance(value, bytes):
            self.out += b"U" + bytes([len(value)]) + value if len(value) < 256 else b"T" + struct.pack("<i", len(value)) + value
            self.put()
        elif isinstance(value, int):
            packed = value.to_bytes(1 if 0 <= value < 256 else 2, "little") if 0 <= value < 65536 else struct.pack("<i", value)
            self.out += {1: b"K", 2: b"M", 4: b"J"}[len(packed)] + packed
        elif isinstance(value, list):
            self.out += b"]"
            self.put()
            for k in range(0, len(value), 1000):
                self.out += b"("
                for item in value[k : k + 1000]:
                    self.value(item)
                self.out += b"e"
        elif isinstance(value, dict):
            self.out += b"}"
            self.put()
            self.out += b"("
            for key, item in value.items():
                self.value(key)
                self.value(item)
            self.out += b"u"
        else:
            self.array(value)

    def array(self, array: np.ndarray) -> None:
        self.out += b"cnumpy.core.multiarray\n_reconstruct\n"
        self.put()
        self.out += b"cnumpy\nndarray\n"
        self.put()
        self.out += b"K\x00\x85"
        self.put()
        self.value(b"b")
        self.out += b"\x87"
        self.put()
        self.out += b"R"
        self.put()
        self.out += b"(K\x01"
        for size in array.shape:
            self.value(size)
        self.out += b"\x86"
        self.put()
        self.out += b"cnumpy\ndtype\n"
        self.put()
        self.value(b"u1")
        self.out += b"K\x00K\x01\x87"
        self.put()
        self.out += b"R"
        self.put()
        self.out += b"(K\x03"
        self.value(b"|")
        self.out += b"NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00t"
        self.put()
        self.out += b"b\x89"
        self.value(array.tobytes())
        self.out += b"t"
        self.put()
        self.out += b"b"

    @classmethod
    def dumps(cls, value: object) -> bytes:
        made = cls()
        made.value(value)
        return bytes(made.out) + b"."


META = {b"num_cases_per_batch": 10000, b"label_names": [name.encode() for name in CLASSES], b"num_vis": 3072}


def cifar_batch(name: str, images: np.ndarray, labels: np.ndarray) -> bytes:
    files = [f"{name}_s_{k:06d}.png".encode() for k in range(len(labels))]
    return Python2Pickler.dumps(
        {b"batch_label": name.encode(), b"labels": labels.tolist(), b"data": images, b"filenames": files}
    )


def cifar_python(folder: Path, per_file: int = 8) -> Path:
    inner = folder / "cifar-10-batches-py"
    inner.mkdir(parents=True)
    for name, (images, labels) in cifar_arrays(per_file).items():
        (inner / name).write_bytes(cifar_batch(name, images, labels))
    (inner / "batches.meta").write_bytes(Python2Pickler.dumps(META))
    return folder


TRAIN = " \n = Ring = \n \n A ring is a <unk> of a few . \n It closes . \n"
VALID = " \n = Star = \n \n A star is a ring . \n"
TEST = " = Torus = \n \n A torus closes . \n"


def wikitext(folder: Path, official: bool = False) -> Path:
    for split, text in (("train", TRAIN), ("valid", VALID), ("test", TEST)):
        (folder / (f"wiki.{split}.tokens" if official else f"{split}.txt")).write_text(text)
    return folder
