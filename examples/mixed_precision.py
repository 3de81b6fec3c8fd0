"""Autocast and a GradScaler, and one worker whose gradient overflows: torchrun --nproc-per-node 2 examples/mixed_precision.py

A GradScaler that finds an infinite gradient does not call optimizer.step(). The neighbours know nothing of it and wait for this
worker's parameters. With ``gossip(optimizer, scaler=scaler)`` a skipped step is averaged all the same, and all go on.
"""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn

from gossamer import DecentralizedDataParallel


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--overflow", type=int, default=20, help="the step at which the last rank's loss is infinite")
    args = parser.parse_args()

    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    rank = dist.get_rank()
    generator = torch.Generator().manual_seed(rank)

    net = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 4))
    model = DecentralizedDataParallel(net.to(device), graph="one-peer-exponential")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler(device.type, init_scale=1024.0)
    model.gossip(optimizer, scaler=scaler)

    skipped = 0
    first = last = 0.0
    for step in range(args.steps):
        x = torch.randn(64, 16, generator=generator).to(device)
        y = x[:, :4].argmax(dim=1)
        optimizer.zero_grad()
        with torch.autocast(device.type, dtype=torch.bfloat16):
            loss = nn.functional.cross_entropy(model(x), y)
        last = loss.item()
        first = first or last
        if step == args.overflow and rank == dist.get_world_size() - 1:
            loss = loss * torch.inf
        scaler.scale(loss).backward()
        scale = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        skipped += scaler.get_scale() < scale

    model.average_()
    finite = all(bool(p.isfinite().all()) for p in model.parameters())
    print(
        f"rank {rank}: steps {model.steps}, skipped {skipped}, loss {model.mean(first):.3f} -> {model.mean(last):.3f}, "
        f"scale {scaler.get_scale():g}, finite {finite}"
    )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
