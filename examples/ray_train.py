"""DecentralizedDataParallel inside Ray Train's TorchTrainer: python examples/ray_train.py [FOLDER]"""

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import ray.train
import torch
from ray.train.torch import TorchTrainer
from torch import nn

from gossamer import DecentralizedDataParallel


def train(config: dict[str, Any]) -> None:
    """In each worker; Ray Train has made the process group."""
    rank = ray.train.get_context().get_world_rank()
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(512, 10, generator=generator)
    y = x[:, :3].argmax(dim=1)
    torch.manual_seed(0)
    # Where a script for DDP has ray.train.torch.prepare_model(model):
    model = DecentralizedDataParallel(nn.Linear(10, 3), "one-peer-exponential")
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    model.gossip(optimizer)
    for step in range(config["steps"]):
        batch = slice(step * 32 % 512, step * 32 % 512 + 32)
        loss = nn.functional.cross_entropy(model(x[batch]), y[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.average_()  # all replicas are the same now
    sums = [torch.zeros(1) for _ in range(ray.train.get_context().get_world_size())]
    torch.distributed.all_gather(sums, torch.cat([p.detach().flatten() for p in model.parameters()]).sum().reshape(1))
    apart = float(torch.stack(sums).max() - torch.stack(sums).min())
    said = {"loss": float(loss), "apart": apart, "workers": len(sums)}
    ray.train.report(said)
    if rank == 0:
        Path(config["folder"], "said.json").write_text(json.dumps(said))
    model.close()


if __name__ == "__main__":
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp()).absolute()
    trainer = TorchTrainer(
        train,
        train_loop_config={"steps": 60, "folder": str(folder)},
        scaling_config=ray.train.ScalingConfig(num_workers=2),
        run_config=ray.train.RunConfig(storage_path=str(folder)),
    )
    trainer.fit()
    print((folder / "said.json").read_text())
