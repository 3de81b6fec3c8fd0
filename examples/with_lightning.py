"""Handwritten digits with Lightning, on two workers: python examples/with_lightning.py"""

import argparse

import lightning.pytorch as pl
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from gossamer.integrations.lightning import GossamerStrategy


class Digits(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))

    def training_step(self, batch: list[Tensor], _: int) -> Tensor:
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def validation_step(self, batch: list[Tensor], _: int) -> None:
        right = self.net(batch[0]).argmax(dim=1) == batch[1]
        self.log("accuracy", right.float().mean(), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=5)
    args = parser.parse_args()
    x, y = load_digits(return_X_y=True)
    data = TensorDataset(torch.from_numpy(x).float() / 16, torch.from_numpy(y).long())
    train, test = torch.utils.data.random_split(data, [1400, 397], torch.Generator().manual_seed(0))
    trainer = pl.Trainer(
        strategy=GossamerStrategy("ada-auto"),  # was: strategy="ddp"
        accelerator="cpu",
        devices=args.workers,
        max_epochs=args.epochs,
        gradient_clip_val=1.0,
        logger=False,
        enable_progress_bar=False,
    )
    pl.seed_everything(0)
    trainer.fit(Digits(), DataLoader(train, batch_size=32, shuffle=True), DataLoader(test, batch_size=64))
    if trainer.is_global_zero:
        print(f"accuracy {float(trainer.callback_metrics['accuracy']):.3f}")


if __name__ == "__main__":
    main()
