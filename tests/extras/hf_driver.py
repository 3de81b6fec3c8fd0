"""A worker of test_hugging_face.py: the same training with torch's DDP and with ours, by the Trainer and by Accelerate; prints JSON.

python -m tests.extras.hf_driver FOLDER, under the environment of torchrun.
"""

import json
import logging
import sys
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from torch import nn
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from gossamer.integrations.accelerate import GossamerAccelerator
from gossamer.integrations.transformers import GossamerTrainer

logging.disable(logging.WARNING)
warnings.simplefilter("ignore")


def gpt():
    torch.manual_seed(0)
    return GPT2LMHeadModel(
        GPT2Config(vocab_size=32, n_positions=16, n_embd=16, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)
    )


def texts(n=96):
    generator = torch.Generator().manual_seed(1)
    starts, strides = torch.randint(32, (2, n, 1), generator=generator)
    rows = (starts + (strides % 3 + 1) * torch.arange(16)) % 32
    return [{"input_ids": row, "labels": row} for row in rows]


def spread(model):
    """How far the workers' parameters are apart."""
    row = nn.utils.parameters_to_vector(model.parameters()).detach()
    parts = [torch.empty_like(row) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, row)
    return float((torch.stack(parts) - row).abs().max())


# --- The Trainer ----------------------------------------------------------------------------------------------------------


def arguments(folder, **options):
    return TrainingArguments(
        str(folder),
        use_cpu=True,
        max_steps=8,
        per_device_train_batch_size=8,
        gradient_accumulation_steps=2,
        learning_rate=0.01,
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=3,
        max_grad_norm=0.5,
        logging_steps=1,
        eval_strategy="steps",
        eval_steps=4,
        save_steps=4,
        report_to=[],
        disable_tqdm=True,
        dataloader_pin_memory=False,
        **options,
    )


def history(trainer):
    keys = ("loss", "grad_norm", "eval_loss")
    return [entry[key] for entry in trainer.state.log_history for key in keys if key in entry]


def hugging_face(make, folder, **options):
    """A run, and one that goes on from its middle; how far replicas are apart at the end."""
    whole = make(model=gpt(), args=arguments(folder, **options), train_dataset=texts(), eval_dataset=texts(24))
    whole.train()
    again = make(model=gpt(), args=arguments(folder, **options), train_dataset=texts(), eval_dataset=texts(24))
    again.train(resume_from_checkpoint=f"{folder}/checkpoint-4")
    seen = {"whole": history(whole), "again": history(again)}
    loss = whole.evaluate()["eval_loss"]
    if dist.get_rank() == 0:
        whole.save_model(f"{folder}/final")  # by one worker: after train() all have the same model
    dist.barrier()
    saved = GPT2LMHeadModel.from_pretrained(f"{folder}/final")
    kept = max(float((a - b).abs().max()) for a, b in zip(saved.parameters(), whole.model.parameters(), strict=True))
    folders = sorted(str(path.relative_to(folder)) for path in Path(folder).rglob("replicas"))
    return seen | {"spread": spread(whole.model), "saved": kept, "end": loss, "replicas": folders}


# --- Accelerate -----------------------------------------------------------------------------------------------------------


def accelerated(make, folder, **options):
    AcceleratorState._reset_state()
    accelerator = make(cpu=True, gradient_accumulation_steps=2, **options)
    model = gpt()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    order = torch.Generator()
    loader = DataLoader(texts(), batch_size=8, shuffle=True, generator=order)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 4)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)

    def epoch():
        losses = []
        torch.manual_seed(5)  # dropout
        order.manual_seed(3)
        for batch in loader:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    losses.append(float(accelerator.clip_grad_norm_(model.parameters(), 0.5)))
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            losses.append(float(accelerator.gather(loss.detach()).mean()))
        return losses

    first = epoch()
    accelerator.save_state(folder)
    second = epoch()
    accelerator.load_state(folder)
    again = epoch()
    bare = accelerator.unwrap_model(model)
    return {"whole": first + second, "second": second, "again": again, "spread": spread(bare), "bare": type(bare).__name__}


def main(folder):
    def trainer(graph):
        return lambda **given: GossamerTrainer(graph=graph, **given)

    def accelerator(graph):
        return lambda **given: GossamerAccelerator(graph, **given)

    found = {}
    for name, options in {"float32": {}, "bf16": {"bf16": True}}.items():
        for kind, make in {"ddp": Trainer, "all-reduce": trainer("all-reduce")}.items():
            found[f"trainer {name} {kind}"] = hugging_face(make, f"{folder}/trainer-{name}-{kind}", **options)
    found["trainer float32 gossip"] = hugging_face(trainer("one-peer-exponential"), f"{folder}/trainer-gossip")
    for name, options in {"float32": {}, "bf16": {"mixed_precision": "bf16"}}.items():
        for kind, make in {"ddp": Accelerator, "all-reduce": accelerator("all-reduce")}.items():
            found[f"accelerate {name} {kind}"] = accelerated(make, f"{folder}/accelerate-{name}-{kind}", **options)
    found["accelerate float32 gossip"] = accelerated(accelerator("one-peer-exponential"), f"{folder}/accelerate-gossip")
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
