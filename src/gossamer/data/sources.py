"""Where samples come from. A Source gives samples by number: tensors in memory, a long text, or files that are read as needed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Union

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    TensorDataset,
    default_collate,
)

from gossamer.data import seeds
from gossamer.errors import GossamerError

Batch = tuple[Tensor, ...]
Loss = Callable[..., Tensor]  # loss(model, *batch of one replica) -> a scalar
Data = Union["Source", "Dataset[Any]", "DataLoader[Any]", Tensor, np.ndarray, Sequence[Tensor | np.ndarray]]


@dataclass(frozen=True)
class Draw:
    """All that a random augmentation may depend on (with the replica, which is ``first`` + row). So it is the same however the
    replicas are spread over processes, and after a resume."""

    seed: int
    step: int
    first: int


class Source(ABC):
    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def take(self, index: Tensor) -> Batch:
        """``[*index.shape, …]`` of each tensor, as they are: for evaluation."""

    def draw(self, index: Tensor, draw: Draw) -> Batch:
        """The same for training, where ``index`` is ``[replicas, batch]``: augmented, if the source does that."""
        return self.take(index)

    @abstractmethod
    def to(self, device: torch.device) -> Source: ...

    @abstractmethod
    def describe(self) -> list[list[int]]:
        """The shapes that tell this data from other data of the same name."""

    @property
    def labels(self) -> Tensor | None:
        """One integer per sample, if there is such a thing."""
        return None

    @property
    def classes(self) -> Tensor | None:
        """The labels, on the CPU, if they can be counted: integers from 0 on."""
        labels = self.labels
        return None if labels is None or labels.dtype == torch.bool or int(labels.min()) < 0 else labels.cpu()

    @property
    def groups(self) -> Tensor | None:
        """One integer per sample, the same for those that belong together (by one writer, of one file), if there is such a thing."""
        return None

    def parts(self, size: int, most: int | None = None) -> Iterator[Batch]:
        """The first ``most`` samples in order, ``size`` at a time."""
        for index in torch.arange(min(len(self), most or len(self))).split(size):
            yield self.take(index)


class Tensors(Source):
    """Samples along the first dimension of each tensor; the last tensor holds the labels. ``groups``: see :class:`Source`."""

    def __init__(self, *tensors: Tensor, groups: Tensor | None = None) -> None:
        if not tensors:
            raise GossamerError("a data set needs at least one tensor")
        if len({len(tensor) for tensor in tensors}) > 1:
            raise GossamerError(f"the tensors of a data set have {[len(t) for t in tensors]} samples; they must agree")
        if groups is not None and len(groups) != len(tensors[0]):
            raise GossamerError(f"groups are of {len(groups)} samples, and there are {len(tensors[0])}")
        self.tensors, self._groups = tensors, groups

    def __len__(self) -> int:
        return len(self.tensors[0])

    def take(self, index: Tensor) -> Batch:
        index = index.to(self.tensors[0].device)
        return tuple(tensor[index] for tensor in self.tensors)

    def to(self, device: torch.device) -> Tensors:
        return Tensors(*(tensor.to(device) for tensor in self.tensors), groups=self._groups)

    @property
    def groups(self) -> Tensor | None:
        return self._groups

    def describe(self) -> list[list[int]]:
        return [list(tensor.shape) for tensor in self.tensors]

    @property
    def labels(self) -> Tensor | None:
        last = self.tensors[-1]
        return last if last.ndim == 1 and not last.is_floating_point() else None


class Text(Source):
    """A long row of tokens. Sample i is the window that starts at token i, and the same window one token later: what is to be
    predicted. See ``sampling.Streams`` for the order in which windows are read."""

    def __init__(self, tokens: Tensor, window: int) -> None:
        if window < 1 or len(tokens) <= window:
            raise GossamerError(f"a text of {len(tokens)} tokens has no window of {window} tokens with one more to predict")
        self.tokens, self.window = tokens, window
        self._ahead = torch.arange(window, device=tokens.device)

    def __len__(self) -> int:
        return len(self.tokens) - self.window

    def take(self, index: Tensor) -> Batch:
        return self._windows(index, self.window)

    def parts(self, size: int, most: int | None = None) -> Iterator[Batch]:
        """``size`` streams side by side, read window by window to their end: a recurrent model may carry its state over."""
        predictions = min(len(self.tokens) - 1, most or len(self.tokens))
        streams = min(size, max(1, predictions // self.window))
        length = predictions // streams
        starts = torch.arange(streams) * length
        for place in range(0, length, self.window):
            yield self._windows(starts + place, min(self.window, length - place))

    def _windows(self, index: Tensor, window: int) -> Batch:
        places = index.to(self.tokens.device).unsqueeze(-1) + self._ahead[:window]
        return self.tokens[places], self.tokens[places + 1]

    def to(self, device: torch.device) -> Text:
        return Text(self.tokens.to(device), self.window)

    def describe(self) -> list[list[int]]:
        return [[len(self.tokens), self.window]]


class Subset(Source):
    """The samples with these numbers."""

    def __init__(self, whole: Source, index: Tensor) -> None:
        self.whole, self.index = whole, index

    def __len__(self) -> int:
        return len(self.index)

    def take(self, index: Tensor) -> Batch:
        return self.whole.take(self.index[index.cpu()])

    def draw(self, index: Tensor, draw: Draw) -> Batch:
        return self.whole.draw(self.index[index.cpu()], draw)

    def to(self, device: torch.device) -> Subset:
        return Subset(self.whole.to(device), self.index)

    def describe(self) -> list[list[int]]:
        return [*self.whole.describe(), [len(self)]]

    @property
    def labels(self) -> Tensor | None:
        return _of(self.whole.labels, self.index)

    @property
    def groups(self) -> Tensor | None:
        return _of(self.whole.groups, self.index)


def _of(values: Tensor | None, index: Tensor) -> Tensor | None:
    return None if values is None else values[index.to(values.device)]


def held_out(data: Data, share: float) -> tuple[Source, Source]:
    """The data without a share of them, and that share: the same in each call. Of a text it is the end."""
    whole = source(data)
    count = round(share * len(whole))
    if not 0 < count < len(whole):
        raise GossamerError(
            f"validation={share:g} of {len(whole)} training samples are {count}; at least one must be on each side"
        )
    if isinstance(whole, Text):
        cut = len(whole.tokens) - round(share * len(whole.tokens))
        return Text(whole.tokens[:cut], whole.window), Text(whole.tokens[cut:], whole.window)
    order = torch.randperm(len(whole), generator=seeds.generator(0, -10))
    return Subset(whole, order[count:].sort().values), Subset(whole, order[:count].sort().values)


class Items(Source):
    """A torch Dataset with samples by number, each a tuple. In training torch's random numbers, which its transforms may draw, depend on
    step and replica alone; those of ``random`` and numpy do not. ``collate``: samples to a batch."""

    def __init__(
        self, dataset: Any, collate: Callable[[list], Any] = default_collate, device: torch.device | None = None
    ) -> None:
        self.dataset, self._collate, self._device = dataset, collate, device
        if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
            raise GossamerError(
                f"{type(dataset).__name__} gives samples in an order of its own, and replicas take them by number; make a Dataset with "
                "__getitem__ and __len__, or a tuple of tensors"
            )

    @classmethod
    def of(cls, loader: DataLoader) -> Items:
        """Its dataset and its collate_fn. Batches are drawn by the Trainer: their size is the replicas' own, and so is their order."""
        if not isinstance(loader.sampler, (RandomSampler, SequentialSampler, DistributedSampler)):
            raise GossamerError(
                f"a DataLoader with a {type(loader.sampler).__name__}: replicas draw samples in an order of their own (task.partition); "
                "give its dataset, and weights in the loss if some samples are to count more"
            )
        return cls(loader.dataset, loader.collate_fn or default_collate)

    def __len__(self) -> int:
        return len(self.dataset)

    def take(self, index: Tensor) -> Batch:
        return self._batch([self.dataset[i] for i in index.flatten().tolist()], index)

    def draw(self, index: Tensor, draw: Draw) -> Batch:
        samples: list[Any] = []
        with torch.random.fork_rng(devices=[]):
            for k, row in enumerate(index.tolist()):
                torch.default_generator.manual_seed(seeds.derive(draw.seed, draw.step, draw.first + k, -11))
                samples += [self.dataset[i] for i in row]
        return self._batch(samples, index)

    def _batch(self, samples: list[Any], index: Tensor) -> Batch:
        batch = self._collate(samples)
        if not isinstance(batch, (list, tuple)) or not all(isinstance(t, Tensor) and len(t) == len(samples) for t in batch):
            shown = ", ".join(type(t).__name__ for t in batch) if isinstance(batch, (list, tuple)) else type(batch).__name__
            raise GossamerError(
                f"{type(self.dataset).__name__} gives {shown}; a sample is a tuple of tensors or numbers, such as (input, label)"
            )
        return tuple(t.reshape(*index.shape, *t.shape[1:]).to(self._device) for t in batch)

    def to(self, device: torch.device) -> Items:
        return Items(self.dataset, self._collate, device)

    def describe(self) -> list[list[int]]:
        return [[len(self), *tensor.shape[1:]] for tensor in self.take(torch.zeros(1, dtype=torch.long))]

    @property
    def labels(self) -> Tensor | None:
        """What torchvision's data sets call ``targets``."""
        values = _targets(self.dataset)
        found = torch.as_tensor(values) if values is not None else None
        return found if found is not None and found.ndim == 1 and not found.is_floating_point() else None


def _targets(dataset: Any) -> Any:
    if isinstance(dataset, torch.utils.data.Subset):
        whole = _targets(dataset.dataset)
        return None if whole is None else torch.as_tensor(whole)[torch.as_tensor(dataset.indices)]
    return getattr(dataset, "targets", None)


def source(data: Data) -> Source:
    """A tuple of tensors is the usual case."""
    if isinstance(data, Source):
        return data
    if isinstance(data, TensorDataset):
        return Tensors(*data.tensors)
    if isinstance(data, DataLoader):
        return Items.of(data)
    if isinstance(data, Dataset):
        return Items(data)
    columns = (data,) if isinstance(data, (Tensor, np.ndarray)) else tuple(data)
    return Tensors(*map(_tensor, columns))


def _tensor(column: Any) -> Tensor:
    """numpy's own float is float64 and a model's is float32; numpy has int32 where torch's losses want int64."""
    if not isinstance(column, np.ndarray):
        return column
    tensor = torch.from_numpy(np.ascontiguousarray(column))
    if tensor.dtype == torch.float64:
        return tensor.to(torch.get_default_dtype())
    return tensor.long() if tensor.dtype in (torch.int16, torch.int32) else tensor
