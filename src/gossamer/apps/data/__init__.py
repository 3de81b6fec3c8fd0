"""Data sets, read from the official files into tensors. None of the readers unpickles; what is truncated or foreign is refused.

``folder=None`` looks in the usual places: ``gossamer data`` lists them.
"""

from gossamer.apps.data.cifar import CIFAR10_CLASSES, cifar10
from gossamer.apps.data.embedded import digits
from gossamer.apps.data.files import Pair
from gossamer.apps.data.idx import fashion_mnist, read_idx
from gossamer.apps.data.images import ImageFolder, imagenet
from gossamer.apps.data.plaintext import plain_text
from gossamer.apps.data.words import Corpus, wikitext2

__all__ = [
    "CIFAR10_CLASSES",
    "Corpus",
    "ImageFolder",
    "Pair",
    "cifar10",
    "digits",
    "fashion_mnist",
    "imagenet",
    "plain_text",
    "read_idx",
    "wikitext2",
]
