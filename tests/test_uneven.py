import pytest

from tests import workers


def test_workers_that_run_out_of_data_leave_and_nobody_hangs():
    for worker in workers.run_ok(5, ["-m", "tests.uneven_driver"], timeout=120):
        assert "all done" in worker.out


FAILING = """
import os, time, torch, torch.distributed as dist
from torch import nn
from gossamer import DecentralizedDataParallel, GossamerError

torch.set_num_threads(1)
dist.init_process_group("gloo")
model = DecentralizedDataParallel(nn.Linear(4, 2), "ring", timeout=TIMEOUT)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
model.gossip(optimizer)
try:
    with model.uneven():
        for k in range(2 if model.rank == 0 else 200):
            model(torch.randn(4, 4)).square().mean().backward()
            optimizer.step()
            time.sleep(0.01)
            if model.rank == 1 and model.schedule.changes[1:]:
                FAILURE
except GossamerError as error:
    print(error, flush=True)
os._exit(0)
"""


@pytest.mark.parametrize(
    ("failure", "timeout", "said"),
    [("raise ValueError", 60, "ended with an error"), ("os._exit(1)", 3, "no heartbeat for 3 s")],
    ids=["an exception", "the end of a process"],
)
def test_a_worker_that_has_left_does_not_wait_for_one_that_is_gone(failure, timeout, said):
    script = FAILING.replace("FAILURE", failure).replace("TIMEOUT", str(timeout))
    left = workers.run(2, ["-c", script], timeout=60)[0]
    assert f"rank 0 can't go on in uneven(): rank 1 {said}" in left.out, left
