"""torchft's DiLoCo, with one fragment and no delay, is ours: so the frontier benchmark has ours in its place.

Skipped where torchft is not installed: pip install torchft==0.2.0
"""

import threading

import pytest
import torch

from tests.test_methods import COLUMNS, A, H, N, close
from tests.test_outer_methods import LR, same_start

local_sgd = pytest.importorskip("torchft.local_sgd")
PERIOD, STEPS = 4, 20


class Manager:
    """In the place of torchft's, for N workers that are threads: a mean, and no failures."""

    _use_async_quorum = False
    together, sent = threading.Barrier(N), [None] * N

    def __init__(self, rank):
        self.rank = rank

    def __getattr__(self, name):
        return lambda *args: 0 if name == "current_step" else True

    def allreduce(self, tensor, should_quantize=False):
        self.sent[self.rank] = tensor.clone()
        self.together.wait()
        tensor.copy_(torch.stack(self.sent).mean(0))
        self.together.wait()
        return self


def test_diloco_of_torchft_is_ours():
    ends = [None] * N

    def work(rank):
        x = torch.nn.Parameter(torch.linspace(-1, 1, COLUMNS, dtype=torch.float64))
        inner = torch.optim.SGD([x], LR)
        outer = torch.optim.SGD([x], 0.7, momentum=0.9, nesterov=True)
        with local_sgd.DiLoCo(Manager(rank), [torch.nn.ParameterList([x])], inner, outer, sync_every=PERIOD):
            for _ in range(STEPS):
                x.grad = (H * (x.detach() - A))[rank]
                inner.step()
        ends[rank] = x.detach()

    workers = [threading.Thread(target=work, args=(rank,)) for rank in range(N)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    close(torch.stack(ends), same_start(f"diloco:H={PERIOD},lr=0.7,momentum=0.9", STEPS))
