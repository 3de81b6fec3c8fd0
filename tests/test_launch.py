"""``gossamer launch``: exit codes, what is started again, ends before training has begun, a store that is silent.

Real processes and real signals. The workers are shell commands wherever nothing is trained.
"""

import io
import os
import re
import signal
import socket
import subprocess
import sys
import time

import pytest

from gossamer.members.launch import Job, Launcher
from tests import commands
from tests.workers import ROOT

ENV = os.environ | {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", "OMP_NUM_THREADS": "1"}


def run(workers, *command, **options):
    """In this process, whose start takes seconds: the outcome, what was printed, and the seconds it took."""
    out, began = io.StringIO(), time.monotonic()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", ENV["PYTHONPATH"])
        outcome = Launcher(Job(tuple(map(str, command)), workers, **options), out).run()
    return outcome, out.getvalue(), time.monotonic() - began


@pytest.fixture
def launch():
    """A launcher as a process of its own."""
    started = []

    def start(*arguments):
        command = [sys.executable, "-m", "gossamer", "launch", *map(str, arguments)]
        started.append(subprocess.Popen(command, env=ENV, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()


def two_hosts():
    """Options of the second launcher, which may run in this process, and arguments of both."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    return {"nodes": 2, "node": 1, "address": address}, ["--nodes", 2, "--address", address, "--node"]


# --- Exit codes ---------------------------------------------------------------------------------------------------------------

FAIL_BY_RANK = ["sh", "-c", "sleep 0.$RANK; exit $RANK"]


def test_the_exit_code_is_that_of_the_first_failure_if_too_few_workers_finish():
    outcome, out, _ = run(4, *FAIL_BY_RANK)
    assert outcome.exit_code == 1
    assert "gossamer: ended with exit code 1: 1 of 4 workers finished, and --min-workers is 2; lost: rank 1, 2, 3\n" in out
    outcome, out, _ = run(4, *FAIL_BY_RANK, min_workers=1)
    assert outcome.exit_code == 0
    assert "gossamer: finished: rank 0; lost: rank 1, 2, 3\n" in out


def test_half_of_the_workers_must_finish_by_default():
    assert [Job(("true",), n).enough for n in (1, 2, 3, 4)] == [1, 1, 2, 2]
    assert run(2, "sh", "-c", "kill -9 $$")[0].exit_code == 9
    assert run(2, "true")[1] == ""  # nothing happened, so there is nothing to say


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--min-workers 3", "--min-workers 3 is out of range: from 1 to 2, the workers of this host"),
        ("--min-workers 0", "--min-workers 0 is out of range"),
        ("--restart -1", "--restart -1: how many times a worker may be started again, so at least 0"),
        ("--evict-after nan", "--evict-after nan: hearts beat once a second, so it is at least 3"),
        ("--address 127.0.0.1:99999", "--address 127.0.0.1:99999: a port is at most 65535"),
        ("--address nowhere", "--address 'nowhere' is not HOST:PORT"),
    ],
)
def test_mistakes_are_refused_in_one_line(arguments, message):
    result = commands.inside("launch", *arguments.split(), "true")
    assert result.returncode == 2
    assert result.stderr.startswith(f"gossamer: {message}")
    assert result.stderr.count("\n") == 1


# --- What is started again ----------------------------------------------------------------------------------------------------


def test_a_worker_is_started_again_though_another_has_finished(tmp_path):
    """Rank 0 has finished when rank 1 fails; rank 2 still runs."""
    code = (
        f"case $RANK in 0) exit 0;; 1) sleep 0.3; [ -e {tmp_path}/x ] || {{ touch {tmp_path}/x; exit 5; }};; 2) sleep 1;; esac"
    )
    outcome, out, _ = run(3, "sh", "-c", code, restart=1)
    assert outcome.exit_code == 0
    assert outcome.finished == [0, 1, 2], out
    assert out.count("rank 1 is started again") == 2, out


def test_the_last_worker_that_runs_is_not_started_again():
    outcome, out, _ = run(2, "sh", "-c", "[ $RANK = 0 ] || { sleep 0.3; exit 3; }", restart=5)
    assert outcome.exit_code == 0, out
    assert (outcome.finished, outcome.lost) == ([0], [1])
    assert "started again" not in out


TRAIN = """
import os, time, tests.no_compiler, torch, gossamer
torch.set_num_threads(1)
first, rank = int(os.environ["GOSSAMER_TICKET"]) < {n} and os.environ["GOSSAMER_GENERATION"] == "0", int(os.environ["RANK"])
def point(name):
    if name == {point!r} and rank == {rank} and first:
        print("reached", flush=True)
        {action}
point("before")
model = gossamer.DecentralizedDataParallel(torch.nn.Linear(4, 4), timeout={timeout})
optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
point("wrapped")
model.gossip(optimizer)
while model.steps < {steps} or {wait}:
    optimizer.zero_grad(); model(torch.randn(2, 4)).sum().backward(); optimizer.step(); time.sleep(0.01)
    if model.steps == 10: point("training")
print("trained with", model.members, flush=True)
"""
KILL = "os.kill(os.getpid(), 9)"


def script(folder, n, point, rank, action=KILL, timeout=30, steps=20, wait="False"):
    """Trains; ``rank`` does ``action`` when it first comes to a point. ``wait``: train on while this is so."""
    path = folder / "train.py"
    path.write_text(TRAIN.format(n=n, point=point, rank=rank, action=action, timeout=timeout, steps=steps, wait=wait))
    return path


def test_the_only_worker_of_a_host_comes_back(tmp_path, launch):
    options, place = two_hosts()
    path = script(tmp_path, 2, "training", 1, wait="model.members != (0, 1) or rank + len(model.changes) == 0")
    first = launch(*place, 0, "-n", 1, "--restart", 3, path)
    outcome, out, _ = run(1, sys.executable, path, restart=3, **options)
    assert outcome.exit_code == 0, out
    assert "[1] trained with (0, 1)" in out
    assert out.count("rank 1 is started again") == 2, out  # as it happens, and in the summary
    out = first.communicate(timeout=100)[0]
    assert first.returncode == 0, out
    own = [line for line in out.splitlines() if line.startswith("[") and not line.startswith("[0] gossamer: ")]
    assert own == ["[0] trained with (0, 1)"]
    assert "rank 1" not in out.partition("gossamer: what happened:")[2]  # each launcher tells of its own workers


def test_a_return_is_said_by_the_worker_and_by_the_launcher(tmp_path):
    path = script(tmp_path, 2, "training", 1, wait="model.members != (0, 1) or rank + len(model.changes) == 0")
    outcome, out, _ = run(2, sys.executable, path, restart=1)
    assert outcome.exit_code == 0, out
    assert re.search(r"\[1\] gossamer: rank 1 has joined the others at step \d+; a counter of the script's own", out), out
    assert "has joined" not in "".join(line for line in out.splitlines(keepends=True) if line.startswith("[0]"))
    summary = out.partition("gossamer: what happened:")[2]
    assert re.search(r"rank 1 was killed.*rank 1 is started again.*rank 1 has joined the others", summary, re.DOTALL), out


def test_a_worker_that_comes_back_too_late_changes_nothing(tmp_path):
    outcome, out, _ = run(2, sys.executable, script(tmp_path, 2, "training", 1, steps=12), restart=5)
    assert outcome.exit_code == 0, out
    assert (outcome.finished, outcome.lost) == ([0], [1])
    assert out.count("rank 1 is started again") == 2, out
    assert "gossamer: finished: rank 0; lost: rank 1\n" in out


def test_a_worker_that_is_left_alone_says_so_once_and_the_launcher_too(tmp_path):
    wait = "rank == 0 and (not model.changes or model.steps < model.changes[-1].step + 5)"
    outcome, out, _ = run(2, sys.executable, script(tmp_path, 2, "training", 1, wait=wait))
    assert outcome.exit_code == 0, out
    assert "[0] trained with (0,)" in out
    (said,) = re.findall(r"\[0\] gossamer: .*", out)
    assert re.search(r"rank 1 was killed by SIGKILL: rank 0 trains alone from step \d+ on$", said), out
    assert [what for _, what in outcome.happened] == ["rank 1 was killed by SIGKILL", said.rpartition(": ")[2]]


# --- Before training has begun --------------------------------------------------------------------------------------------------


def test_a_death_between_wrap_and_gossip_is_an_error_on_all_others(tmp_path):
    outcome, out, _ = run(3, sys.executable, script(tmp_path, 3, "wrapped", 0, timeout=100))
    assert outcome.exit_code == 9, out
    for rank in (1, 2):
        assert f"GossamerError: rank {rank}: rank 0 was killed by SIGKILL before training began" in out
    when = {what: at for at, what in outcome.happened}
    assert max(when.values()) - when["rank 0 was killed by SIGKILL"] < 5, out
    assert outcome.lost == [0, 1, 2]


def test_after_a_death_before_gossip_the_whole_job_starts_again_on_all_hosts(tmp_path, launch):
    options, place = two_hosts()
    path = script(tmp_path, 2, "wrapped", 0, timeout=100)
    first = launch(*place, 0, "-n", 1, "--restart", 1, path)
    outcome, second, _ = run(1, sys.executable, path, restart=1, **options)
    out = first.communicate(timeout=100)[0]
    assert (first.returncode, outcome.exit_code) == (0, 0), out + second
    for rank, said in enumerate((out, second)):
        assert f"[{rank}] trained with (0, 1)" in said
        assert "all workers are started again: there is no training that one of them could join" in said


def test_a_worker_that_hangs_before_gossip_does_not_hold_the_launcher(tmp_path):
    outcome, out, _ = run(2, sys.executable, script(tmp_path, 2, "before", 1, "time.sleep(1000)", timeout=3))
    assert outcome.exit_code == 1, out
    assert "rank 0: rank 1 of 2 did not arrive within 3 s" in out
    assert "training never began, and rank 1 still runs; it is ended" in out
    assert "rank 1 was killed by SIGTERM" in out


def test_plain_programs_are_left_alone_when_one_fails():
    outcome, out, _ = run(3, "sh", "-c", "[ $RANK = 0 ] && exit 4; sleep 1.5; echo still here")
    assert outcome.exit_code == 0, out
    assert out.count("still here") == 2


DISAGREE = """
import os, torch
from gossamer.members.store import open_link
open_link(torch.device("cpu"), 20).agree({"graph": "ring" + os.environ["RANK"]})
"""


def test_workers_that_do_not_fit_together_are_not_started_again():
    outcome, out, _ = run(2, sys.executable, "-c", DISAGREE, restart=3)
    assert outcome.exit_code == 1
    for rank in (0, 1):
        assert f"GossamerError: rank {rank}: graph differs between ranks: ring0 on rank 0; ring1 on rank 1" in out
    assert "started again" not in out


MISMATCH = """
import os, random, time
from datetime import timedelta
import torch, torch.distributed as dist
from gossamer.errors import GossamerError
from gossamer.transport.link import Link

n, runs = 3, 20
def worker(rank, port, pipe):
    try:
        store = dist.TCPStore("127.0.0.1", port, is_master=rank == 0, wait_for_workers=False, timeout=timedelta(seconds=20))
        link = Link(store, rank, n, 20.0, name="test")
        time.sleep(random.random() / 20)
        link.agree({"graph": "ring" if rank == 1 else "complete"})
    except Exception as error:
        os.write(pipe, f"{rank}: {type(error).__name__}: {error}|".encode())
    os._exit(0)  # at once, and rank 0 takes the store with it

for run in range(runs):
    with __import__("socket").socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    read, write = os.pipe()
    pids = []
    for rank in range(n):
        pids.append(os.fork())
        if not pids[-1]:
            random.seed(run * n + rank)
            worker(rank, port, write)
    for pid in pids:
        os.waitpid(pid, 0)
    os.close(write)
    print(*sorted(os.read(read, 1 << 16).decode().split("|")), sep="|", flush=True)
"""


def test_every_rank_names_the_mismatch_though_rank_0_takes_the_store_with_it():
    result = subprocess.run([sys.executable, "-c", MISMATCH], env=ENV, capture_output=True, text=True, timeout=120)
    verdict = "graph differs between ranks: complete on ranks 0, 2; ring on rank 1"
    lines = result.stdout.splitlines()
    assert len(lines) == 20, result.stderr
    for line in lines:
        assert line == "|" + "|".join(f"{rank}: GossamerError: rank {rank}: {verdict}" for rank in range(3))


# --- Signals --------------------------------------------------------------------------------------------------------------------


def lives(pid):
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().split()[2] != "Z"
    except FileNotFoundError:
        return False


def test_ctrl_c_works_when_the_store_is_silent(launch):
    """The first launcher, which has the store, is stopped. The second one's worker is a shell with a child."""
    _, place = two_hosts()
    first = launch(*place, 0, "-n", 1, "sh", "-c", "echo pid $$; exec sleep 100")
    second = launch(
        *place, 1, "-n", 1, "--restart", 1, "sh", "-c", "sleep 100 & echo pid $!; while :; do echo tick; sleep 0.1; done"
    )
    pids = [int(re.search(r"pid (\d+)", job.stdout.readline())[1]) for job in (first, second)]
    time.sleep(1.5)  # some looks at the store
    first.send_signal(signal.SIGSTOP)
    time.sleep(1.5)
    began = time.monotonic()
    second.send_signal(signal.SIGINT)
    out = second.communicate(timeout=20)[0]
    assert time.monotonic() - began < 3, out
    assert second.returncode == 130
    assert out.count("tick") > 20, out  # output went on
    first.send_signal(signal.SIGCONT)
    first.send_signal(signal.SIGINT)
    began = time.monotonic()
    first.communicate(timeout=20)
    assert time.monotonic() - began < 3
    assert first.returncode == 130
    assert not any(map(lives, pids)), "no process is left, not even a child of a worker"
