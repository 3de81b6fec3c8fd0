"""Real workers under ``gossamer launch`` are killed, stopped and started again. What they do is in survival_driver.py."""

import contextlib
import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import time

import pytest

from gossamer.checkpoints.shards import whole_steps
from tests.commands import in_fork
from tests.workers import ROOT


class Campaign:
    """A running job, seen from outside."""

    def __init__(self, folder, n, graph, steps=1_000_000, pause=0.015, launch=(), options=()):
        folder.mkdir(exist_ok=True)
        self.start(folder, n, launch, ["-m", "tests.survival_driver", str(folder), graph, str(steps), str(pause), *options])

    def start(self, folder, n, launch, driver):
        self.folder = folder
        env = os.environ | {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", "OMP_NUM_THREADS": "1"}
        self.process = in_fork("launch", "-n", n, *launch, *driver, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self.process.poll() is None:
            self.process.kill()
        if not self.process.stdout.closed:
            self.process.communicate()

    def wait_for(self, what, seconds=40):
        deadline = time.monotonic() + seconds
        while not (found := what()):
            if self.process.poll() is not None or time.monotonic() > deadline:
                self.process.kill()
                raise AssertionError(f"it did not come to that:\n{self.process.communicate()[0]}")
            time.sleep(0.01)
        return found

    def pid(self, rank):
        """Of the newest process of this rank that has trained; None if there is none, or it is gone."""
        pids = sorted(int(path.name.split(".")[1]) for path in self.folder.glob(f"rank-{rank}.*.pid"))
        return pids[-1] if pids and os.path.exists(f"/proc/{pids[-1]}") else None

    def kill(self, *ranks, with_=signal.SIGKILL):
        pids = [self.wait_for(lambda rank=rank: self.pid(rank)) for rank in ranks]
        for pid in pids:
            os.kill(pid, with_)
        return pids

    def step(self):
        """The last that somebody has done."""
        steps = [path.read_text() for path in self.folder.glob("*.step")]
        return max((int(step) for step in steps if step), default=0)

    def finish(self, more=60, seconds=60):
        """All stop, some steps from now."""
        (self.folder / "new").write_text(str(self.step() + more))
        (self.folder / "new").rename(self.folder / "last")
        out = self.process.communicate(timeout=seconds)[0]
        records = [json.loads(path.read_text()) for path in self.folder.glob("*.json")]
        return out, {record["rank"]: record for record in records}


def held(record, since=0.0):
    """The longest step of a worker, and when."""
    return max((seconds, step) for step, began, seconds in record["times"] if began >= since)


def started(job, n):
    for rank in range(n):
        job.wait_for(lambda rank=rank: job.pid(rank))


def test_workers_die_hang_are_late_and_come_back(tmp_path):
    """One job, because starting processes is what takes time here. Its graph moves rows by edges and by slices in turn."""
    with Campaign(
        tmp_path, 5, "base:k=2", launch=["--restart", "2", "--evict-after", "4"], options=["slow=1,20,5", "later=1"]
    ) as job:
        for rank in range(5):
            job.wait_for(lambda rank=rank: job.pid(rank))
        job.wait_for(lambda: job.step() >= 30)  # rank 1 was late, by more than the time after which a silent one is evicted
        old = job.kill(0)
        time.sleep(0.1)
        old += job.kill(2, 3)  # two at once, while the change is under way or just over
        for rank in (0, 2, 3):
            job.wait_for(lambda rank=rank: job.pid(rank) not in (None, *old))
        (stopped,) = job.kill(4, with_=signal.SIGSTOP)
        before = job.step()
        job.wait_for(lambda: job.step() > before + 40)
        os.kill(stopped, signal.SIGCONT)
        path, now = tmp_path / f"rank-4.{stopped}.step", job.step()
        job.wait_for(lambda: int(path.read_text() or 0) > now)  # it has joined
        out, records = job.finish()
    assert job.process.returncode == 0, out
    assert sorted(records) == [0, 1, 2, 3, 4], out
    for rank, record in records.items():
        assert not record["wrong"], (rank, record["wrong"], out)
        assert record["members"] == [0, 1, 2, 3, 4], out
        assert record["mean"] == 2.0
    assert len({(record["value"], record["ended"]) for record in records.values()}) == 1
    for rank in (0, 2, 3, 4):
        assert records[rank]["changes"][-1 if rank == 4 else 0][5], "it has joined"
        assert records[rank]["momentum"]
    lost = {rank: why for change in records[1]["changes"] for rank, why in change[3].items()}
    assert lost == dict.fromkeys("023", "was killed by SIGKILL") | {"4": "no heartbeat for 4 s"}, out
    assert len([rank for change in records[1]["changes"] for rank in change[3]]) == 4  # nobody else was given up
    assert out.count("was killed by SIGKILL") == 6, out  # as it happens, and in the summary
    assert "terminate called" not in out, out
    # What was saved in the background is whole in the end, and what is older is gone.
    (step, size), *others = whole_steps(tmp_path / "later")
    assert size == 5
    assert len(others) <= 3
    assert step > records[1]["ended"] - 100


def test_a_host_that_is_gone_and_the_store_with_it(tmp_path):
    """Two launchers, as on two hosts. The first has the store; the workers of the other go on without both."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        place = ["--nodes", "2", "--address", f"127.0.0.1:{free.getsockname()[1]}", "--node"]
    with Campaign(tmp_path, 2, "one-peer-exponential", launch=[*place, "0"]) as first:
        time.sleep(1)
        with Campaign(tmp_path, 2, "one-peer-exponential", launch=[*place, "1"]) as second:
            for rank in range(4):
                first.wait_for(lambda rank=rank: second.pid(rank))
            first.process.kill()
            out, records = second.finish(more=200)
    assert second.process.returncode == 0, out
    assert sorted(records) == [2, 3], out
    assert not any(record["wrong"] for record in records.values()), ({r: v["wrong"][:9] for r, v in records.items()}, out)
    assert all(record["mean"] == 2.5 for record in records.values())  # the workers that are left still agree
    assert out.count("the store is gone") == 2, out
    assert "terminate called" not in out, out


def test_more_workers_join_a_job_with_the_default_graph_and_checkpoints(tmp_path):
    """The graph that ``auto`` is follows from the workers of the start, also for those who join; they take no state from a checkpoint."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        place = ["--address", f"127.0.0.1:{free.getsockname()[1]}"]
    with Campaign(tmp_path, 2, "auto", launch=place, options=["saves=1"]) as first:
        started(first, 2)
        first.wait_for(lambda: first.step() >= 30)
        with Campaign(tmp_path, 2, "auto", launch=["--join", *place], options=["saves=1"]) as second:
            for rank in (2, 3):
                second.wait_for(lambda rank=rank: second.pid(rank))
            out, records = first.finish(more=200)
            more = second.process.communicate(timeout=60)[0]
    assert first.process.returncode == second.process.returncode == 0, out + more
    records |= {record["rank"]: record for record in (json.loads(path.read_text()) for path in tmp_path.glob("*.json"))}
    assert sorted(records) == [0, 1, 2, 3], out + more
    for record in records.values():
        assert not record["wrong"], (record["wrong"], out, more)
        assert record["members"] == [0, 1, 2, 3]
        assert not record["loaded"]  # nothing was there at the start, and a newcomer gets the state of another


def test_ada_that_decides_by_itself_begins_again_with_those_who_are_there(tmp_path):
    eager = "ada-auto:tolerance=0.65"  # changes its mind in few steps
    with Campaign(tmp_path, 3, eager, launch=["--restart", "1"]) as job:
        started(job, 3)
        job.wait_for(lambda: job.step() >= 60)
        (old,) = job.kill(1)
        job.wait_for(lambda: job.pid(1) not in (None, old))
        now = job.step()
        job.wait_for(lambda: job.step() > now + 60)
        out, records = job.finish()
    assert job.process.returncode == 0, out
    assert sorted(records) == [0, 1, 2], out
    assert not any(record["wrong"] for record in records.values()), (records[0]["wrong"], out)
    assert records[0]["graphs"] == records[2]["graphs"]
    joined = next(step for step, name in records[1]["graphs"] if name == f"{eager} over 3")
    assert [entry for entry in records[0]["graphs"] if entry[0] >= joined] == [
        e for e in records[1]["graphs"] if e[0] >= joined
    ]
    assert f"{eager} over 2" in [name for _, name in records[0]["graphs"]]
    assert len(records[0]["graphs"]) > 3


EARLY = """
import os, torch, gossamer
if os.environ["RANK"] == "1":
    raise SystemExit(3)
gossamer.DecentralizedDataParallel(torch.nn.Linear(2, 2), "ring")
"""


def test_a_death_before_the_start_is_an_error_that_names_it(launch):
    job = launch(EARLY)
    out = job.communicate(timeout=60)[0]
    assert job.returncode == 3, out  # of the first that failed
    assert "GossamerError: rank 0: rank 1 ended with exit code 3 before training began" in out


LAUNCH = "import sys; from gossamer.members.launch import Job, Launcher; sys.exit(Launcher(Job(({}), 2, **{})).run().exit_code)"
WAIT = "import os, time; print(os.getpid(), flush=True); time.sleep(60)"


@pytest.fixture
def launch():
    """Plain programs, which start faster than training does."""
    started = []

    def start(code, **options):
        command = LAUNCH.format(f"{sys.executable!r}, '-c', {code!r}", options)
        env = os.environ | {"PYTHONPATH": str(ROOT / "src")}
        job = subprocess.Popen(
            [sys.executable, "-c", command], env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        started.append(job)
        return job

    yield start
    for job in started:
        job.kill()
        job.communicate()


def lives(pid):
    with contextlib.suppress(FileNotFoundError):
        return pathlib.Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
    return False


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_no_worker_outlives_the_launcher(how, launch):
    job = launch(WAIT)
    pids = [int(job.stdout.readline().split()[1]) for _ in range(2)]
    job.send_signal(how)
    job.communicate(timeout=20)
    assert job.returncode == (130 if how == signal.SIGINT else -9)
    deadline = time.monotonic() + 5
    while any(map(lives, pids)) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not any(map(lives, pids))


def test_the_exit_code_says_whether_anybody_finished(launch):
    one, all_ = launch("import os; raise SystemExit(int(os.environ['RANK']) * 3)"), launch("raise SystemExit(7)", restart=1)
    out = one.communicate(timeout=60)[0]
    assert one.returncode == 0, out
    assert "finished: rank 0; lost: rank 1" in out
    assert "rank 1 ended with exit code 3" in out
    out = all_.communicate(timeout=60)[0]
    assert all_.returncode == 7, out
    assert "ended with exit code 7: 0 of 2 workers finished, and --min-workers is 1; lost: rank 0, 1" in out
