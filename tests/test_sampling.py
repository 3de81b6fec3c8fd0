"""Who sees which samples."""

import pytest
import torch

from gossamer.data import partitions
from gossamer.data.sampling import sampler
from gossamer.data.sources import Tensors
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
    shards = partitions.dirichlet(LABELS, 20, alpha, seed=3)
    assert sorted(torch.cat(shards).tolist()) == list(range(600))
    assert min(map(len, shards)) >= 1
    kinds = sum(len(LABELS[s].unique()) for s in shards) / 20
    assert kinds < 3.5 if alpha == 0.01 else kinds > 8 if alpha == 100 else True
    made = sampler(f"dirichlet:alpha={alpha}", DATA, 20, 5, seed=3)
    assert made.batch(17)[0].shape == (20, 5)


def test_even_shards():
    assert sorted(map(len, partitions.even(10, 3, 0))) == [3, 3, 4]


@pytest.mark.parametrize(
    ("partition", "message"),
    [
        (
            "random",
            "no partition 'random'; known are classes, dirichlet, dirichlet-equal, file, groups, reshuffled, shards, unequal",
        ),
        ("dirichelt:alpha=1", "did you mean 'dirichlet'"),
        ("shards:n=3", "'shards' has no parameter 'n'; it takes none"),
        ("dirichlet", "'dirichlet' needs 'alpha', as in 'dirichlet:alpha=0.3'"),
        ("dirichlet:alpha=-1", "alpha above 0"),
        ("dirichlet:alpha=x", "alpha='x' is not a number"),
        ("classes:k=0", "at least one label, so k is at least 1"),
        ("classes:k=11", "there are 10 labels, so k is from 1 to 10"),
        ("classes:k=2", "4 replicas with 2 labels each leave some of 10 out; use a larger k"),
        ("groups", "needs one integer group per sample"),
        ("file:path=/nowhere/split.safetensors", "can't be read"),
    ],
)
def test_mistakes(partition, message):
    with pytest.raises(GossamerError, match=message):
        sampler(partition, DATA, 4, 5, 0)
    with pytest.raises(GossamerError, match="one integer label per sample"):
        sampler("dirichlet:alpha=1", (torch.zeros(9, 2), torch.zeros(9, 2)), 4, 1, 0)


def counts(shards):
    return torch.stack([LABELS[shard].bincount(minlength=10) for shard in shards])


@pytest.mark.parametrize("n", [1, 3, 10, 16, 25])
@pytest.mark.parametrize("alpha", [0.1, 1.0, 10.0])
def test_the_literatures_split_is_of_equal_sizes_and_of_unequal_labels(n, alpha):
    shards = partitions.dirichlet_equal(LABELS, n, alpha, seed=2)
    assert sorted(torch.cat(shards).tolist()) == list(range(600))
    assert max(map(len, shards)) - min(map(len, shards)) <= 1
    again = partitions.dirichlet_equal(LABELS, n, alpha, seed=2)
    assert (
        partitions.digest(shards)
        == partitions.digest(again)
        != partitions.digest(partitions.dirichlet_equal(LABELS, n, alpha, 3))
    )
    if n == 10:
        spread = counts(shards).float().std(0).mean()
        assert spread > 8 if alpha == 0.1 else spread < 5 if alpha == 10 else True


@pytest.mark.parametrize(("n", "k"), [(16, 4), (10, 1), (5, 2), (7, 10), (3, 4)])
def test_each_replica_holds_k_labels(n, k):
    shards = partitions.classes(LABELS, n, k, seed=1)
    assert sorted(torch.cat(shards).tolist()) == list(range(600))
    held = counts(shards) > 0
    assert (held.sum(1) == k).all()
    assert held.sum(0).max() - held.sum(0).min() <= 1


def test_sizes_that_differ():
    sizes = sorted(map(len, partitions.unequal(600, 12, 1.0, seed=1)))
    assert sum(sizes) == 600
    assert sizes[0] >= 1
    assert sizes[-1] > 3 * sizes[2]
    assert sampler("unequal", DATA, 12, 5, 0).batch(3)[0].shape == (12, 5)


def test_whole_groups_stay_together():
    groups = torch.arange(600) // 13
    data = Tensors(*DATA, groups=groups)
    made = sampler("groups", data, 6, 5, seed=0)
    assert sorted(torch.cat(list(made.shards)).tolist()) == list(range(600))
    held = [set(groups[shard].tolist()) for shard in made.shards]
    assert sum(map(len, held)) == len(groups.unique())
    assert max(map(len, made.shards)) < 1.3 * min(map(len, made.shards))
    with pytest.raises(GossamerError, match="47 groups do not split over 50 replicas"):
        sampler("groups", data, 50, 2, seed=0)


def test_a_split_is_saved_and_used_again(tmp_path):
    shards, path = partitions.dirichlet(LABELS, 6, 0.3, seed=4), tmp_path / "split.safetensors"
    partitions.save(shards, path)
    made = sampler(f"file:path={path}", DATA, 6, 5, seed=0)
    assert partitions.digest(list(made.shards)) == partitions.digest(shards)
    with pytest.raises(GossamerError, match="is for 6 replicas, and there are 5"):
        sampler(f"file:path={path}", DATA, 5, 5, seed=0)
    with pytest.raises(GossamerError, match="is of other data"):
        sampler(f"file:path={path}", (DATA[0][:500], DATA[1][:500]), 6, 5, seed=0)


def test_damaged_splits_are_refused(tmp_path):
    path = tmp_path / "split.safetensors"
    partitions.save(partitions.even(60, 6, 0), path)
    good = path.read_bytes()
    rng = torch.Generator().manual_seed(0)
    loaded = 0
    for _ in range(200):
        at = int(torch.randint(len(good), (1,), generator=rng))
        path.write_bytes(good[:at] + bytes([good[at] ^ 1 << int(torch.randint(8, (1,), generator=rng))]) + good[at + 1 :])
        try:
            shards = partitions.load(path, 60, 6)
        except GossamerError:
            continue
        loaded += 1  # a bit that means nothing, such as a date in the archive
        assert partitions.digest(shards) == partitions.digest(partitions.even(60, 6, 0))
    assert loaded < 150
