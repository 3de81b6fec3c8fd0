"""Lightning: GossamerStrategy against strategy="ddp", with the real Trainer."""

import pytest

from tests.extras.launch import findings

CASES = ("plain", "accumulated and clipped", "clipped by value", "bf16", "manual", "two optimizers")


@pytest.fixture(scope="module", params=[4, 2])  # two go on where four were
def found(request, tmp_path_factory):
    folder = tmp_path_factory.getbasetemp() / "lightning" / str(request.param)
    folder.mkdir(parents=True)
    return findings(request.param, "lightning_driver", folder)


def test_all_reduce_is_ddp(found):
    for worker in found:
        for case in CASES:
            losses = worker[case]
            assert len(losses["ddp"]) >= 8
            assert losses["all-reduce"] == pytest.approx(losses["ddp"], abs=1e-5), case
            assert losses["spread"] == 0, case
    assert found[0]["plain"]["ddp"] != found[1]["plain"]["ddp"], "each worker has its own data"


def test_the_module_is_itself_again(found):
    assert found[0]["plain"]["checkpoint"] == ["net.0.weight", "net.0.bias", "net.2.weight", "net.2.bias"]


def test_all_reduce_goes_on_as_ddp_does(found):
    for worker in found:
        losses, files, spread = worker["resumed all-reduce"]
        assert losses == pytest.approx(worker["resumed ddp"][0], abs=1e-5)
        assert len(losses) == len(worker["plain"]["ddp"])
        assert files == worker["resumed ddp"][1] == ["epoch=1.ckpt", "last.ckpt"]
        assert spread == 0


def test_gossip(found):
    if len(found) == 4:
        return
    first, second = found
    losses, spread, validated = first["straight"]
    assert len(losses) == 16
    assert spread == 0, "after fit() all have the mean"
    assert validated == second["straight"][2], "validation sees the averaged model"
    for worker in found:
        resumed, files, spread = worker["again"]
        assert files == ["epoch=1.ckpt", "epoch=1.ckpt.replicas", "last.ckpt", "last.ckpt.replicas"]
        assert resumed == pytest.approx(worker["straight"][0][len(resumed) :], abs=1e-6)
        assert spread == 0
        assert worker["profiles"] == 1
        assert worker["left over"] == 0
        assert worker["unwrapped"]
        assert len(worker["resized"]) == 4, "it goes on with a checkpoint of four workers"
