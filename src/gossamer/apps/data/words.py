"""WikiText-2: text split into words, one number per word."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from gossamer.apps.data import catalog
from gossamer.apps.data.files import read_text
from gossamer.errors import GossamerError

EOS, UNKNOWN = "<eos>", "<unk>"
OFFICIAL_COUNTS = {"train": 2_088_628, "valid": 217_646, "test": 245_569}  # words, with one <eos> per line


@dataclass(frozen=True)
class Corpus:
    """Words as numbers: ``vocabulary[train[0]]`` is the first word. int64, one dimension each."""

    vocabulary: tuple[str, ...]
    train: Tensor
    valid: Tensor
    test: Tensor


def wikitext2(
    folder: Path | None = None, counts: Mapping[str, int] | None = OFFICIAL_COUNTS, vocabulary: int | None = None
) -> Corpus:
    """From ``wiki.train.tokens`` and its two siblings, or from ``train.txt``, ``valid.txt`` and ``test.txt`` (any cut).

    The vocabulary is what train has, by first appearance; other words become <unk>. Every line, also an empty one, ends with <eos>.
    ``vocabulary``: of those the so many most frequent ones only (of equals the first), and <unk>.
    ``counts``: how many words the official files must have (None: any number); the other names are for cuts and are not counted.
    """
    found = catalog.WIKITEXT2.need(folder)
    official = found.suffix == ".tokens"
    parts = {split: found.parent / (f"wiki.{split}.tokens" if official else f"{split}.txt") for split in OFFICIAL_COUNTS}
    numbers: dict[str, int] = {}
    texts = {split: _words(path) for split, path in parts.items()}
    for split, words in texts.items():
        if official and counts is not None and len(words) != counts[split]:
            size = parts[split].stat().st_size
            raise GossamerError(
                f"{parts[split]} has {len(words)} words and line ends when it ends at offset {size}; {counts[split]} were expected"
            )
    if vocabulary is not None:
        kept = {word for word, _ in Counter(texts["train"]).most_common(vocabulary)} | {UNKNOWN}
        texts = {split: [word if word in kept else UNKNOWN for word in words] for split, words in texts.items()}
    train = array("q", (numbers.setdefault(word, len(numbers)) for word in texts["train"]))
    unknown = numbers.setdefault(UNKNOWN, len(numbers))
    others = [array("q", (numbers.get(word, unknown) for word in texts[split])) for split in ("valid", "test")]
    tensors = [torch.frombuffer(part, dtype=torch.int64) for part in (train, *others)]
    return Corpus(tuple(numbers), *tensors)


def _words(path: Path) -> list[str]:
    text = read_text(path)
    if not text.endswith("\n"):
        raise GossamerError(
            f"{path} ends at offset {path.stat().st_size} in the middle of a line; a whole file ends with a line end"
        )
    lines = text.replace("\r\n", "\n").removesuffix("\n").split("\n")
    first = next((k for k, line in enumerate(lines) if line.strip()), 0)
    title = lines[first].split()
    if len(title) < 3 or title[0] != "=" or title[-1] != "=":
        offset = sum(len(line.encode()) + 1 for line in lines[:first])
        raise GossamerError(
            f"{path} is not a file of WikiText: line {first + 1} at offset {offset} is {lines[first][:40]!r}; "
            "an article's title such as ' = Title = ' was expected"
        )
    return [word for line in lines for word in (*line.split(), EOS)]
