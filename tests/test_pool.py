"""The pool of workers itself: a case that fails, in whatever way, is reported, and the next one passes."""

import os
import signal
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from tests.pool import Pool, by_size, on_workers

# --- Cases, which are called by the tests below ------------------------------------------------------------------------------


@on_workers(2)
def passes(world):
    (world.folder / str(world.rank)).write_text(str(os.getpid()))
    assert os.environ["RANK"] == str(world.rank) == str(dist.get_rank())
    assert os.environ["WORLD_SIZE"] == str(world.size) == str(dist.get_world_size())
    dist.barrier()


@on_workers(3)
def fails_on_rank_1(world):
    print("rank", world.rank, "was here")
    answer = 41 + world.rank
    assert world.rank != 1 or answer == 43


@on_workers(2)
def fails_on_both(world):
    pytest.fail("enough")


@on_workers(2)
def hangs_on_rank_1(world):
    (world.folder / str(world.rank)).write_text(str(os.getpid()))
    if world.rank == 1:
        hang()


def hang():
    while True:
        time.sleep(1)


@on_workers(2)
def waits_in_vain(world):
    if world.rank == 0:
        raise ValueError("rank 1 waits for this one")
    world.gather(torch.zeros(1))


@on_workers(2)
def ends_its_process(world, signal_number):
    if world.rank == 0:
        dist.barrier()
    if signal_number:
        os.kill(os.getpid(), signal_number)
    os._exit(7)


# --- The tests ----------------------------------------------------------------------------------------------------------------


@pytest.fixture
def fails(pool, tmp_path):
    """What pytest shows of a case. The case is run between two that pass."""

    def run(case, size, **options):
        passes(workers=2, pool=pool, tmp_path=tmp_path)
        with pytest.raises(pytest.fail.Exception) as failure:
            case(workers=size, pool=pool, tmp_path=tmp_path, **options)
        passes(workers=2, pool=pool, tmp_path=tmp_path)
        return str(failure.value)

    return run


def test_a_case_that_fails_on_one_rank_is_shown_with_its_line_values_and_output(fails):
    text = fails(fails_on_rank_1, 3)
    assert text.startswith("rank 1: Traceback")
    assert "AssertionError" in text
    assert "assert world.rank != 1 or answer == 43" in text
    assert "(1 != 1 or 42 == 43)" in text
    assert "--- output of rank 1 ---\nrank 1 was here" in text
    assert "rank 0" not in text


def test_an_error_that_all_ranks_have_is_shown_once(fails):
    text = fails(fails_on_both, 2)
    assert text.startswith("ranks 0, 1: Traceback")
    assert text.count("Failed: enough") == 1


def test_a_case_that_hangs_is_ended_and_shown_with_its_stack(pool, tmp_path):
    errors = pool.run(2, hangs_on_rank_1.__wrapped__, {}, tmp_path, limit=2)
    assert list(errors) == [1]
    assert errors[1].startswith("still running after 2 s, the limit of a case")
    assert "in hang\n" in errors[1]
    assert gone(tmp_path)
    passes(workers=2, pool=pool, tmp_path=tmp_path)


def test_a_rank_that_waits_for_one_that_failed_is_not_waited_for(fails):
    text = fails(waits_in_vain, 2)
    assert text.index("rank 0: Traceback") < text.index("rank 1: still running 3 s after the first failure")
    assert "in gather\n" in text


@pytest.mark.parametrize(
    ("signal_number", "how"), [(0, "ended with exit code 7"), (signal.SIGSEGV, "was killed by SIGSEGV")], ids=["exit", "signal"]
)
def test_a_case_that_ends_its_process_is_shown(fails, signal_number, how):
    text = fails(ends_its_process, 2, signal_number=int(signal_number))
    assert f"rank 1: the process {how} in the middle of the case; the case before it in these workers was passes\n" in text
    assert "rank 0: Traceback" in text


def test_workers_are_kept_from_case_to_case_until_another_number_is_asked_for(pool, tmp_path):
    groups = []
    for k, size in enumerate((2, 2, 3, 2)):
        folder = tmp_path / str(k)
        folder.mkdir()
        passes(workers=size, pool=pool, tmp_path=folder)
        groups.append(pids(folder))
    assert groups[0] == groups[1]
    assert [len(group) for group in groups] == [2, 2, 3, 2]
    assert len(set().union(*groups)) == 7


def test_workers_end_with_pytest_also_in_the_middle_of_a_case(tmp_path):
    """pytest's end closes the standard input of the pool's process, as an interrupt does. After an interrupt, another case may run."""
    pool = Pool(preload=())
    pool.send(2, hangs_on_rank_1.__wrapped__, {}, tmp_path, limit=100)
    answers = pool.process.stdout

    def interrupt():
        wait_for(lambda: len(pids(tmp_path)) == 2)
        raise KeyboardInterrupt

    pool.process.stdout = SimpleNamespace(readline=interrupt, close=answers.close)
    with pytest.raises(KeyboardInterrupt):
        pool.run(2, passes.__wrapped__, {}, tmp_path)
    assert pool.process is None
    wait_for(lambda: gone(tmp_path))
    assert pool.run(2, passes.__wrapped__, {}, tmp_path) == {}
    pool.close()
    wait_for(lambda: gone(tmp_path))


def test_workers_end_when_the_pools_process_is_killed(tmp_path):
    pool = Pool(preload=())
    pool.send(2, hangs_on_rank_1.__wrapped__, {}, tmp_path, limit=100)
    wait_for(lambda: len(pids(tmp_path)) == 2)
    pool.process.kill()
    wait_for(lambda: gone(tmp_path))
    with pytest.raises(RuntimeError, match="the pool's process has ended"):
        pool.run(2, passes.__wrapped__, {}, tmp_path)
    assert pool.process is None


def test_cases_are_sorted_by_their_number_of_workers_and_other_tests_keep_their_places():
    def item(name, **parameters):
        fixtures = ["pool"] if parameters else []
        return SimpleNamespace(name=name, fixturenames=fixtures, callspec=SimpleNamespace(params=parameters))

    items = [item("a", workers=3), item("b"), item("c", workers=2), item("d", workers=3), item("e"), item("f", workers=1)]
    by_size(items)
    assert [i.name for i in items] == ["f", "b", "c", "a", "e", "d"]


def pids(folder):
    return {int(path.read_text() or 0) for path in folder.iterdir() if path.name.isdigit() and path.is_file()} - {0}


def gone(folder):
    return not any(Path(f"/proc/{pid}").exists() for pid in pids(folder))


def wait_for(condition, seconds=30):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds} s"
        time.sleep(0.02)
