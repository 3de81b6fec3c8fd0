"""A worker of test_lightning.py: the same LightningModule with strategy="ddp" and with GossamerStrategy; prints what came out as JSON.

python -m tests.extras.lightning_driver FOLDER, under the environment of torchrun.
"""

import json
import logging
import os
import sys
import warnings
from pathlib import Path

import lightning.pytorch as pl
import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from gossamer import DecentralizedDataParallel
from gossamer.integrations.lightning import GossamerStrategy

logging.disable(logging.WARNING)
warnings.simplefilter("ignore")
WORKERS = int(os.environ["WORLD_SIZE"])


def data():
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(256, 8, generator=generator)
    return TensorDataset(x, (x[:, 0] * x[:, 1] > 0).long())


class Classifier(pl.LightningModule):
    def __init__(self, kind="AdamW"):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 2))
        self.kind, self.losses, self.validated = kind, [], []

    def loss(self, batch):
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def training_step(self, batch, _):
        loss = self.loss(batch)
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch, _):
        self.log("val_loss", self.loss(batch), sync_dist=True)
        self.validated.append(float(sum(p.double().sum() for p in self.parameters())))

    def configure_optimizers(self):
        if self.kind == "SGD":
            optimizer = torch.optim.SGD(self.parameters(), lr=0.3, momentum=0.9, weight_decay=1e-4)
        else:
            optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 4)}


class Manual(Classifier):
    """Gradients of two batches, clipped, by hand."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, index):
        loss = self.loss(batch)
        self.losses.append(loss.item())
        self.manual_backward(loss / 2)
        if index % 2:
            optimizer = self.optimizers()
            self.clip_gradients(optimizer, 0.1)
            optimizer.step()
            optimizer.zero_grad()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01)


class Two(pl.LightningModule):
    """Two networks against each other, each with its optimizer."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.maker, self.judge = nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
        self.automatic_optimization, self.losses = False, []

    def training_step(self, batch, _):
        makers, judges = self.optimizers()
        x = batch[0]
        self.toggle_optimizer(makers)
        loss = F.softplus(-self.judge(self.maker(x))).mean()
        makers.zero_grad()
        self.manual_backward(loss)
        makers.step()
        self.untoggle_optimizer(makers)
        self.toggle_optimizer(judges)
        other = (F.softplus(-self.judge(x)) + F.softplus(self.judge(self.maker(x).detach()))).mean()
        judges.zero_grad()
        self.manual_backward(other)
        judges.step()
        self.untoggle_optimizer(judges)
        self.losses += [loss.item(), other.item()]

    def configure_optimizers(self):
        return [torch.optim.Adam(self.maker.parameters(), 0.01), torch.optim.Adam(self.judge.parameters(), 0.01)]


def trainer(strategy, epochs=2, **options):
    return pl.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=WORKERS,
        max_epochs=epochs,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **({"enable_checkpointing": False} | options),
    )


def fit(strategy, module, epochs=2, ckpt_path=None, **options):
    loader = DataLoader(data(), batch_size=64 // WORKERS, shuffle=True)
    made = trainer(strategy, epochs, **options)
    pl.seed_everything(7)
    validation = DataLoader(data(), batch_size=64) if isinstance(module, Classifier) else None
    made.fit(module, loader, validation, ckpt_path=ckpt_path)
    return module


CASES = {
    "plain": (lambda: Classifier("SGD"), {}),
    "accumulated and clipped": (Classifier, {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1}),
    "clipped by value": (Classifier, {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}),
    "bf16": (Classifier, {"precision": "bf16-mixed", "gradient_clip_val": 0.1}),
    "manual": (Manual, {}),
    "two optimizers": (Two, {}),
}


def rows(module):
    row = nn.utils.parameters_to_vector(module.parameters()).detach()
    parts = [torch.empty_like(row) for _ in range(WORKERS)]
    dist.all_gather(parts, row)
    return torch.stack(parts)


def spread(module):
    """How far the workers' parameters are apart."""
    all_rows = rows(module)
    return float((all_rows - all_rows[0]).abs().max())


def resumed(strategy, folder):
    """Two epochs, a new Trainer, two more: the losses of those."""
    keep = ModelCheckpoint(folder, filename="{epoch}", save_top_k=1, every_n_epochs=1, save_last=True)
    fit(strategy(), Classifier(), callbacks=[keep], enable_checkpointing=True)
    files = sorted(path.name for path in Path(folder).iterdir())
    module = Classifier()
    pl.seed_everything(8)
    fit(
        strategy(),
        module,
        4,
        f"{folder}/last.ckpt",
        callbacks=[ModelCheckpoint(folder, save_top_k=0)],
        enable_checkpointing=True,
    )
    return module.losses, files, spread(module)


def main(folder):
    found = {}
    for name, (make, options) in CASES.items():
        losses = {}
        ddp = "ddp_find_unused_parameters_true" if make is Two else "ddp"
        for kind, strategy in {"ddp": ddp, "all-reduce": GossamerStrategy("all-reduce")}.items():
            module = fit(strategy, make(), **options)
            losses[kind] = module.losses
        found[name] = losses | {"spread": spread(module), "checkpoint": list(module.state_dict())}
    for kind, strategy in {"ddp": lambda: "ddp", "all-reduce": lambda: GossamerStrategy("all-reduce")}.items():
        found[f"resumed {kind}"] = resumed(strategy, f"{folder}/{kind}")
    found |= gossip(folder) if WORKERS == 2 else {}
    found["resized"] = resized(Path(folder).parent / "resized")
    print(json.dumps(found))


def resized(folder):
    """Two epochs of four workers, and one more of two: losses of those."""
    module, keep = Classifier(), ModelCheckpoint(folder, save_last=True)
    last = folder / "last.ckpt"
    if WORKERS == 4:
        fit(GossamerStrategy("one-peer-exponential"), module, callbacks=[keep], enable_checkpointing=True)
    elif last.exists():
        fit(GossamerStrategy("one-peer-exponential"), module, 3, last)
    return module.losses


def gossip(folder):
    """Methods in which replicas differ."""
    straight = fit(GossamerStrategy("one-peer-exponential"), Classifier(), 4)
    again = resumed(lambda: GossamerStrategy("one-peer-exponential"), f"{folder}/gossip")
    seen = []
    ada = GossamerStrategy("ada", gossip={"profile_every": 4, "on_profile": seen.append})
    fit(ada, Classifier("SGD"), accumulate_grad_batches=2, limit_train_batches=3)
    apart = Manual()
    fit(GossamerStrategy("one-peer-exponential"), apart, limit_train_batches=3)  # the last batch has no step
    return {
        "straight": [straight.losses, spread(straight), straight.validated],
        "again": again,
        "profiles": len(seen),
        "left over": spread(apart),
        "unwrapped": not isinstance(ada.model, DecentralizedDataParallel),
    }


if __name__ == "__main__":
    main(sys.argv[1])
