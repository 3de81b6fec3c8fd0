"""``export()`` and Hugging Face's ``from_pretrained``."""

import pytest
import torch

import gossamer
from gossamer.checkpoints import averaged

transformers = pytest.importorskip("transformers")


def test_an_exported_model_is_loaded_by_from_pretrained(tmp_path):
    torch.manual_seed(0)
    tiny = transformers.GPT2Config(n_layer=1, n_head=2, n_embd=16, vocab_size=50, n_positions=16)
    model = gossamer.DecentralizedDataParallel(transformers.GPT2LMHeadModel(tiny))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    model.gossip(optimizer)
    x = torch.randint(50, (2, 8))
    for _ in range(3):
        optimizer.zero_grad()
        model(input_ids=x, labels=x).loss.backward()
        optimizer.step()
    model.export(tmp_path / "exported")
    model.save(tmp_path / "checkpoints", background=True)
    model.close()
    again = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "exported")
    assert again.lm_head.weight is again.transformer.wte.weight
    with torch.no_grad():
        assert torch.equal(again.eval()(input_ids=x).logits, model.eval()(input_ids=x).logits)
    for name, t in averaged(tmp_path / "checkpoints").items():
        assert torch.equal(t, again.state_dict()[name]), name
