"""What data sets there are, where they are looked for, and how to get them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from gossamer.errors import GossamerError

VARIABLE = "GOSSAMER_DATA"


@dataclass(frozen=True)
class Archive:
    """One file to download. ``kind``: what it is unpacked as; a plain file stays as it is."""

    url: str
    md5: str
    kind: str  # "tar", "zip" or "file"

    @property
    def name(self) -> str:
        return self.url.rpartition("/")[2]


@dataclass(frozen=True)
class Dataset:
    """``marks``: paths inside its folder (patterns allowed); the first that is there shows that the data set is, and how it is laid out."""

    name: str
    title: str
    size: str
    licence: str
    marks: tuple[str, ...]
    archives: tuple[Archive, ...]
    advice: str  # how to get it, in one clause
    system: tuple[Path, ...] = ()

    def places(self, folder: Path | None = None) -> tuple[Path, ...]:
        """Where it is looked for: only in ``folder`` if one is given."""
        if folder is not None:
            return (folder,)
        own = os.environ.get(VARIABLE)
        return (*((Path(own) / self.name,) if own else ()), cache() / self.name, *self.system)

    def find(self, folder: Path | None = None) -> Path | None:
        """The first mark that is there."""
        found = (path for place in self.places(folder) for mark in self.marks for path in sorted(place.glob(mark))[:1])
        return next(found, None)

    def need(self, folder: Path | None = None) -> Path:
        found = self.find(folder)
        if found is None:
            raise GossamerError(
                f"{self.title} is not in {' or '.join(map(str, self.places(folder)))} (no {' or '.join(self.marks)}); {self.advice}"
            )
        return found


def cache() -> Path:
    """Where downloads go."""
    return Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "gossamer"


_FASHION = "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/"

DIGITS = Dataset(
    name="digits",
    title="Handwritten digits",
    size="1,797 images of 8×8",
    licence="CC BY 4.0",
    marks=(),
    archives=(),
    advice="it comes with scikit-learn; there is nothing to get",
)
FASHION_MNIST = Dataset(
    name="fashion-mnist",
    title="Fashion-MNIST",
    size="60,000 + 10,000 images of 28×28, 31 MB",
    licence="MIT",
    marks=("train-images-idx3-ubyte.gz", "train-images-idx3-ubyte"),
    archives=(
        Archive(_FASHION + "train-images-idx3-ubyte.gz", "8d4fb7e6c68d591d4c3dfef9ec88bf0d", "file"),
        Archive(_FASHION + "train-labels-idx1-ubyte.gz", "25c81989df183df01b3e8a0aad5dffbe", "file"),
        Archive(_FASHION + "t10k-images-idx3-ubyte.gz", "bef4ecab320f06d8554ea6380940ec79", "file"),
        Archive(_FASHION + "t10k-labels-idx1-ubyte.gz", "bb300cfdad3c16e7a12a480ee83cd310", "file"),
    ),
    advice="get it with: gossamer data get fashion-mnist (or Debian's package dataset-fashion-mnist)",
    system=(Path("/usr/share/datasets/fashion-mnist"),),
)
CIFAR10 = Dataset(
    name="cifar10",
    title="CIFAR-10",
    size="50,000 + 10,000 images of 32×32, 170 MB",
    licence="none stated by its authors",
    marks=(
        "cifar-10-batches-bin/data_batch_1.bin",
        "data_batch_1.bin",
        "cifar-10-batches-py/data_batch_1",
        "data_batch_1",
    ),
    archives=(Archive("https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz", "c32a1d4ab5d03f1284b67883e8d87530", "tar"),),
    advice="get it with: gossamer data get cifar10",
)
WIKITEXT2 = Dataset(
    name="wikitext2",
    title="WikiText-2",
    size="2.1 million words, 4 MB",
    licence="CC BY-SA 3.0",
    marks=("wikitext-2/wiki.train.tokens", "wiki.train.tokens", "train.txt"),
    # The first address (research.metamind.io) is gone; this is the author's own. The checksum is torchtext's, for the same archive.
    archives=(Archive("https://wikitext.smerity.com/wikitext-2-v1.zip", "542ccefacc6c27f945fb54453812b3cd", "zip"),),
    advice="get it with: gossamer data get wikitext2",
)
TEXT = Dataset(
    name="text",
    title="Plain text",
    size="any UTF-8 text",
    licence="yours",
    marks=("train.txt", "*.txt"),
    archives=(),
    advice="it is yours to bring: put .txt files into one of these folders, or name a file or folder in the spec (task.data)",
)
IMAGENET = Dataset(
    name="imagenet",
    title="ImageNet-1K",
    size="1,281,167 + 50,000 images, 145 GB",
    licence="for research, under the terms of image-net.org",
    marks=("train",),
    archives=(),
    advice=(
        "there is no free download: register at image-net.org, take the ILSVRC 2012 train and validation archives, and unpack them "
        "as train/n01440764/*.JPEG and val/n01440764/*.JPEG"
    ),
)
ALL: Sequence[Dataset] = (DIGITS, FASHION_MNIST, CIFAR10, WIKITEXT2, TEXT, IMAGENET)


def named(name: str) -> Dataset:
    found = next((dataset for dataset in ALL if dataset.name == name), None)
    if found is None:
        raise GossamerError(f"there is no data set {name!r}; known are {', '.join(dataset.name for dataset in ALL)}")
    return found
