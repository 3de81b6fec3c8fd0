"""Handwritten digits on several workers: torchrun --nproc-per-node 2 FILE [--save digits.pt]"""

import argparse
import os

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2))
        self.head = nn.Sequential(nn.Flatten(), nn.Linear(16 * 4 * 4, 64), nn.ReLU(), nn.Linear(64, 10))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x))


def data() -> tuple[TensorDataset, TensorDataset]:
    digits = load_digits()
    x, y = torch.from_numpy(digits.images).float().unsqueeze(1) / 16, torch.from_numpy(digits.target).long()
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(0))
    train, test = order[:1400], order[1400:]
    return TensorDataset(x[train], y[train]), TensorDataset(x[test], y[test])


@torch.no_grad()
def accuracy(model: nn.Module, test: TensorDataset, device: torch.device) -> float:
    model.eval()
    x, y = (t.to(device) for t in test.tensors)
    right = model(x).argmax(dim=1) == y
    model.train()
    return float(right.float().mean())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--save", help="where the trained state_dict goes")
    args = parser.parse_args()

    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    rank = dist.get_rank()

    train, test = data()
    sampler: DistributedSampler[tuple[Tensor, ...]] = DistributedSampler(train, drop_last=True)
    loader = DataLoader(train, batch_size=32, sampler=sampler, drop_last=True)

    torch.manual_seed(0)
    model = DDP(Net().to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.epochs)

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x.to(device)), y.to(device))
            loss.backward()
            optimizer.step()
        scheduler.step()
        if rank == 0:
            print(f"epoch {epoch}: loss {loss.item():.3f}", flush=True)

    final = accuracy(model, test, device)
    if rank == 0:
        print(f"accuracy {final:.3f}")
        if args.save:
            torch.save(model.module.state_dict(), args.save)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
