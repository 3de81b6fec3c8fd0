"""The tasks that a spec can name: a data set and a model for it, with the options of each."""

from __future__ import annotations

import difflib
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch import nn

from gossamer.apps import augment, data, language, models
from gossamer.apps.folders import Folder
from gossamer.apps.images import Images
from gossamer.data.sources import Text
from gossamer.data.tasks import ACCURACY, Task
from gossamer.errors import GossamerError

# --- Options ---------------------------------------------------------------------------------------------------------------


class Options(BaseModel):
    """``train`` and ``test``: how many samples (of a text: tokens) are used, from the start; default: all."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    train: int | None = Field(default=None, ge=2)
    test: int | None = Field(default=None, ge=2)


class Perceptron(Options):
    """``hidden``: the sizes of the hidden layers."""

    hidden: tuple[int, ...] = Field(default=(64,), strict=False)


class Convolutional(Options):
    """``norm``: batch or group. ``width``: channels of the first layers."""

    norm: Literal["batch", "group"] = "batch"
    width: int = Field(default=16, ge=1)


class Residual(Convolutional):
    """``augment``: training images are shifted by up to 4 pixels and mirrored."""

    depth: int = 20
    augment: bool = True


class Dense(Options):
    norm: Literal["batch", "group"] = "batch"
    depth: int = 100
    growth: int = Field(default=12, ge=1)
    augment: bool = True


class Bottleneck(Convolutional):
    """``size``: images are size × size pixels. ``blocks``: of the four stages. ``complete``: all 1000 classes must be there."""

    width: int = Field(default=64, ge=1)
    size: int = Field(default=224, ge=32)
    blocks: tuple[int, int, int, int] = Field(default=(3, 4, 6, 3), strict=False)
    complete: bool = True


class Recurrent(Options):
    """``window``: tokens through which gradients go back. ``tied``: the output matrix is the embedding. ``vocabulary``: only so many
    words, the most frequent ones; perplexities of different vocabularies can't be compared."""

    embedding: int = Field(default=200, ge=1)
    hidden: int = Field(default=200, ge=1)
    layers: int = Field(default=2, ge=1)
    dropout: float = Field(default=0.2, ge=0, lt=1)
    tied: bool = True
    window: int = Field(default=35, ge=1)
    vocabulary: int | None = Field(default=None, ge=1)


class Transformer(Options):
    """Over bytes. ``context``: bytes that it reads at a time."""

    context: int = Field(default=models.GPT_NANO.context, ge=1)
    layers: int = Field(default=models.GPT_NANO.layers, ge=1)
    heads: int = Field(default=models.GPT_NANO.heads, ge=1)
    width: int = Field(default=models.GPT_NANO.width, ge=1)
    dropout: float = Field(default=0.0, ge=0, lt=1)


# --- The tasks -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Wish:
    """What a person asks for: a task by name, the folder of its data, and samples per replica and step. ``blank``: only the model counts,
    so a batch of zeros will do where the data do not shape it."""

    name: str
    folder: Path | None
    batch: int
    blank: bool = False

    def zeros(self, *shape: int, dtype: torch.dtype = torch.float32) -> tuple[data.Pair, data.Pair]:
        pair = torch.zeros(self.batch, *shape, dtype=dtype), torch.zeros(self.batch, dtype=torch.long)
        return pair, pair

    def fashion_mnist(self) -> tuple[data.Pair, data.Pair]:
        return self.zeros(28, 28) if self.blank else data.fashion_mnist(self.folder)


def _digits_mlp(wish: Wish, options: Perceptron) -> Task:
    return Task(wish.name, functools.partial(models.mlp, 64, 10, options.hidden), *_some(*data.digits(), options))


def _fashion_mlp(wish: Wish, options: Perceptron) -> Task:
    pairs = _some(*wish.fashion_mnist(), options)
    return Task(wish.name, functools.partial(models.mlp, 784, 10, options.hidden), *pairs)


def _fashion_cnn(wish: Wish, options: Convolutional) -> Task:
    pairs = _some(*wish.fashion_mnist(), options)
    return Task(wish.name, functools.partial(models.cnn, 10, options.width, norm=options.norm), *pairs)


def _cifar_resnet(wish: Wish, options: Residual) -> Task:
    return _cifar(wish, functools.partial(models.CifarResNet, options.depth, options.width, norm=options.norm), options)


def _cifar_densenet(wish: Wish, options: Dense) -> Task:
    return _cifar(wish, functools.partial(models.DenseNet, options.depth, options.growth, norm=options.norm), options)


def _cifar(wish: Wish, build: Callable[[], nn.Module], options: Residual | Dense) -> Task:
    pairs = wish.zeros(3, 32, 32, dtype=torch.uint8) if wish.blank else data.cifar10(wish.folder)
    train, test = _some(*pairs, options)
    images = Images(*train, augment.CIFAR10, crop=4 if options.augment else 0)
    return Task(wish.name, build, images, Images(*test, augment.CIFAR10))


def _imagenet_resnet50(wish: Wish, options: Bottleneck) -> Task:
    train, test = data.imagenet(wish.folder, size=options.size, complete=options.complete)
    build = functools.partial(models.ResNet50, len(train.classes), options.width, options.norm, options.blocks)
    metric = replace(ACCURACY, batch=256)  # so many decoded images fit into memory anywhere
    return Task(wish.name, build, Folder(train, options.train), Folder(test, options.test), metric=metric)


def _wikitext2_lstm(wish: Wish, options: Recurrent) -> Task:
    corpus = data.wikitext2(wish.folder, vocabulary=options.vocabulary)
    sizes = len(corpus.vocabulary), options.embedding, options.hidden, options.layers
    build = functools.partial(models.WordLSTM, *sizes, options.dropout, options.tied, wish.batch)
    train, test = (Text(tokens, options.window) for tokens in (corpus.train[: options.train], corpus.test[: options.test]))
    return Task(wish.name, build, train, test, language.loss, language.STREAMS)


def _text_gpt(wish: Wish, options: Transformer) -> Task:
    shape = models.GPTShape(256, options.context, options.layers, options.heads, options.width, dropout=options.dropout)
    train, test = data.plain_text(wish.folder)
    pairs = [language.windows(text.long(), options.context) for text in (train[: options.train], test[: options.test])]
    return Task(wish.name, functools.partial(models.GPT, shape), pairs[0], pairs[1], language.loss, language.PERPLEXITY)


def _some(train: data.Pair, test: data.Pair, options: Options) -> tuple[data.Pair, data.Pair]:
    (x, y), (u, v) = train, test
    return (x[: options.train], y[: options.train]), (u[: options.test], v[: options.test])


@dataclass(frozen=True)
class _Kind:
    options: Options  # the defaults; another instance of the same class says otherwise
    make: Callable[[Wish, Any], Task]
    embedded: bool = False  # its data come with Gossamer


_TASKS: dict[str, _Kind] = {
    "cifar10/densenet100": _Kind(Dense(), _cifar_densenet),
    "cifar10/resnet20": _Kind(Residual(), _cifar_resnet),
    "cifar10/resnet8": _Kind(Residual(depth=8, width=8, norm="group"), _cifar_resnet),
    "digits/mlp": _Kind(Perceptron(), _digits_mlp, embedded=True),
    "fashion-mnist/cnn": _Kind(Convolutional(), _fashion_cnn),
    "fashion-mnist/mlp": _Kind(Perceptron(hidden=(128, 128)), _fashion_mlp),
    "imagenet/resnet50": _Kind(Bottleneck(), _imagenet_resnet50),
    "text/gpt-nano": _Kind(Transformer(), _text_gpt),
    "wikitext2/lstm": _Kind(Recurrent(), _wikitext2_lstm),
}


def names() -> list[str]:
    return sorted(_TASKS)


def defaults(name: str) -> dict[str, Any]:
    """The options of a task and what they are unless a spec says otherwise."""
    return _TASKS[name].options.model_dump()


def check(name: str, options: Mapping[str, Any] | None = None, folder: str | None = None) -> None:
    """Whether there is such a task with such options; needs no data."""
    _options(name, options)
    if folder is not None and _TASKS[name].embedded:
        raise GossamerError(f"task.data has no effect: {name} comes with its data; leave it out")


def make(
    name: str, folder: Path | None = None, options: Mapping[str, Any] | None = None, batch: int = 1, blank: bool = False
) -> Task:
    """``batch``: samples per replica and step, which a model that carries a state must know. ``blank``: see :class:`Wish`."""
    checked = _options(name, options)
    return _TASKS[name].make(Wish(name, folder, batch, blank), checked)


def _options(name: str, given: Mapping[str, Any] | None) -> Options:
    if name not in _TASKS:
        near = difflib.get_close_matches(name, names(), n=1, cutoff=0.4)
        hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(names())}"
        raise GossamerError(f"task.name: there is no task {name!r}; {hint}")
    default = _TASKS[name].options
    try:
        return type(default).model_validate({**default.model_dump(), **(given or {})})
    except ValidationError as error:
        fault = error.errors()[0]
        key = ".".join(map(str, fault["loc"]))
        known = f"; {name} takes {', '.join(type(default).model_fields)}" if fault["type"] == "extra_forbidden" else ""
        raise GossamerError(f"task.options.{key}: {fault['msg']} (it is {fault['input']!r:.60}){known}") from None
