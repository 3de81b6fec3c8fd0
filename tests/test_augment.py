"""Crops and flips: the same images whoever computes them, and those of a plain loop."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gossamer.apps import augment
from gossamer.apps.augment import Colours, crop_flip, normalised
from gossamer.errors import GossamerError


def plainly(images, seed, step, first, padding):
    """One image after another, one pixel row after another."""
    out = torch.empty_like(images)
    r, b, _, height, width = images.shape
    for i in range(r):
        choices = augment.draws(seed, step, first + i, 1, b, padding)[0].tolist()
        for k, (down, right, mirrored) in enumerate(choices):
            for y in range(height):
                for x in range(width):
                    a, c = y + down - padding, (width - 1 - x if mirrored else x) + right - padding
                    inside = 0 <= a < height and 0 <= c < width
                    out[i, k, :, y, x] = images[i, k, :, a, c] if inside else 0
    return out


@settings(max_examples=25, deadline=None)
@given(
    st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(1, 3), st.integers(1, 6), st.integers(1, 6)),
    st.integers(0, 5),
    st.integers(0, 2**40),
    st.sampled_from([torch.uint8, torch.float32]),
)
def test_it_is_what_a_plain_loop_makes(shape, padding, seed, dtype):
    images = torch.randint(1, 256, shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    made = crop_flip(images, seed, 3, 5, padding)
    assert made.dtype == dtype
    assert torch.equal(made, plainly(images, seed, 3, 5, padding))


def test_any_split_over_processes_sees_the_same():
    images = torch.randint(0, 256, (12, 5, 3, 8, 8), dtype=torch.uint8)
    whole = crop_flip(images, 7, 11, 0)
    for p in (2, 3, 12):
        r = 12 // p
        assert torch.equal(torch.cat([crop_flip(images[k * r : k * r + r], 7, 11, k * r) for k in range(p)]), whole)
    assert not torch.equal(crop_flip(images, 7, 12, 0), whole)
    assert not torch.equal(crop_flip(images, 8, 11, 0), whole)
    same = images[:1].expand(12, -1, -1, -1, -1)
    assert not torch.equal(crop_flip(same, 7, 11, 0)[0], crop_flip(same, 7, 11, 0)[1])  # replicas draw their own


def test_draws_are_even():
    drawn = augment.draws(0, 0, 0, 50, 500, 4)
    assert drawn.shape == (50, 500, 3)
    for k, top in enumerate((9, 9, 2)):
        counts = drawn[..., k].flatten().bincount(minlength=top)
        assert len(counts) == top
        # 25,000 draws: five standard deviations
        assert (counts - 25_000 / top).abs().max() < 5 * (25_000 / top * (1 - 1 / top)) ** 0.5
    joint = (drawn[..., 0] * 18 + drawn[..., 1] * 2 + drawn[..., 2]).flatten().bincount(minlength=162)
    assert joint.min() > 0  # all 162 of them happen


def test_odd_shapes():
    assert crop_flip(torch.zeros(0, 4, 3, 8, 8), 0, 0, 0).shape == (0, 4, 3, 8, 8)
    assert crop_flip(torch.zeros(2, 0, 3, 8, 8), 0, 0, 0).shape == (2, 0, 3, 8, 8)
    with pytest.raises(GossamerError, match=r"shape \(4, 3, 8, 8\) can't be cropped"):
        crop_flip(torch.zeros(4, 3, 8, 8), 0, 0, 0)


def test_normalised():
    images = torch.randint(0, 256, (2, 3, 3, 4, 5), dtype=torch.uint8)
    colours = Colours((0.1, 0.5, 0.9), (0.2, 0.3, 0.4))
    made = normalised(images, colours)
    for c in range(3):
        expected = (images[:, :, c].numpy().astype(np.float64) / 255 - colours.mean[c]) / colours.std[c]
        assert made[:, :, c].numpy() == pytest.approx(expected, abs=2e-6)
    assert made.dtype == torch.float32
