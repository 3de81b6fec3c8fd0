"""The same training as 1×8, 2×4 and 8×1 processes × replicas gives the same parameters."""

import pytest
import safetensors.torch
import torch

from tests.parity_driver import N, every_case
from tests.world import World


def rows(folder, p, pool):
    if p == 1:
        every_case(World(0, 1, folder))
    else:
        pool.check(p, every_case, {}, folder, limit=240)
    parts = [safetensors.torch.load_file(folder / f"rank-{rank}.safetensors") for rank in range(p)]
    return {key: parts[0][key] if key.endswith("|value") else torch.cat([part[key] for part in parts]) for key in parts[0]}


@pytest.fixture(scope="module")
def alone(pool, tmp_path_factory):
    return rows(tmp_path_factory.mktemp("alone"), 1, pool)


@pytest.mark.parametrize("workers", [2, 8])
def test_every_layout_gives_the_same_parameters(alone, workers, pool, tmp_path):
    spread = rows(tmp_path, workers, pool)
    assert spread.keys() == alone.keys()
    for key, one in alone.items():
        many = spread[key]
        assert many.shape == one.shape, key
        if not key.endswith("|value"):
            assert len(one) == N
        exact = key.startswith("double") and not key.endswith("|value")
        worst = float((many.double() - one.double()).abs().max())
        assert worst <= (1e-10 if exact else 1e-5), f"{key}: {worst}"
    assert any((one[0] != one[1]).any() for key, one in alone.items() if "|x" in key)  # the replicas did differ
