"""A worker diverges, and the others do not: real processes, as torchrun starts them and under ``gossamer launch``. See finite_driver.py."""

import json
import math
import os
import subprocess

import pytest
import torch

from gossamer.rows import mixing
from gossamer.rows.block import Block
from gossamer.rows.finite import copy, culprit, finite, share
from gossamer.schedules import schedule
from gossamer.transport.routes import plan
from tests import workers
from tests.commands import in_fork
from tests.finite_driver import RATE, Net, every_case, gradients, row

N, STEPS, BAD = 4, 8, [2, 3]  # rank 2, after the update of step 3
SENT = BAD[1] + 1  # the step in which the others get it
CASES = [
    {"name": "edges", "graph": "one-peer-exponential"},
    {"name": "edges-atc", "graph": "one-peer-exponential", "order": "atc"},
    {"name": "edges-inf", "graph": "one-peer-ring", "value": "-inf"},
    {"name": "edges-bfloat16", "graph": "ring", "wire": "bfloat16"},
    {"name": "edges-copy", "graph": "one-peer-exponential", "send_copy": True},
    {"name": "edges-half", "graph": "one-peer-exponential", "half": True},
    {"name": "edges-two", "graph": "one-peer-exponential", "two": True},
    {"name": "local", "graph": "one-peer-exponential", "local_steps": 2},
    {"name": "slices", "graph": "complete"},
    {"name": "slices-copy", "graph": "complete", "send_copy": True},
    {"name": "slices-ring", "graph": "ring"},
    {"name": "hosts", "graph": "hierarchical:per_node=2"},
    {"name": "8-bits", "graph": "periodic:every=1,bits=8"},
    {"name": "auto", "graph": "ada-auto"},
    {"name": "means", "graph": "one-peer-ring", "bad": [[2, STEPS - 1]], "last": True},
    {"name": "unchecked", "graph": "complete", "check_finite": False},
    {"name": "unchecked-edges", "graph": "one-peer-exponential", "check_finite": False},
]


@pytest.fixture(scope="module")
def records(pool, tmp_path_factory):
    """name -> of each rank what it has to say."""
    out = tmp_path_factory.mktemp("finite")
    pool.check(N, every_case, {"cases": [{"steps": STEPS, "bad": [BAD]} | case for case in CASES]}, out)
    return {
        case["name"]: [json.loads((out / f"{case['name']}.{rank}.json").read_text()) for rank in range(N)] for case in CASES
    }


def numbers(rows):
    return torch.tensor([rows[str(step)] for step in range(STEPS)], dtype=torch.float64)


def reference(case):
    """n workers in one process: a row that is not finite is left out by edges, and by slices a result that is not finite."""
    modules = [Net(rank, False) for rank in range(N)]
    graph, seen = schedule(case["graph"], N).graph(0, 0, 1, {}), []
    local, atc, rounded = case.get("local_steps", 1), case.get("order") == "atc", case.get("wire") == "bfloat16"
    rows = torch.tensor([row(module) for module in modules])
    for step in range(STEPS):
        parts = [torch.cat([g.flatten() for g in gradients(list(modules[q].parameters()), q, step)]) for q in range(N)]
        if atc:
            rows = rows - RATE * torch.stack(parts)
        if (step + 1) % local == 0:
            rows = mixed(graph.round(step // local), rows, rounded)  # all dtypes of a row are left out together
        if not atc:
            rows = rows - RATE * torch.stack(parts)
        if step == BAD[1]:
            rows[BAD[0], -4] = math.nan
        seen.append(rows)
    return torch.stack(seen, dim=1)


def mixed(round_, rows, rounded):
    sound, made = torch.isfinite(rows).all(dim=1), rows.clone()
    sent = rows.bfloat16().float() if rounded else rows
    for i in range(N):
        weights = round_.neighbors(i)
        verb = plan(round_, N, i, rounded).verb
        if verb == "edges":
            made[i] += sum(w * (sent[j] - sent[i]) for j, w in weights.items() if j != i and sound[j])
        elif verb != "none" and all(sound[j] for j, w in weights.items() if w):
            made[i] = sum(w * rows[j] for j, w in weights.items())
    return made


@pytest.mark.parametrize(
    "case", [case for case in CASES if case["name"].split("-")[0] not in ("8", "auto", "means", "unchecked")]
)
def test_rows_that_are_not_finite_are_not_mixed(case, records):
    expected = reference(case)
    for rank, record in enumerate(records[case["name"]]):
        if rank == BAD[0]:
            continue
        assert not record["errors"], record["errors"]
        seen = numbers(record["rows"])
        assert torch.isfinite(seen).all(), rank
        tolerance = 1e-2 if "half" in case else 1e-5
        torch.testing.assert_close(seen, expected[rank].double(), atol=tolerance, rtol=0)


@pytest.mark.parametrize("case", [case for case in CASES if case["name"].split("-")[0] not in ("means", "unchecked")])
def test_the_worker_that_diverged_hears_which_parameter_and_when(case, records):
    errors = records[case["name"]][BAD[0]]["errors"]
    first = SENT + 1 if case["name"] == "local" else SENT - 1 if case.get("order") == "atc" else SENT
    first = SENT if case["name"] in ("edges-atc", "auto") else first
    step = min(map(int, errors))
    assert step == first
    assert errors[str(step)].startswith(
        f"rank 2: parameter 'second.weight' is not finite at step {step}; the other workers have not"
    )


@pytest.mark.parametrize("name", ["8-bits", "auto"])
def test_means_in_few_bits_that_are_not_finite_are_not_taken_and_neither_is_the_next_one(name, records):
    atc = name == "auto"
    for rank, record in enumerate(records[name]):
        if rank == BAD[0]:
            continue
        seen = numbers(record["rows"])
        assert torch.isfinite(seen).all()
        for step in range(SENT, STEPS):
            step_taken = torch.cat([g.flatten() for g in gradients(list(Net(0, False).parameters()), rank, step)])
            torch.testing.assert_close(seen[step], seen[step - 1] - RATE * step_taken.double(), atol=1e-6, rtol=0)
    together = torch.stack(
        [numbers(record["rows"])[SENT - 1] for record in records[name] if record is not records[name][BAD[0]]]
    )
    assert bool((together == together[0]).all()) == atc  # there was a mean of all before


def test_a_mean_of_parameters_that_are_not_finite_is_an_error_on_all_workers(records):
    for rank, record in enumerate(records["means"]):
        assert math.isnan(record["mean"])  # of a person's own value: a loss that is NaN shall be seen
        for what, name in (("consensus", "consensus()"), ("save", "consensus()"), ("average", "average_()")):
            assert record[what].startswith(f"{name}: parameters of rank 2 are not finite"), record[what]
            assert ("second.weight" in record[what]) == (rank == 2)
        if rank != 2:
            assert record["after"] == record["before"]


def test_without_the_check_they_spread_as_they_always_did(records):
    for name in ("unchecked", "unchecked-edges"):
        for record in records[name]:
            assert not record["errors"]
            assert not torch.isfinite(numbers(record["rows"])[-1]).all()


def test_sums_are_only_a_hint():
    huge = torch.full((8,), 3e38)
    assert not torch.isfinite(huge.sum())
    assert finite(huge)
    assert finite(torch.full((70_000,), 2.0).half())
    assert not finite(torch.tensor([1.0, math.inf, -math.inf]))
    assert not finite(torch.tensor([1.0, -math.inf]).half())
    assert not finite(torch.tensor([1.0, math.nan]).bfloat16())
    module = Net(0, False)
    block = Block([(name, p, False) for name, p in module.named_parameters()], 1, torch.device("cpu"))
    block.tensors(block.x)["second.bias"][0, 1] = math.inf
    assert culprit(block, block.x[0]) == "second.bias"


def test_a_sender_looks_at_all_of_a_long_row_in_turns():
    row, short = torch.zeros((1 << 18) + 5), torch.zeros(1 << 18)
    for turn in range(3, 11):
        assert len(share(row, turn)) < len(row) / 7
        share(row, turn).fill_(1.0)
    assert bool(row.all())
    assert share(short, 3) is short


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_copy_is_marked_where_any_number_is_not_finite(dtype):
    row, out = torch.randn(2 * (1 << 18) + 5), torch.empty(2 * (1 << 18) + 5, dtype=dtype)
    copy(row, out)
    assert torch.equal(out, row.to(dtype))
    copy(torch.full_like(row, 6e4), out)  # the sum of these is not finite in half precision
    assert torch.equal(out, torch.full_like(row, 6e4).to(dtype))
    for place, bad in ((0, math.nan), (1 << 18, math.inf), (len(row) - 1, -math.inf)):
        spoiled = row.clone()
        spoiled[place] = bad
        copy(spoiled, out)
        assert bool(out.isnan().all())


def test_a_row_that_is_left_out_changes_nothing_else():
    """The weights of the others stay what they were, to the bit."""
    x, a, out = torch.randn(3, 100_000)
    mixing.blend(x, 0.25 + 0.5, [(0.25, a)], out)
    assert torch.equal(out, torch.lerp(x, a, 0.25))


def launch(out, n, graph, steps, bad, options=(), **case):
    case = {"name": "launched", "graph": graph, "steps": steps, "bad": bad, "ends": True} | case
    env = os.environ | {"PYTHONPATH": f"{workers.ROOT / 'src'}:{workers.ROOT}", "OMP_NUM_THREADS": "1"}
    driver = ["-m", "tests.finite_driver", str(out), json.dumps([case])]
    job = in_fork("launch", "-n", n, *options, *driver, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    try:
        output = job.communicate(timeout=60)[0]
    finally:
        job.kill()
    said = {rank: json.loads(path.read_text()) for rank in range(n) if (path := out / f"launched.{rank}.json").exists()}
    return job.returncode, output, said


@pytest.mark.parametrize("graph", ["one-peer-exponential", "periodic:every=1,bits=8"])
def test_under_launch_it_comes_back_with_the_state_of_another(graph, tmp_path):
    code, out, records = launch(tmp_path, 3, graph, 400, [[1, 50]], last=True)
    assert code == 0, out
    assert "rank 1: parameter 'second.weight' is not finite at step 51; it has taken over the state of rank" in out
    assert out.count("is not finite") == 1, out
    for rank, record in records.items():
        steps = {int(step): numbers for step, numbers in record["rows"].items()}
        sound = [step for step, row in steps.items() if all(map(math.isfinite, row))]
        assert 399 in sound
        assert len(steps) - len(sound) == (2 if rank == 1 else 0)  # steps 50 and 51
        assert not record["errors"]
        assert record["consensus"] is record["save"] is record["average"] is None
        assert all(map(math.isfinite, record["after"]))
    assert any(
        "without 1 (has diverged: 'second.weight' is not finite at step 51)" in change for change in records[0]["changes"]
    )
    assert records[0]["after"] == records[1]["after"] == records[2]["after"]


def test_under_launch_it_gives_up_at_the_second_time_and_means_are_those_of_the_others(tmp_path):
    """Rank 1 diverges once more soon after its return. Rank 0 does so in the last step, and is found by ``consensus()``."""
    code, out, records = launch(tmp_path, 3, "one-peer-exponential", 400, [[1, 50], [0, 399]], again=20, last=True)
    assert code == 0, out
    assert out.count("it has taken over the state of rank") == 1, out
    assert "and does so once only in 100" in out
    assert f"parameter 'second.weight' is not finite at step {min(map(int, records[1]['errors']))}" in out
    assert "lost: rank 1" in out
    assert math.isnan(records[0]["mean"])
    assert math.isnan(records[2]["mean"])
    assert "rank 0 takes no part until its next training step, and saves nothing" in out
    for what, name in (("consensus", "consensus()"), ("average", "average_()")):
        assert records[0][what].startswith("rank 0 has diverged: 'second.weight' is not finite"), records[0][what]
        assert f"it has no result of {name}" in records[0][what]
        assert records[2][what] is None
    assert records[2]["save"] is None
    assert all(map(math.isfinite, records[2]["after"]))


def test_under_launch_a_job_whose_workers_have_all_diverged_ends(tmp_path):
    code, out, _ = launch(tmp_path, 2, "one-peer-exponential", 400, [[0, 30], [1, 30]], ["--restart", "3"])
    assert code == 1, out
    for rank in range(2):
        assert out.count(f"rank {rank}: parameter 'second.weight' is not finite at step 31; no worker is left") == 1, out
    assert "started again" not in out
    assert "taken over" not in out
