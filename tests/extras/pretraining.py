"""A training loop in the manner of nanoGPT's: tied weights, decay groups, warm-up and cosine, micro-batches, float16 with a GradScaler,
clipping, torch.compile, evaluation on both splits, a checkpoint of rank 0 and `--resume`.

torchrun --nproc-per-node 2 FILE --out FOLDER
"""

import argparse
import math
import os
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

CONTEXT, WIDTH, HEADS, LAYERS = 32, 32, 2, 1


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.before, self.between = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.project = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = (part.view(b, t, HEADS, c // HEADS).transpose(1, 2) for part in self.qkv(self.before(x)).split(c, dim=2))
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.project(seen.transpose(1, 2).reshape(b, t, c))
        return x + self.mlp(self.between(x))


class Transformer(nn.Module):
    def __init__(self, symbols):
        super().__init__()
        self.symbol, self.place = nn.Embedding(symbols, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.layers = nn.Sequential(*(Layer() for _ in range(LAYERS)))
        self.last, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, symbols, bias=False)
        self.head.weight = self.symbol.weight
        for p in self.parameters():
            if p.dim() > 1:
                nn.init.normal_(p, std=0.05)

    def forward(self, x, y):
        scores = self.head(self.last(self.layers(self.symbol(x) + self.place.weight[: x.shape[1]])))
        return scores, F.cross_entropy(scores.flatten(0, 1), y.flatten())

    def groups(self, decay):
        matrices = [p for _, p in self.named_parameters() if p.dim() > 1]
        others = [p for _, p in self.named_parameters() if p.dim() < 2]
        return [{"params": matrices, "weight_decay": decay}, {"params": others, "weight_decay": 0.0}]


parser = argparse.ArgumentParser()
parser.add_argument("--out", type=Path, required=True)
parser.add_argument("--steps", type=int, default=16)
parser.add_argument("--micro", type=int, default=4)
parser.add_argument("--float16", action="store_true")
parser.add_argument("--compile", action="store_true")
parser.add_argument("--resume", action="store_true")
args = parser.parse_args()

dist.init_process_group("gloo")
rank, workers = dist.get_rank(), dist.get_world_size()
master = rank == 0
micro = args.micro // workers
torch.manual_seed(1337 + rank)
autocast = torch.autocast("cpu", torch.float16) if args.float16 else nullcontext()

text = Path(os.__file__).read_text()[:20_000]
symbols = sorted(set(text))
codes = torch.tensor([symbols.index(c) for c in text])
splits = {"train": codes[: len(codes) * 9 // 10], "val": codes[len(codes) * 9 // 10 :]}


def batch(split):
    source = splits[split]
    starts = torch.randint(len(source) - CONTEXT - 1, (8,))
    return torch.stack([source[i : i + CONTEXT] for i in starts]), torch.stack(
        [source[i + 1 : i + 1 + CONTEXT] for i in starts]
    )


bare = Transformer(len(symbols))
first, best = 0, math.inf
optimizer = torch.optim.AdamW(bare.groups(0.1), lr=1e-2, betas=(0.9, 0.95))
scaler = torch.amp.GradScaler("cpu", enabled=args.float16, init_scale=2.0**10)
if args.resume:
    kept = torch.load(args.out / "ckpt.pt", weights_only=True)
    bare.load_state_dict(kept["model"])
    optimizer.load_state_dict(kept["optimizer"])
    scaler.load_state_dict(kept["scaler"])
    first, best = kept["step"], kept["best"]
model = torch.compile(bare, backend="eager") if args.compile else bare
model = DDP(model)


def rate(step):
    if step < 4:
        return 1e-2 * (step + 1) / 5
    return 1e-3 + 0.5 * (1 + math.cos(math.pi * min(1.0, (step - 4) / 30))) * 9e-3


@torch.no_grad()
def losses():
    model.eval()
    found = {}
    for split in splits:
        parts = torch.zeros(3)
        for k in range(3):
            with autocast:
                parts[k] = model(*batch(split))[1]
        found[split] = parts.mean().item()
    model.train()
    return found


x, y = batch("train")
for step in range(first, args.steps + 1):
    for group in optimizer.param_groups:
        group["lr"] = rate(step)
    if step % 4 == 0 and master:
        seen = losses()
        print(f"step {step}: train loss {seen['train']:.7f}, val loss {seen['val']:.7f}")
        best = min(best, seen["val"])
        state = {"model": bare.state_dict(), "optimizer": optimizer.state_dict(), "scaler": scaler.state_dict()}
        if step < args.steps or not args.resume:
            torch.save(state | {"step": step, "best": best}, args.out / "ckpt.pt")
    if step == args.steps:
        break
    for k in range(micro):
        model.require_backward_grad_sync = k == micro - 1
        with autocast:
            _, loss = model(x, y)
            loss = loss / micro
        x, y = batch("train")
        scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.3)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
    if master:
        print(f"iter {step}: loss {loss.item() * micro:.7f}, norm {norm.item():.7f}, scale {scaler.get_scale()}")

dist.destroy_process_group()
