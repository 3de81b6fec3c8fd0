"""A trainer in the manner of PyTorch's minGPT-ddp: a class around the loop, a sampler per epoch, a GradScaler, clipping, evaluation after each
epoch, and a snapshot from which it goes on by itself.

torchrun --nproc-per-node 2 FILE --snapshot PATH --epochs 2
"""

import argparse
import os
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler, random_split


@dataclass
class Snapshot:
    model: dict
    optimizer: dict
    epochs: int


class Characters(Dataset):
    def __init__(self, length=24):
        text = Path(os.__file__).read_text()[:12_000]
        self.symbols, self.length = sorted(set(text)), length
        self.codes = torch.tensor([self.symbols.index(c) for c in text])

    def __len__(self):
        return (len(self.codes) - 1) // self.length

    def __getitem__(self, k):
        start = k * self.length
        return self.codes[start : start + self.length], self.codes[start + 1 : start + 1 + self.length]


class Net(nn.Module):
    def __init__(self, symbols, width=32):
        super().__init__()
        self.embed, self.rnn, self.head = (
            nn.Embedding(symbols, width),
            nn.GRU(width, width, batch_first=True),
            nn.Linear(width, symbols),
        )
        self.drop = nn.Dropout(0.1)

    def forward(self, x, y=None):
        scores = self.head(self.drop(self.rnn(self.embed(x))[0]))
        return scores, None if y is None else F.cross_entropy(scores.flatten(0, 1), y.flatten())


def grouped(model, decay):
    """Weights decay, all else does not: by the names of modules and parameters, as minGPT does."""
    parameters = dict(model.named_parameters())
    decays = set()
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            decays.add(f"{name}.weight" if name else "weight")
    assert decays <= parameters.keys(), f"{decays} are not in {list(parameters)}"
    return [
        {"params": [p for name, p in parameters.items() if name in decays], "weight_decay": decay},
        {"params": [p for name, p in parameters.items() if name not in decays], "weight_decay": 0.0},
    ]


class Trainer:
    def __init__(self, args, model, optimizer, train, test):
        self.args, self.optimizer = args, optimizer
        self.local_rank, self.rank = int(os.environ["LOCAL_RANK"]), int(os.environ["RANK"])
        self.train_loader, self.test_loader = (self.loader(part) for part in (train, test))
        self.done, self.model = 0, model
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10) if args.amp else None
        if args.snapshot.exists():
            kept = Snapshot(**torch.load(args.snapshot, weights_only=True))
            self.model.load_state_dict(kept.model)
            self.optimizer.load_state_dict(kept.optimizer)
            self.done = kept.epochs
            print(f"goes on after {self.done} epochs")
        self.model = DDP(self.model)

    def loader(self, part):
        return DataLoader(part, batch_size=16, shuffle=False, sampler=DistributedSampler(part))

    def batch(self, x, y, train):
        with torch.set_grad_enabled(train), torch.amp.autocast("cpu", torch.float16, enabled=self.args.amp):
            _, loss = self.model(x, y)
        if train:
            self.optimizer.zero_grad(set_to_none=True)
            if self.args.amp:
                self.scaler.scale(loss).backward()
                self.scaler.unscale_(self.optimizer)
                torch.nn.utils.clip_grad_norm_(self.model.parameters(), 0.2)
                self.scaler.step(self.optimizer)
                self.scaler.update()
            else:
                loss.backward()
                torch.nn.utils.clip_grad_norm_(self.model.parameters(), 0.2)
                self.optimizer.step()
        return loss.item()

    def epoch(self, epoch, loader, train):
        loader.sampler.set_epoch(epoch)
        for step, (x, y) in enumerate(loader):
            loss = self.batch(x, y, train)
            if step % 2 == 0:
                print(f"rank {self.rank} epoch {epoch} {'train' if train else 'eval'} step {step} loss {loss:.7f}")

    def save(self, epoch):
        model = self.model.module if hasattr(self.model, "module") else self.model
        torch.save(asdict(Snapshot(model.state_dict(), self.optimizer.state_dict(), epoch)), self.args.snapshot)

    def train(self):
        for epoch in range(self.done, self.args.epochs):
            self.epoch(epoch, self.train_loader, True)
            if self.local_rank == 0:
                self.save(epoch + 1)
            self.epoch(epoch, self.test_loader, False)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--snapshot", type=Path, required=True)
    parser.add_argument("--epochs", type=int, required=True)
    parser.add_argument("--amp", action="store_true")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    data = Characters()
    train, test = random_split(data, [0.8, 0.2])
    model = Net(len(data.symbols))
    optimizer = torch.optim.AdamW(grouped(model, 0.1), lr=0.01, betas=(0.9, 0.95))
    trainer = Trainer(args, model, optimizer, train, test)
    torch.manual_seed(int(os.environ["RANK"]))
    trainer.train()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
