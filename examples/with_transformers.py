"""A tiny GPT-2 that learns to count, with Hugging Face's Trainer: torchrun --nproc-per-node 2 examples/with_transformers.py FOLDER"""

import sys

import torch
from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments

from gossamer.integrations.transformers import GossamerTrainer


def counting(rows: int, seed: int) -> list[dict[str, torch.Tensor]]:
    starts = torch.randint(32, (rows, 1), generator=torch.Generator().manual_seed(seed))
    return [{"input_ids": row, "labels": row} for row in (starts + torch.arange(16)) % 32]


def main() -> None:
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=32, n_positions=16, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)
    trainer = GossamerTrainer(
        graph="one-peer-exponential",  # this line, and the class, were Trainer(
        model=GPT2LMHeadModel(config),
        args=TrainingArguments(
            sys.argv[1],
            use_cpu=True,
            num_train_epochs=3,
            per_device_train_batch_size=8,
            learning_rate=1e-2,
            eval_strategy="epoch",
            report_to=[],
            disable_tqdm=True,
            dataloader_pin_memory=False,
        ),
        train_dataset=counting(512, 0),
        eval_dataset=counting(64, 1),
    )
    trainer.train()
    loss = trainer.evaluate()["eval_loss"]
    trainer.save_model()
    if trainer.is_world_process_zero():
        print(f"loss {loss:.3f}")


if __name__ == "__main__":
    main()
