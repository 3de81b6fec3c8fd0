"""The data set that comes with scikit-learn: no file, no download."""

from __future__ import annotations

import torch

from gossamer.apps.data.files import Pair


def digits() -> tuple[Pair, Pair]:
    """1,797 handwritten digits of 8×8 pixels, scaled to 0…1; the last fifth of a fixed shuffle is the test set."""
    from sklearn.datasets import load_digits  # here, because it is slow to import

    raw = load_digits()
    order = torch.randperm(len(raw.target), generator=torch.Generator().manual_seed(0))
    x = torch.from_numpy(raw.images).float()[order] / 16
    y = torch.from_numpy(raw.target).long()[order]
    cut = len(y) * 4 // 5
    return (x[:cut], y[:cut]), (x[cut:], y[cut:])
