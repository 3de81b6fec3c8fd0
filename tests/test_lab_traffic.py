"""The bytes that the library counts are the bytes that cross the lab's network."""

import json
import os

import pytest

from gossamer.runtime.lab import Lab

pytestmark = pytest.mark.skipif(os.name != "posix" or os.geteuid() != 0, reason="the lab needs root")

TRAIN = """
import json, sys
import torch, torch.distributed as dist
import gossamer

torch.set_num_threads(1)
dist.init_process_group("gloo")
torch.manual_seed(0)
sent = 0
for graph, wire in (("one-peer-exponential", "float32"), ("one-peer-exponential", "bfloat16"), ("complete", "float32")):
    model = gossamer.DecentralizedDataParallel(torch.nn.Linear(1000, 1000), graph, wire=wire)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    model.gossip(optimizer)
    for _ in range(6):
        optimizer.zero_grad()
        model(torch.randn(4, 1000)).square().mean().backward()
        optimizer.step()
    model.average_()
    sent += model.traffic.sent
print(json.dumps(sent))
"""


def test_counted_bytes_agree_with_the_interfaces_within_5_percent(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(TRAIN)
    with Lab(hosts=3, rate="1gbit") as lab:
        result = lab.run(["python", str(script)], echo=False, timeout=120)
    assert result.exit_code == 0, result.outputs
    for counters, output in zip(result.traffic, result.outputs, strict=True):
        counted = json.loads(output.strip().splitlines()[-1])
        assert counted > 50e6  # enough that greetings do not matter
        assert counters.sent_bytes == pytest.approx(counted, rel=0.05)
