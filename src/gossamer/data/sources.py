"""Where samples come from. A Source gives samples by number: tensors in memory, a long text, or files that are read as needed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from gossamer.data import seeds
from gossamer.errors import GossamerError

Batch = tuple[Tensor, ...]
Loss = Callable[..., Tensor]  # loss(model, *batch of one replica) -> a scalar


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


def held_out(data: Source | Batch, share: float) -> tuple[Source, Source]:
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


def source(data: Source | Batch) -> Source:
    """A tuple of tensors is the usual case."""
    return data if isinstance(data, Source) else Tensors(*data)
