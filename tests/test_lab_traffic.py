"""The bytes that are counted are the bytes that cross the lab's network: the library's, DBench's and those of ``gossamer plan``."""

import json
import os

import pytest

from gossamer.runtime import Workload, simulate
from gossamer.runtime.cluster import build
from gossamer.runtime.lab import Lab
from gossamer.runtime.methods import parse

pytestmark = pytest.mark.skipif(os.name != "posix" or os.geteuid() != 0, reason="the lab needs root")

STEPS = 4
WAYS = [
    ("one-peer-exponential", "awc", "float32"),
    ("one-peer-exponential", "awc", "bfloat16"),
    ("complete", "awc", "float32"),
    ("ring", "choco", "float32"),  # each compressed method has a wire of its own
    ("ring", "choco:wire=bfloat16", "float32"),
    ("ring", "choco:wire=sign", "float32"),
    ("ring", "choco:wire=top-10%", "float32"),
    ("complete", "all-reduce:wire=8bits", "float32"),
    ("complete", "diloco:H=2,wire=4bits", "float32"),
    ("complete", "noloco:H=2", "float32"),
    ("directed-random:degree=1.4,seed=1", "push-sum:wire=8bits", "float32"),
]
TRAIN = """
import json, sys
import torch, torch.distributed as dist
import gossamer

def counters():
    dist.barrier()
    with open("/proc/net/dev") as file:
        numbers = next(line for line in file if "eth0:" in line).split(":")[1].split()
    return model._driver.now.bytes, model.traffic.sent, model.traffic.received, int(numbers[8]), int(numbers[0])

torch.set_num_threads(1)
dist.init_process_group("gloo")
torch.manual_seed(0)
sent, found = 0, []
for graph, method, wire in json.loads(sys.argv[1]):
    model = gossamer.DecentralizedDataParallel(torch.nn.Linear(1000, 1000), graph, method=method, wire=wire)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    model.gossip(optimizer)
    before = counters()
    for _ in range(int(sys.argv[2])):
        optimizer.zero_grad()
        model(torch.randn(4, 1000)).square().mean().backward()
        optimizer.step()
    found.append([b - a for a, b in zip(before, counters())])
    model.average_()
    sent += model.traffic.sent
print(json.dumps([sent, found]))
"""


def test_counted_bytes_agree_with_the_interfaces_within_5_percent(tmp_path):
    """In the directed graph workers send and receive different numbers of rows; DBench and the plan count those of the busiest one."""
    script = tmp_path / "train.py"
    script.write_text(TRAIN)
    with Lab(hosts=3, rate="1gbit") as lab:
        result = lab.run(["python", str(script), json.dumps(WAYS), str(STEPS)], echo=False, timeout=120)
    assert result.exit_code == 0, result.outputs
    totals, found = zip(*(json.loads(output.strip().splitlines()[-1]) for output in result.outputs), strict=True)
    for counters, counted in zip(result.traffic, totals, strict=True):
        assert counted > 50e6  # enough that greetings do not matter
        assert counters.sent_bytes == pytest.approx(counted, rel=0.05)
    cluster, work = build({"name": "lab", "hosts": 3, "inter": {"gbit": 1.0}}), Workload.of_tensors([4_000_000, 4000], 0, 0)
    for way, hosts in zip(WAYS, zip(*found, strict=True), strict=True):
        for _, sent, received, *crossed in hosts:
            assert crossed == pytest.approx([sent, received], rel=0.05, abs=20_000), way  # a host may rest
        dbench, _, _, sent, received = map(max, zip(*hosts, strict=True))
        graph, method, wire = way
        plan = simulate(cluster, work, parse(f"{graph}, {method}, {wire}"), STEPS).sent * STEPS
        assert [received, sent] == pytest.approx([dbench, plan], rel=0.05), way
