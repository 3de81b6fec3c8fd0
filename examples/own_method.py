"""A method of one's own, in DBench's Trainer and in the library.

python examples/own_method.py                                        # 8 replicas in this process
torchrun --nproc-per-node 2 examples/own_method.py                   # one replica in each process, with the library
"""

import os
from dataclasses import dataclass

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn

from gossamer import DecentralizedDataParallel, Method, Recipe, Settings, Step, Task, Trainer, Vector


@dataclass(frozen=True)
class Cautious(Method):
    """x <- x - η d(x), then x <- (1 - γ) x + γ W x: replicas go only a part of the way to their neighbours' mean.

    - ``gamma``: which part. 1 is ``atc``.
    - ``drag``: how slowly a running mean of the parameters follows. The steps are taken from there by ``pull``.
    """

    name, sums = "cautious", "both"
    gamma: float = 0.5
    drag: float = 0.9
    pull: float = 0.01

    def state(self, like: Vector) -> dict[str, Vector]:
        return {"slow": like.clone(), "mixed": like.zeros()}

    def before_update(self, s: Step) -> None:
        s.grad.add_(s.x - s.state["slow"], alpha=self.pull)

    def after_update(self, s: Step) -> None:
        transfer = s.mix(s.x)
        s.look()
        transfer.into(s.state["mixed"])
        s.x.lerp_(s.state["mixed"], self.gamma)
        s.state["slow"].lerp_(s.x, 1 - self.drag)


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10))


def data() -> tuple[torch.Tensor, torch.Tensor]:
    digits = load_digits()
    return torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)


def in_one_process() -> None:
    x, y = data()
    task = Task("digits", net, train=(x[:1500], y[:1500]), test=(x[1500:], y[1500:]))
    for method in ("atc", "cautious:gamma=0.3"):
        settings = Settings(replicas=8, epochs=6, batch=8, algorithm=method, optimizer=Recipe("sgd", 0.2))
        trainer = Trainer(task, settings, "ring")
        trainer.run()
        last = trainer.history[-1]
        print(
            f"{method}: accuracy {last.value:.3f}, replicas apart by {last.consensus_distance:.3f}, {last.bytes:,} bytes each"
        )


def in_the_library() -> None:
    dist.init_process_group("gloo")
    x, y = data()
    mine = slice(dist.get_rank(), 1500, dist.get_world_size())
    model = DecentralizedDataParallel(net(), "ring", method="cautious:gamma=0.3")
    optimizer = torch.optim.SGD(model.parameters(), 0.2)
    model.gossip(optimizer)
    for epoch in range(6):
        for rows in torch.randperm(700, generator=torch.Generator().manual_seed(epoch)).split(16):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x[mine][rows]), y[mine][rows]).backward()
            optimizer.step()
    model.average_()
    if model.leads:
        print(f"accuracy {float((model(x[1500:]).argmax(1) == y[1500:]).float().mean()):.3f}")


if __name__ == "__main__":
    if "RANK" in os.environ:
        in_the_library()
    else:
        in_one_process()
