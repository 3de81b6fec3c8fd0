"""Plain text at byte level: one token per byte, 256 of them, no vocabulary to build."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from gossamer.apps.data import catalog
from gossamer.apps.data.files import Pair, read_text
from gossamer.errors import GossamerError

VALID_SHARE = 0.1


def plain_text(folder: Path | None = None) -> Pair:
    """(train, valid) as uint8. ``folder``: a UTF-8 file, or a folder whose .txt files are joined in the order of their names.

    ``valid.txt`` is the validation text if it is there, else the last tenth of everything is. ``test.txt`` is left alone.
    """
    found = folder if folder is not None and folder.is_file() else catalog.TEXT.need(folder)
    if found == folder:
        train, valid = [found], None
    else:
        train = [path for path in sorted(found.parent.glob("*.txt")) if path.stem not in ("valid", "test")]
        valid = found.with_name("valid.txt")
        if not train:
            raise GossamerError(f"{found.parent} has no text to train on: only {found.name}; put train.txt beside it")
    text = _joined(train)
    if valid is not None and valid.exists():
        return text, _joined([valid])
    cut = round(len(text) * (1 - VALID_SHARE))
    if not 0 < cut < len(text):
        raise GossamerError(f"{train[0]} has {len(text)} bytes; that is too short to keep a tenth for validation")
    return text[:cut], text[cut:]


def _joined(paths: list[Path]) -> Tensor:
    raw = bytearray()
    for path in paths:
        raw += read_text(path).encode()
    return torch.frombuffer(raw, dtype=torch.uint8)
