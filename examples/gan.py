"""A GAN: two optimizers in one wrapped module, averaged once per step. torchrun --nproc-per-node 2 examples/gan.py

The data are four clusters in the plane. Each worker draws its own points; generator and discriminator are averaged together.
"""

import argparse
import math

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import softplus

from gossamer import DecentralizedDataParallel

CLUSTERS = torch.tensor([[math.cos(a), math.sin(a)] for a in (0.0, math.pi / 2, math.pi, 3 * math.pi / 2)])
SPREAD = 0.1


def mlp(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, outputs))


class GAN(nn.Module):
    """One module, so that one exchange carries both networks."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = mlp(4, 2)
        self.discriminator = mlp(2, 1)

    def forward(self, z: Tensor) -> Tensor:
        """How real the discriminator thinks the generator's points are."""
        return self.discriminator(self.generator(z))


@torch.no_grad()
def disagreement(model: DecentralizedDataParallel) -> float:
    """The largest difference between a parameter here and its mean over the workers."""
    return max(float((p - model.mean(p)).abs().max()) for p in model.parameters())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--graph", default="one-peer-exponential")
    args = parser.parse_args()

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(rank)

    model = DecentralizedDataParallel(GAN(), graph=args.graph)
    opt_d = torch.optim.Adam(model.discriminator.parameters(), lr=1e-3, betas=(0.5, 0.9))
    opt_g = torch.optim.Adam(model.generator.parameters(), lr=1e-3, betas=(0.5, 0.9))
    model.gossip(opt_d, opt_g)  # in the order in which they step; averaging ends in the last one's step()
    sent = model.traffic.sent

    for _ in range(args.steps):
        real = CLUSTERS[torch.randint(len(CLUSTERS), (128,))] + SPREAD * torch.randn(128, 2)
        z = torch.randn(128, 4)

        opt_d.zero_grad()
        loss_d = softplus(-model.discriminator(real)).mean() + softplus(model(z)).mean()  # model(): here the exchange starts
        loss_d.backward()
        opt_d.step()  # changes half of what is on its way; that is why a copy is sent when there are several optimizers

        opt_g.zero_grad()
        loss_g = softplus(-model(z)).mean()
        loss_g.backward()
        opt_g.step()  # here it ends

    sent = model.traffic.sent - sent
    before = disagreement(model)
    model.average_()
    after = disagreement(model)

    with torch.no_grad():
        points = model.generator(torch.randn(4000, 4, generator=torch.Generator().manual_seed(0)))
    near = torch.cdist(points, CLUSTERS) < 4 * SPREAD
    size = sum(p.nbytes for p in model.parameters())
    print(
        f"rank {rank}: steps {model.steps}, sent per step {sent / args.steps / size:.2f} models, replicas differ by {before:.0e} "
        f"and then {after:.0e}, points near a cluster {float(near.any(dim=1).float().mean()):.2f}"
    )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
