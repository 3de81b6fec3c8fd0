"""The link for GPUs, as far as it can be tried without one: batched sends and receives, over gloo. And links that are built anew."""

import contextlib
import threading
import time

import torch
import torch.distributed as dist

from gossamer import graphs
from gossamer.members.store import Seat
from gossamer.members.survivors import open_group
from gossamer.rows.block import Block
from gossamer.rows.vector import Parameters
from gossamer.transport import link as links
from gossamer.transport.exchange import Exchange
from gossamer.transport.mixer import Mixer
from tests.pool import on_workers


@on_workers(4)
def test_batched_sends_and_receives_mix_as_the_matrix_says(world):
    rank, n = world.rank, world.size
    exchange = Exchange(links.BatchLink(dist.distributed_c10d._get_default_store(), rank, n, timeout=20))
    for name in ("one-peer-exponential", "exponential", "complete", "ring"):
        x = torch.randn(n, 48, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        block = Block([("w", torch.nn.Parameter(torch.zeros(48, dtype=torch.float64)), False)], 1, torch.device("cpu"))
        block.x.copy_(x[rank : rank + 1])
        mixer = Mixer(n, exchange)
        graph = graphs.parse(name, n)
        for t in range(3):
            rows = Parameters([block], in_place=True)
            mixer.start(graph.round(t), t, rows).into(rows)
            x = torch.from_numpy(graph.matrix(t)) @ x
            assert torch.allclose(block.x[0], x[rank], atol=1e-12), (name, t)
        assert torch.allclose(mixer.mean(block.x[0]), x.mean(dim=0), atol=1e-12)


def test_a_group_that_waits_for_one_who_died_does_not_hold_the_next(monkeypatch):
    """It came to where all meet, and died before it could be connected to: gloo waits for it, whatever anybody knows."""
    monkeypatch.setattr(links, "_BUILD", 6.0)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    seats = [Seat("127.0.0.1", store.port, rank, rank, 2, 10.0) for rank in (0, 1)]
    dist.PrefixStore("job/1", store).set("here/1", "1")
    made = {}

    def build(rank, number):
        with contextlib.suppress(RuntimeError):
            made[rank, number] = open_group(seats[rank], "job", 20.0, number, rank, (0, 1), lambda: False)

    threads = []
    for rank, number in ((0, 1), (0, 2), (1, 2)):
        threads.append(threading.Thread(target=build, args=(rank, number)))
        threads[-1].start()
        time.sleep(0.5)  # the first is in gloo by now
    for thread in threads[1:]:
        thread.join(3)
    assert threads[0].is_alive()
    assert set(made) == {(0, 2), (1, 2)}
    threads[0].join(20)
    assert set(made) == {(0, 2), (1, 2)}
