"""Schedules: Ada's k over the epochs, and the log of changes."""

import pytest

from gossamer import Ada, Fixed, GossamerError, graphs
from gossamer.schedules import schedule


def ks(ada, epochs):
    return [ada.k(e, epochs) for e in range(epochs)]


def test_ada_falls_linearly_from_complete_to_ring():
    ada = Ada(96)
    assert ada.k(0, 10) == 95
    assert ada.k(8, 10) == 2  # reach = 0.8
    assert ada.k(9, 10) == 2
    assert ks(ada, 10) == sorted(ks(ada, 10), reverse=True)
    assert ks(Ada(96, k0=10, gamma=3), 5) == [10, 7, 4, 2, 2]
    assert ks(Ada(96, k0=10, gamma=0.5, k_min=8), 8) == [10, 10, 9, 9, 8, 8, 8, 8]
    assert ks(Ada(96, k0=32, reach=0.5, k_min=2), 4) == [32, 17, 2, 2]


def test_rounding_does_not_delay_the_last_step():
    for epochs in range(1, 60):
        for n in (5, 8, 48, 96):
            assert Ada(n, reach=1.0).k(epochs, epochs) == 2


def test_changes_are_logged_once_with_a_reason():
    ada = Ada(8)  # k falls by 5/3.2 an epoch
    for step in range(40):
        ada.graph(step, step // 10, 4)
    assert [(c.step, c.epoch, c.graph) for c in ada.changes] == [
        (0, 0, "complete"),
        (10, 1, "lattice:k=6"),
        (20, 2, "lattice:k=4"),
        (30, 3, "lattice:k=3"),
    ]
    assert ada.changes[0].reason == "epoch 0 of 4: k=7"
    again = Ada(8)
    again.load_state_dict(ada.state_dict())
    assert again.changes == ada.changes
    again.graph(40, 3, 4)
    assert again.changes == ada.changes


@pytest.mark.parametrize("n", [1, 2, 3])
def test_tiny_n(n):
    assert Ada(n).graph(0, 0, 5).n == n
    assert Ada(n).graph(0, 4, 5).n == n


def test_what_a_person_may_write():
    assert schedule("ring", 8).describe() == "ring"
    assert schedule(graphs.torus(8), 8).describe() == "torus"
    assert schedule("ada:reach=0.5", 8).describe() == "ada:k0=7,reach=0.5,k_min=2"
    assert schedule("ada:gamma=2,k0=6", 8).describe() == "ada:k0=6,gamma=2.0,k_min=2"
    fixed = Fixed(graphs.ring(8))
    assert schedule(fixed, 8) is fixed
    assert fixed.graph(3) is fixed.fixed
    assert len(fixed.changes) == 1


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Ada(8, gamma=1, reach=0.5), "gamma or reach, not both"),
        (lambda: Ada(8, gamma=-1), "gamma=-1"),
        (lambda: Ada(8, reach=0), "reach=0"),
        (lambda: Ada(8, k_min=1), "k_min=1"),
        (lambda: Ada(8, k_min=20), "k_min=20 is out of range for n=8"),
        (lambda: Ada(8, k0=5.5), "k0=5.5 is not an integer"),
        (lambda: schedule([[0.5, 0.5]], 8), "a list is not a graph"),
        (lambda: Ada(8, k0=9), "k0=9 is out of range for n=8"),
        (lambda: schedule("ada:speed=1", 8), "no parameter 'speed'; it takes k0"),
        (lambda: schedule("ada:reach=fast", 8), "reach='fast'"),
        (lambda: schedule(Ada(9), 8), "for 9 replicas, but there are 8"),
    ],
)
def test_mistakes_are_named(make, message):
    with pytest.raises(GossamerError, match=message):
        make()
