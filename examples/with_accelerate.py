"""Handwritten digits with Accelerate: torchrun --nproc-per-node 2 examples/with_accelerate.py"""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from gossamer.integrations.accelerate import GossamerAccelerator


def main() -> None:
    accelerator = GossamerAccelerator("ada-auto", cpu=True, gradient_accumulation_steps=2)  # was: Accelerator(…)
    x, y = load_digits(return_X_y=True)
    inputs, labels = torch.from_numpy(x).float() / 16, torch.from_numpy(y).long()
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    loader = DataLoader(TensorDataset(inputs[:1400], labels[:1400]), batch_size=16, shuffle=True)
    model, optimizer, loader = accelerator.prepare(net, optimizer, loader)
    for _ in range(5):
        for batch, targets in loader:
            with accelerator.accumulate(model):
                accelerator.backward(nn.functional.cross_entropy(model(batch), targets))
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
    model.average_()  # all workers, at the end
    with torch.no_grad():
        right = model(inputs[1400:]).argmax(dim=1) == labels[1400:]
    accelerator.print(f"accuracy {right.float().mean():.3f}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
