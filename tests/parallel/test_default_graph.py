"""The graph ``auto``."""

import pytest

from gossamer.parallel.checks import over_hosts
from gossamer.schedules import schedule


@pytest.mark.parametrize(
    ("world", "local", "expected"),
    [
        (16, 4, "alternating-exponential-ring:per_node=4"),
        (4, 2, "alternating-exponential-ring:per_node=2"),
        (12, 4, "one-peer-exponential"),  # three hosts: no power of two
        (4, 4, "one-peer-exponential"),  # one host
        (4, 1, "one-peer-exponential"),
        (7, 2, "one-peer-exponential"),  # hosts of different size
        (1, 1, "one-peer-exponential"),
        (None, None, "one-peer-exponential"),
    ],
)
def test_the_default_graph_goes_by_what_torchrun_says_of_the_hosts(world, local, expected, monkeypatch):
    for key, value in (("WORLD_SIZE", world), ("LOCAL_WORLD_SIZE", local)):
        if value is None:
            monkeypatch.delenv(key, raising=False)
        else:
            monkeypatch.setenv(key, str(value))
    assert over_hosts("auto") == expected
    assert over_hosts("ring") == "ring"
    assert schedule(over_hosts("auto"), world or 1).describe() == expected
