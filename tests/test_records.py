"""The file of a running cell: what is in it after a kill, after damage, and for another store."""

import os
import random
import signal
import time

import torch

from gossamer.dbench.records import Number, RecordFile, Rows
from gossamer.rows.profile import Profile
from gossamer.schedules import Change
from gossamer.trainer import EpochRecord
from tests.commands import forked

KILLS = 50


def rows(k):
    """What the k-th frame adds."""
    profile = Profile(k, 0, torch.full((3, 200), float(k)), 0.5, 4 * k)
    return Rows([profile], [EpochRecord(k, k, 0.1, 1.5, 0.5, "ring", 2.0, 8, float("nan"), 0.1)], [], [Number(k, "far", None)])


def begun(path, store="this one"):
    file = RecordFile(path, store)
    file.begin({"cpu": "some"}, "tape", 1, ["weight", "bias"])
    return file


def epochs(record):
    return [epoch.epoch for epoch in record.rows.epochs]


def test_what_is_written_is_read(tmp_path):
    file = begun(tmp_path / "1.records")
    file.add(rows(0))
    file.note("checkpoint", "damaged")
    running = RecordFile(file.path, "this one").read()
    assert not running.finished
    file.finish("done", None, {"value": 0.25, "value_own": None}, Rows(changes=[Change(0, 0, "ring", "the start")]))
    record = RecordFile(file.path, "this one").read()
    assert record.finished
    assert record.begun == {"machine": {"cpu": "some"}, "backend": "tape", "threads": 1, "tensors": ["weight", "bias"]}
    assert (record.status, record.message, record.result) == ("done", None, {"value": 0.25, "value_own": None})
    assert record.notes == [("checkpoint", "damaged")]
    assert record.rows.changes == [Change(0, 0, "ring", "the start")]
    assert record.rows.numbers == [Number(0, "far", None)]
    assert torch.equal(record.rows.profiles[0].norms, rows(0).profiles[0].norms)
    assert RecordFile(file.path, "another one").read() is None
    assert RecordFile(tmp_path / "2.records", "this one").read() is None
    file.begin({}, "tape", 1, [])
    assert epochs(file.read()) == []


def test_after_a_torn_or_damaged_frame_it_goes_on_with_what_is_right(tmp_path):
    file = begun(tmp_path / "1.records")
    ends = [file._end]
    for k in range(4):
        file.add(rows(k))
        ends.append(file._end)
    whole = file.path.read_bytes()
    for cut in random.Random(1).sample(range(len(whole)), 100):
        record = RecordFile(file.path, "this one").parse(whole[:cut])
        count = sum(end <= cut for end in ends)
        assert (record is None) if not count else epochs(record) == list(range(count - 1))
    file.path.write_bytes(whole[: ends[2] + 40] + b"x" + whole[ends[2] + 41 :])
    again = RecordFile(file.path, "this one")
    assert epochs(again.read()) == [0, 1]
    again.add(rows(7))
    assert epochs(RecordFile(file.path, "this one").read()) == [0, 1, 7]


def _write(path):
    """Without end, and each time what was announced before."""
    file = RecordFile(path, "this one")
    record = file.read()
    k = len(epochs(record))
    while True:
        file.add(rows(k))
        k += 1
        (path.parent / "sure").write_text(str(k))


def test_it_survives_kills_at_random_moments_of_writing(tmp_path):
    """All that was said to be written is there, in order."""
    file, chance, seen = begun(tmp_path / "1.records"), random.Random(3), 0
    for _ in range(KILLS):
        (tmp_path / "sure").unlink(missing_ok=True)
        writer = forked(_write, file.path)
        while not (tmp_path / "sure").exists():
            assert writer.poll() is None
            time.sleep(0.001)
        time.sleep(chance.uniform(0, 0.01))
        os.kill(writer.pid, signal.SIGKILL)
        writer.wait()
        found = epochs(file.read())
        assert found == list(range(len(found)))
        assert len(found) >= max(seen, int((tmp_path / "sure").read_text() or 0))
        seen = len(found)
    assert seen >= KILLS
