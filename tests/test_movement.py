"""Means in few bits: the code of a row, and means of how far rows have moved."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from gossamer import GossamerError, graphs
from gossamer.graphs.rounds import Mean
from gossamer.rows import codec, movement
from gossamer.rows.block import Block
from gossamer.rows.movement import Movement, mean_of_codes
from gossamer.rows.vector import Parameters
from gossamer.transport.mixer import Mixer


def through(row, turn=0):
    coded = torch.empty(codec.width(len(row)), dtype=torch.uint8)
    codec.encode(row, coded, turn)
    out = torch.empty_like(row)
    codec.decode(coded, out)
    return out


def draw(seed, *shape, scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    return scale * torch.randn(*shape, generator=generator) * 10 ** torch.empty(shape).uniform_(-6, 0, generator=generator)


# --- The code of a row -------------------------------------------------------------------------------------------------------------


@given(st.integers(1, 300), st.integers(0, 1000), st.sampled_from([1e-42, 1e-30, 1e-3, 1.0, 1e20]))
def test_the_code_is_what_the_reference_says(columns, seed, scale):
    row, turn = draw(seed, columns, scale=scale), codec.turn(seed, seed % 7)
    expected = codec.reference(row, turn)
    assert torch.equal(through(row, turn), expected)
    out = torch.empty_like(row)
    codec.rounded(row, out, turn)
    assert torch.equal(out, expected)
    for some, coded in zip(row.split(codec.SPAN), expected.split(codec.SPAN), strict=True):
        assert (some - coded).abs().max() <= max(float(some.abs().max()) / 64, 2.0**-119)


def test_long_rows_go_in_pieces():
    row = draw(1, 3 * 65536 + 777)
    out = torch.empty_like(row)
    codec.rounded(row, out, codec.turn(5, 2))
    expected = codec.reference(row, codec.turn(5, 2))
    assert torch.equal(through(row, codec.turn(5, 2)), expected)
    assert torch.equal(out, expected)


@given(st.integers(0, 10**6))
def test_whole_units_are_not_rounded(step):
    row = torch.arange(-127.0, 128.0) / 64
    assert torch.equal(through(row, codec.turn(step, 1)), row)


@settings(deadline=None, max_examples=20)
@given(st.integers(0, 100), st.integers(0, 10**6))
def test_errors_are_0_on_the_average(seed, step):
    """Over steps, and over replicas: what is far below a unit gets through all the same, and more evenly than by chance."""
    row, many = draw(seed, 64), 512
    unit = float(row.abs().max()) / 64  # or half of it
    inside = row.abs() < 0.99 * row.abs().max()  # the largest may be cut off
    for turns in ([codec.turn(step + k, 3) for k in range(many)], [codec.turn(step, k) for k in range(many)]):
        mean = torch.stack([through(row, turn) for turn in turns]).double().mean(0)
        assert ((mean - row).abs()[inside] <= 12 * unit / many).all()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_stays_so(bad):
    row = torch.ones(200)
    row[70] = bad
    out = through(row)
    assert not out[64:128].isfinite().any()
    assert torch.equal(out[:64], row[:64])
    assert torch.equal(out[128:], row[128:])


# --- Movements ----------------------------------------------------------------------------------------------------------------------


@given(st.integers(1, 9), st.integers(1, 200), st.integers(0, 100))
def test_the_mean_movement_is_what_the_reference_says(n, columns, seed):
    mean = draw(seed, columns, scale=10)
    rows = mean + draw(seed + 1, n, columns, scale=0.1)
    here = Movement(mean, 3)
    expected = movement.reference(rows, mean, 5)
    moved = here.mixed(rows, 5)
    assert torch.equal(here.arrive(moved, 5), expected)
    assert (here.step, here.steps) == (5, 2)
    # And by codes, cut anywhere between spans.
    codes = torch.empty(n, codec.width(columns), dtype=torch.uint8)
    for k in range(n):
        Movement(mean, 3).encode(rows[k : k + 1], codes[k : k + 1], 5, k)
    parts = []
    for k, some in enumerate(codes.split(2 * codec.UNIT, dim=1)):
        out = torch.empty(some.shape[1], dtype=torch.uint8)
        mean_of_codes(some, n, out, 5, 2 * k)
        parts.append(out)
    back = torch.empty(columns)
    codec.decode(torch.cat(parts), back)
    assert torch.equal(back, moved)


def average(mixer, round_, step, block):
    x = Parameters([block], in_place=False)
    mixer.start(round_, step, x).into(x)


def test_a_mean_in_few_bits_is_near_the_mean_and_the_same_for_all():
    x = draw(0, 1, 1000, scale=5).expand(6, -1)
    block = Block([("x", nn.Parameter(x[0]), False)], 6, x.device)
    mixer, mean_of_all, rows_of_block = Mixer(6), Mean(6, 8), Parameters([block], in_place=False)
    assert mixer.cost(mean_of_all, rows_of_block) == Mean(6).cost(4000)  # no mean is known yet
    for step in range(4):
        rows = x[:1] + 0.01 * draw(step, 6, 1000)
        block.x.zero_()
        block.x[:, :1000] = rows
        average(mixer, mean_of_all, step, block)
        assert (block.x == block.x[:1]).all()
        off = (block.x[0, :1000] - rows.mean(0)).abs().max() / (rows - x[:1]).abs().max()
        assert off < (1e-3 if step == 0 else 0.03)
        x = block.x[:, :1000].clone()
    assert mixer.cost(mean_of_all, rows_of_block) == pytest.approx(Mean(6).cost(4000) * 65 / 256, abs=1)
    assert mixer.moved(0, 3) is None  # in one step: everybody's momentum says the same
    block.x += 1
    average(mixer, mean_of_all, 8, block)
    assert torch.allclose(mixer.moved(0, 8)[:1000], torch.tensor(1 / 5), rtol=0.02)
    again = Mixer(6)
    again.load_state_dict([block], mixer.state_dict([block]))
    mean, y = block.x[0].clone(), block.x + draw(9, 6, block.x.shape[1])
    for one in (mixer, again):
        block.x.copy_(y)
        average(one, mean_of_all, 9, block)
        assert torch.equal(block.x[0], movement.reference(y, mean, 9))


@pytest.mark.parametrize("jump", [float("nan"), float("inf"), 1e6, -300.0])
def test_nobody_takes_a_mean_that_has_jumped(jump):
    """Somebody's parameters are not finite, or all have loaded others: the next mean is in full precision."""
    block = Block([("x", nn.Parameter(torch.zeros(100)), False)], 4, torch.device("cpu"))
    mixer, cost = Mixer(4), lambda: mixer.cost(Mean(4, 8), Parameters([block], in_place=False))

    def step(t, change):
        block.x += change
        rows = block.x.clone()
        average(mixer, Mean(4, 8), t, block)
        return rows

    for t in range(4):
        step(t, draw(t, 4, block.x.shape[1]))
    rows = step(4, jump)
    assert torch.equal(block.x.nan_to_num(), rows.nan_to_num())
    assert cost() == Mean(4).cost(400)
    block.x.copy_(draw(7, 1, block.x.shape[1]).expand_as(block.x))  # good ones are loaded
    rows = step(5, draw(8, 4, block.x.shape[1]))
    assert torch.allclose(block.x, rows.mean(0).expand_as(rows), atol=1e-6)
    rows = step(6, 0.01 * draw(9, 4, block.x.shape[1]))
    assert torch.allclose(block.x, rows.mean(0).expand_as(rows), atol=1e-3)
    assert cost() < 0.3 * Mean(4).cost(400)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_bytes_in_few_bits_do_not_depend_on_the_precision(dtype):
    block = Block([("x", nn.Parameter(torch.zeros(6400, dtype=dtype)), False)], 4, torch.device("cpu"))
    mixer, x = Mixer(4, wire="bfloat16"), Parameters([block], in_place=False)
    assert mixer.cost(Mean(4, 8), x) == 1.5 * 6400 * dtype.itemsize  # the first one: 2·3/4 rows, in full precision
    average(mixer, Mean(4, 8), 0, block)
    assert mixer.cost(Mean(4, 8), x) == 1.5 * 6500


def test_graphs_with_means_in_few_bits():
    graph = graphs.parse("periodic:every=2,bits=8", 4)
    assert graph.rounds[1] == Mean(4, 8)
    assert graph.cost(1 << 20) == pytest.approx(graphs.parse("periodic:every=2", 4).cost(1 << 20) * 65 / 256, rel=1e-3)
    with pytest.raises(GossamerError, match="bits=4 is not known; means travel in 32 or 8 bits"):
        graphs.parse("periodic:bits=4", 4)


def test_what_all_know_of_other_blocks_is_forgotten():
    """Parameters that were frozen when it was saved are a block of their own now."""
    mixer, block = Mixer(2), Block([("a", nn.Parameter(torch.zeros(5)), False)], 2, torch.device("cpu"))
    other = Block([("b", nn.Parameter(torch.zeros(300)), False)], 2, torch.device("cpu"))
    kept = {"mean": block.x[0].clone(), "step": 3}
    for blocks, state, known in (
        ([block], [kept], 1),
        ([block], [kept, None], 0),
        ([block, other], [kept], 0),
        ([other], [kept], 0),
    ):
        mixer.load_state_dict(blocks, state)
        assert len(mixer._movements) == known
    mixer.load_state_dict([block], [])
    assert not mixer._movements
