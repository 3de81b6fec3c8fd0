"""The link for GPUs, as far as it can be tried without one: batched sends and receives, over gloo."""

from tests import workers

CODE = """
import torch, torch.distributed as dist
from gossamer import graphs
from gossamer.blocks import Block
from gossamer.exchange import Exchange
from gossamer.links import BatchLink
from gossamer.mixer import Mixer

torch.set_num_threads(1)
dist.init_process_group("gloo")
rank, n = dist.get_rank(), dist.get_world_size()
exchange = Exchange(BatchLink(dist.distributed_c10d._get_default_store(), rank, n, timeout=20))
for name in ("one-peer-exponential", "exponential", "complete", "ring"):
    x = torch.randn(n, 48, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    block = Block([("w", torch.nn.Parameter(torch.zeros(48, dtype=torch.float64)), False)], 1, torch.device("cpu"))
    block.x.copy_(x[rank : rank + 1])
    mixer = Mixer(n, exchange)
    graph = graphs.parse(name, n)
    for t in range(3):
        mixer.round, mixer.step = graph.round(t), t
        mixer.start(block)
        mixer.finish_in_place(block)
        x = torch.from_numpy(graph.matrix(t)) @ x
        assert torch.allclose(block.x[0], x[rank], atol=1e-12), (name, t)
    assert torch.allclose(mixer.mean(block.x[0]), x.mean(dim=0), atol=1e-12)
print("done")
"""


def test_batched_sends_and_receives_mix_as_the_matrix_says():
    for worker in workers.run_ok(4, ["-c", CODE], timeout=60):
        assert "done" in worker.out
