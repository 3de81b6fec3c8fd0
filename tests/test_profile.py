"""Dispersion measures against scipy and numpy, written out independently."""

import numpy as np
import pytest
import scipy.stats
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from gossamer.rows import profile
from gossamer.rows.replicas import Replicas
from gossamer.transport.mixer import Mixer
from tests.models import Cnn, mlp


def by_hand(v):
    mean = np.mean(v)
    if mean == 0 or np.all(v == v[0]):
        return {"gini": 0.0, "iod": 0.0, "cv": 0.0, "qcd": 0.0}
    q1, q3 = np.percentile(v, [25, 75])
    return {
        "gini": np.abs(v[:, None] - v[None, :]).sum() / (2 * len(v) ** 2 * mean),
        "iod": np.var(v) / mean,
        "cv": scipy.stats.variation(v),
        "qcd": (q3 - q1) / (q3 + q1) if q1 + q3 else 0.0,
    }


@given(arrays(np.float64, st.tuples(st.integers(1, 40), st.integers(1, 5)), elements=st.floats(0, 1e6, width=32)))
def test_measures_match_scipy_and_numpy(values):
    got = profile.dispersion(torch.from_numpy(values))
    for column in range(values.shape[1]):
        for name, expected in by_hand(values[:, column]).items():
            assert float(got[name][column]) == pytest.approx(expected, rel=1e-9, abs=1e-9), name


def test_zeros_and_constants_give_zero_not_nan():
    for values in (torch.zeros(7, 2), torch.full((7, 2), 0.1), torch.full((1, 2), 3.0)):
        for measure in profile.dispersion(values).values():
            assert measure.tolist() == [0, 0]


def test_norms_that_are_not_finite_are_no_agreement():
    for bad in (float("inf"), float("nan")):
        for values in ([bad, bad, bad], [1.0, bad, 2.0]):
            assert all(torch.isnan(m).all() for m in profile.dispersion(torch.tensor([values]).T).values())


def test_known_values():
    got = profile.dispersion(torch.tensor([1.0, 2.0, 3.0, 4.0]))
    assert float(got["gini"]) == pytest.approx(0.25)
    assert float(got["iod"]) == pytest.approx(0.5)
    assert float(got["cv"]) == pytest.approx(np.sqrt(1.25) / 2.5)
    assert float(got["qcd"]) == pytest.approx((3.25 - 1.75) / 5)


def test_norms_and_consensus_distance():
    replicas = Replicas(Cnn, 5, init="different")
    norms = profile.norms(replicas)
    modules = []
    for i in range(5):
        with replicas.replica(i) as module:
            modules.append([p.detach().clone() for p in (module.get_parameter(name) for name in replicas.slots)])
    expected = torch.stack([torch.stack([p.norm() for p in row]) for row in modules])
    torch.testing.assert_close(norms, expected)
    flat = torch.stack([torch.cat([p.flatten() for p in row]) for row in modules]).double()
    distance = ((flat - flat.mean(0)) ** 2).sum(1).mean().sqrt()
    assert profile.consensus_distance(replicas, Mixer(5)) == pytest.approx(float(distance), rel=1e-5)


def test_equal_replicas_are_at_distance_exactly_zero():
    assert profile.consensus_distance(Replicas(mlp, 7, seed=1), Mixer(7)) == 0
