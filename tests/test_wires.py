"""Wires: what a row becomes on its way, with the bounds that their table states, by Monte Carlo; and how many bytes it takes."""

import math

import pytest
import torch

from gossamer.rows import codec
from gossamer.rows.wires import DIFFERENCES

COARSE = ["8bits", "4bits", "sign", "top-1%", "top-10%"]
SIZES = [1, 64, 65, 129, 1000]


def travelled(name, row, turn=0):
    wire = DIFFERENCES[name]
    code = torch.empty(wire.width(len(row)), dtype=wire.code)
    wire.encode(row, code, turn)
    assert wire.finite(code)
    out = torch.empty_like(row)
    wire.decode(code, out)
    return out


def rows(columns, count=8):
    """Of several kinds: normal, with few large numbers, all equal, and the worst of a span."""
    generator = torch.Generator().manual_seed(columns)
    for k in range(count):
        row = torch.randn(columns, generator=generator) * 10.0 ** (k % 7 - 3)
        if k % 4 == 1:
            row[:: max(1, columns // 3)] *= 1000
        if k % 4 == 2:
            row.fill_(0.37)
        yield row
    worst = torch.full((columns,), 0.5 / 3.5)  # half of the largest unit of 4 bits, beside one number of 3.5 of them
    worst[0] = 1.0
    yield worst


@pytest.mark.parametrize("columns", SIZES)
@pytest.mark.parametrize("name", ["8bits", "4bits"])
def test_rounding_is_right_on_the_average_and_as_near_as_promised(name, columns):
    bound, span = {"8bits": (1 / 128, 128), "4bits": (64 / 49, 64)}[name]
    steps = 200
    for row in rows(columns):
        made = torch.stack([travelled(name, row, codec.turn(step, 3)) for step in range(steps)])
        error = (made - row).double()
        for lost, some in zip(error.split(span, dim=1), row.double().split(span), strict=True):
            assert lost.square().sum(1).mean() <= bound * some.square().sum() * 1.02 + 1e-30
        units = torch.cat([some.abs().max().expand(len(some)) for some in row.split(span)])
        clipped = 1 / 128 if name == "8bits" else 0.0
        assert (
            error.mean(0).abs() <= units * (clipped + (1 / 64 if name == "8bits" else 1 / 3.5) * 4 / math.sqrt(steps))
        ).all()


def test_the_worst_case_of_four_bits_is_nearly_reached():
    """So the bound is no larger than it has to be."""
    row = torch.full((64,), 0.5 / 3.5)
    row[0] = 1.0001
    made = torch.stack([travelled("4bits", row, codec.turn(step, 0)) for step in range(400)])
    share = float((made - row).square().sum(1).mean() / row.square().sum())
    assert 0.4 < share <= 64 / 49


@pytest.mark.parametrize("columns", SIZES)
def test_signs_leave_what_the_formula_says(columns):
    for row in rows(columns):
        error = (travelled("sign", row) - row).double()
        for at in range(0, columns, 64):
            some = row[at : at + 64].double()
            left = some.square().sum() - some.abs().sum() ** 2 / len(some)
            assert error[at : at + 64].square().sum() <= left + 2e-4 * some.square().sum() + 1e-30
            assert left <= (1 - 1 / len(some)) * some.square().sum() * (1 + 1e-12) + 1e-30


@pytest.mark.parametrize("columns", SIZES)
@pytest.mark.parametrize("name", ["top-1%", "top-10%"])
def test_the_largest_numbers_arrive_and_the_others_are_0(name, columns):
    wire = DIFFERENCES[name]
    count = wire.count(columns)
    assert count == math.ceil(columns * wire.percent / 100)
    for row in rows(columns):
        made = travelled(name, row)
        assert int((made != 0).sum()) <= count
        kept = made != 0
        assert torch.equal(made[kept], row[kept])
        assert (row - made).square().sum() <= (1 - count / columns) * row.square().sum() * (1 + 1e-6)
        assert row[kept].abs().min() >= row[~kept].abs().max() if kept.any() and (~kept).any() else True


@pytest.mark.parametrize("name", COARSE)
def test_a_row_that_is_not_finite_is_noticed(name):
    wire = DIFFERENCES[name]
    for bad in (math.nan, math.inf, -math.inf):
        row = torch.ones(300)
        row[7] = bad
        code = torch.empty(wire.width(300), dtype=wire.code)
        wire.encode(row, code, 0)
        assert not wire.finite(code), (name, bad)


@pytest.mark.parametrize(
    ("name", "share"), [("8bits", 0.2520), ("4bits", 0.1289), ("sign", 0.0391), ("top-1%", 0.02), ("top-10%", 0.2)]
)
def test_bytes_are_those_of_the_code(name, share):
    wire = DIFFERENCES[name]
    columns = 64_000
    assert wire.bytes(columns, torch.float32) == wire.width(columns) * wire.code.itemsize
    assert wire.bytes(columns, torch.float32) / (4 * columns) == pytest.approx(share, abs=1e-4)
    assert wire.share(torch.float32) == pytest.approx(share, abs=1e-4)
    assert DIFFERENCES["bfloat16"].bytes(columns, torch.float32) == 2 * columns
    assert DIFFERENCES["float32"].bytes(columns, torch.float64) == 8 * columns


@pytest.mark.parametrize("name", COARSE)
def test_zeros_stay_zeros_and_double_precision_works(name):
    assert torch.equal(travelled(name, torch.zeros(200)), torch.zeros(200))
    row = torch.randn(200, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    assert travelled(name, row).dtype == torch.float64
