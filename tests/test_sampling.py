"""Who sees which samples."""

import pytest
import torch

from gossamer.data.sampling import dirichlet_shards, even_shards, sampler
from gossamer.errors import GossamerError

LABELS = torch.arange(600) % 10
DATA = (torch.arange(600), LABELS)


def test_shards_are_fixed_and_cover_everything():
    made = sampler("shards", DATA, 7, 5, seed=1)
    seen = [set() for _ in range(7)]
    for t in range(3 * made.steps_per_epoch):
        for i, row in enumerate(made.batch(t)[0].tolist()):
            seen[i] |= set(row)
    assert set().union(*seen) == set(range(600))
    assert sum(map(len, seen)) == 600  # nobody sees another's samples
    again = sampler("shards", DATA, 7, 5, seed=1)
    assert torch.equal(made.batch(20)[0], again.batch(20)[0])
    assert torch.equal(made.batch(20, first=2, rows=3)[0], made.batch(20)[0][2:5])
    assert not torch.equal(made.batch(20)[0], sampler("shards", DATA, 7, 5, seed=2).batch(20)[0])


def test_each_time_round_a_shard_is_in_a_new_order_and_complete():
    made = sampler("shards", DATA, 6, 10, seed=0)  # 100 samples each, 10 steps an epoch
    first, second = (torch.cat([made.batch(t)[0][3] for t in range(e * 10, e * 10 + 10)]) for e in (0, 1))
    assert sorted(first.tolist()) == sorted(second.tolist()) == sorted(made.shards[3].tolist())
    assert not torch.equal(first, second)


@pytest.mark.parametrize("alpha", [0.01, 0.3, 100.0])
def test_dirichlet_splits_everything_and_leaves_nobody_out(alpha):
    shards = dirichlet_shards(LABELS, 20, alpha, seed=3)
    assert sorted(torch.cat(shards).tolist()) == list(range(600))
    assert min(map(len, shards)) >= 1
    kinds = sum(len(LABELS[s].unique()) for s in shards) / 20
    assert kinds < 3.5 if alpha == 0.01 else kinds > 8 if alpha == 100 else True
    made = sampler(f"dirichlet:alpha={alpha}", DATA, 20, 5, seed=3)
    assert made.batch(17)[0].shape == (20, 5)


def test_even_shards():
    assert sorted(map(len, even_shards(10, 3, 0))) == [3, 3, 4]


@pytest.mark.parametrize(
    ("partition", "message"),
    [
        ("random", "no partition 'random'; known are dirichlet, reshuffled, shards"),
        ("dirichelt:alpha=1", "did you mean 'dirichlet'"),
        ("shards:n=3", "'shards' has no parameter 'n'; it takes none"),
        ("dirichlet", "'dirichlet' needs 'alpha', as in 'dirichlet:alpha=0.3'"),
        ("dirichlet:alpha=-1", "alpha above 0"),
        ("dirichlet:alpha=x", "alpha='x' is not a number"),
    ],
)
def test_mistakes(partition, message):
    with pytest.raises(GossamerError, match=message):
        sampler(partition, DATA, 4, 5, 0)
    with pytest.raises(GossamerError, match="one integer label per sample"):
        sampler("dirichlet:alpha=1", (torch.zeros(9, 2), torch.zeros(9, 2)), 4, 1, 0)
