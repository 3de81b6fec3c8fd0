"""Mixing: every fast path equals the reference, and the mean of the replicas stays where it is."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gossamer import graphs
from gossamer.errors import GossamerError
from gossamer.graphs.rounds import Groups, Mean, Permutation, Window
from gossamer.rows.block import Block
from gossamer.rows.mixing import mix, reference
from gossamer.rows.vector import Gradients, Parameters
from gossamer.transport.agreed import AgreedMean
from gossamer.transport.mixer import Mixer
from tests.test_graphs import ANY_N, applicable


@given(ANY_N, st.data(), st.integers(0, 2**31), st.integers(1, 130))
@settings(max_examples=150, deadline=None)
def test_every_fast_path_equals_the_reference(n, data, seed, columns):
    graph = graphs.parse(data.draw(st.sampled_from(applicable(n))), n)
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, columns, generator=generator) * 10 ** data.draw(st.integers(-3, 3))
    x += data.draw(st.sampled_from([0.0, 1.0, -5.0])) * x.abs().max()
    before = x.clone()
    for t in range(min(graph.period, 4)):
        out = mix(graph.round(t), x, torch.full_like(x, float("nan")))
        scale = float(x.abs().max())
        torch.testing.assert_close(out, reference(graph.round(t), x), rtol=1e-5, atol=1e-6 * scale)
        torch.testing.assert_close(out.double().mean(0), x.double().mean(0), rtol=1e-6, atol=1e-6 * scale)
    assert torch.equal(x, before)


@pytest.mark.parametrize("k", [2, 3, 10, 126, 500, 998, 1006])
def test_wide_windows_stay_accurate_over_1008_rows(k):
    x = torch.randn(1008, 64, generator=torch.Generator().manual_seed(k)) + 3
    made = graphs.lattice(1008, k=k).round(0)
    torch.testing.assert_close(mix(made, x, torch.empty_like(x)), reference(made, x), rtol=5e-6, atol=0)


def test_a_row_much_larger_than_the_others_disturbs_only_its_neighbours():
    for k, size, tolerance in ((2, 1e6, 1e-6), (4, 1e6, 1e-6), (20, 1e3, 1e-5)):
        x = torch.randn(96, 50) + 3
        x[40] *= size
        made = graphs.lattice(96, k=k).round(0)
        error = (mix(made, x, torch.empty_like(x)) - reference(made, x)).norm(dim=1) / reference(made, x).norm(dim=1)
        assert error.max() < tolerance
    x[40] = float("nan")
    made = graphs.ring(96).round(0)
    assert mix(made, x, torch.empty_like(x)).isnan().any(dim=1).nonzero().flatten().tolist() == [39, 40, 41]


def test_half_precision():
    x = torch.randn(64, 48).bfloat16()
    for name in ("torus", "exponential", "ring", "one-peer-exponential", "complete"):
        made = graphs.parse(name, 64).round(0)
        torch.testing.assert_close(mix(made, x, torch.empty_like(x)), reference(made, x), rtol=0.02, atol=0.02)


@given(st.integers(2, 60), st.data())
@settings(max_examples=60, deadline=None)
def test_any_permutation_and_any_groups(n, data):
    order = data.draw(st.permutations(range(n)))
    cuts = sorted(data.draw(st.sets(st.integers(1, n - 1), max_size=6)))
    groups = tuple(tuple(order[a:b]) for a, b in zip([0, *cuts], [*cuts, n], strict=True))
    x = torch.randn(n, 40, dtype=torch.float64)
    for made in (Permutation(n, tuple(order), data.draw(st.floats(0, 1))), Groups(n, groups)):
        torch.testing.assert_close(mix(made, x, torch.empty_like(x)), reference(made, x), rtol=1e-12, atol=1e-12)


def test_float64_and_strided_rows():
    x = torch.randn(12, 100, dtype=torch.float64)[:, 10:60]
    for name in applicable(12):
        made = graphs.parse(name, 12).round(0)
        out = torch.empty(12, 80, dtype=torch.float64)[:, :50]
        torch.testing.assert_close(mix(made, x, out), reference(made, x), rtol=1e-12, atol=1e-12)


def test_wrong_sizes_are_refused():
    x = torch.zeros(4, 3)
    with pytest.raises(GossamerError, match="for 5 replicas, but X has 4 rows"):
        mix(Mean(5), x, torch.empty_like(x))
    with pytest.raises(GossamerError, match="apart from X"):
        mix(Window(4, 1), x, x)
    with pytest.raises(GossamerError, match="shape"):
        mix(Mean(4), x, torch.empty(4, 2))


def test_mixer_swaps_the_mixed_rows_in():
    block = Block([("w", torch.nn.Parameter(torch.zeros(3)), False)], 4, torch.device("cpu"))
    block.x[:, 0] = torch.arange(4.0)
    mixer, x = Mixer(4), Parameters([block], in_place=False)
    transfer = mixer.start(Mean(4), 0, x)
    assert block.x[:, 0].tolist() == [0, 1, 2, 3]  # x_t is still there until the result is used
    transfer.into(x)
    assert block.x[:, 0].tolist() == [1.5] * 4
    grad = Gradients([block])
    AgreedMean(mixer, [grad]).into(grad)
    assert block.grad.abs().sum() == 0
