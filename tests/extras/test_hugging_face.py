"""Hugging Face's Trainer and Accelerate, with torch's DDP and with ours."""

import pytest
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from gossamer import DecentralizedDataParallel, GossamerError
from gossamer.integrations.transformers import GossamerTrainer
from tests.extras.launch import findings


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return findings(2, "hf_driver", tmp_path_factory.mktemp("hf"))


@pytest.mark.parametrize("precision", ["float32", "bf16"])
def test_all_reduce_is_ddp(found, precision):
    """Loss, norm of the gradients, loss of the evaluation."""
    for worker in found:
        ddp, ours = (worker[f"trainer {precision} {kind}"] for kind in ("ddp", "all-reduce"))
        assert len(ddp["whole"]) == 8 + 8 + 2
        assert ours["whole"] == pytest.approx(ddp["whole"], abs=1e-5)
        assert ours["again"] == pytest.approx(ddp["again"], abs=1e-5)
        assert ours["end"] == pytest.approx(ddp["end"], abs=1e-5)
        assert ours["spread"] == ours["saved"] == 0
        assert ours["replicas"] == []
        ddp, ours = (worker[f"accelerate {precision} {kind}"] for kind in ("ddp", "all-reduce"))
        assert ours["whole"] == pytest.approx(ddp["whole"], abs=1e-5)
        assert ours["again"] == pytest.approx(ours["second"], abs=1e-6), "it goes on exactly"
        assert ours["again"] == pytest.approx(ddp["again"], abs=1e-5)
        assert ours["spread"] == 0
        assert ours["bare"] == "GPT2LMHeadModel"


def test_gossip(found):
    for worker in found:
        trained = worker["trainer float32 gossip"]
        assert trained["whole"] != worker["trainer float32 all-reduce"]["whole"]
        resumed = slice(9, None)  # what came before is in the checkpoint, as rank 0 had it
        assert trained["again"][resumed] == pytest.approx(trained["whole"][resumed], abs=1e-6), "it goes on exactly"
        assert trained["spread"] == trained["saved"] == 0, "after train() all have the mean"
        assert trained["end"] == found[0]["trainer float32 gossip"]["end"]
        assert trained["replicas"] == ["checkpoint-4/replicas", "checkpoint-8/replicas"]
        accelerated = worker["accelerate float32 gossip"]
        assert accelerated["again"] == pytest.approx(accelerated["second"], abs=1e-6), "it goes on exactly"
        assert accelerated["spread"] > 0


@pytest.mark.parametrize(
    ("trainer", "advice"),
    [
        (Trainer, "was given a DecentralizedDataParallel; give the bare model to .*GossamerTrainer"),
        (GossamerTrainer, "wraps the model itself; give it the bare model"),
    ],
)
def test_a_wrapped_model_is_refused_with_advice(trainer, advice, tmp_path):
    model = DecentralizedDataParallel(
        GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=16, vocab_size=50, n_positions=16))
    )
    with pytest.raises(GossamerError, match=advice):
        trainer(model=model, args=TrainingArguments(str(tmp_path), use_cpu=True, report_to=[]))
    model.close()
