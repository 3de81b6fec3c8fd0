"""What was logged, read back with each logger's own reader."""

import json
import os
import struct
import subprocess
import sys

import pytest

from tests import workers
from tests.workers import ROOT


@pytest.fixture(scope="module")
def logged(tmp_path_factory):
    folder = tmp_path_factory.mktemp("loggers")
    env = {"TRACKIO_DIR": str(folder / "trackio"), "WANDB_SILENT": "true"}
    done = workers.run_ok(2, ["-m", "tests.extras.loggers_driver", folder], env)
    assert not any("is logged there" in worker.err or "left out" in worker.err for worker in done), done[0].err
    assert json.loads((folder / "told-1.json").read_text()) == []  # rank 0 leads
    return folder, json.loads((folder / "told-0.json").read_text())


def numbers(told):
    """{key: {step: value}}, and the text apart."""
    scalars, texts = {}, {}
    for step, entry in told:
        for key, value in entry.items():
            (texts if isinstance(value, str) else scalars).setdefault(key, {})[step] = value
    return scalars, texts


def test_what_was_told(logged):
    scalars, texts = numbers(logged[1])
    assert texts == {"gossamer/graph": {0: "ring"}}
    assert list(scalars["gossamer/exposed_wait_ms"]) == [0, 1, 2, 3, 4]
    assert list(scalars["gossamer/consensus_distance"]) == [0, 2, 4]
    assert scalars["gossamer/members"][0] == 2


def test_tensorboard(logged):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder, told = logged
    scalars, texts = numbers(told)
    read = EventAccumulator(str(folder / "tensorboard"))
    read.Reload()
    found = {key: {event.step: event.value for event in read.Scalars(key)} for key in read.Tags()["scalars"]}
    assert found.keys() == scalars.keys()
    assert all(found[key] == pytest.approx(scalars[key], rel=1e-6) for key in scalars)  # it keeps float32
    (event,) = read.Tensors("gossamer/graph/text_summary")
    assert event.tensor_proto.string_val == [texts["gossamer/graph"][0].encode()]


def records(path):
    """Of a file of Weights & Biases: after 7 bytes, blocks of 32 KB with pieces of records (whole, first, middle, last)."""
    data, at, parts = path.read_bytes(), 7, b""
    assert data[:4] == b":W&B"
    while at + 7 <= len(data):
        if (left := -at % 32768) < 7 and left:
            at += left
            continue
        _, size, kind = struct.unpack("<IHB", data[at : at + 7])
        parts, at = parts + data[at + 7 : at + 7 + size], at + 7 + size
        if kind in (1, 4):
            yield parts
            parts = b""


def test_wandb_offline(logged):
    """Its package reads these files in a program of its own only; the records are its own."""
    from wandb.proto.wandb_internal_pb2 import Record

    folder, told = logged
    (path,) = folder.glob("wandb/offline-run-*/*.wandb")
    found = {}
    for data in records(path):
        record = Record()
        record.ParseFromString(data)
        if record.WhichOneof("record_type") == "history":
            entry = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
            step = entry.get("_step", record.history.step.num)
            found[step] = {key: value for key, value in entry.items() if not key.startswith("_")}
    assert found == dict(told)


def test_mlflow(logged, monkeypatch):
    from mlflow import MlflowClient

    folder, told = logged
    scalars, texts = numbers(told)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    client = MlflowClient((folder / "mlflow").as_uri())
    (run,) = client.search_runs([client.get_experiment_by_name("gossip").experiment_id])
    assert run.info.status == "FINISHED"
    assert run.data.tags["mlflow.runName"] == "first"
    assert run.data.tags["gossamer/graph"] == texts["gossamer/graph"][0]
    for key, values in scalars.items():
        assert {metric.step: metric.value for metric in client.get_metric_history(run.info.run_id, key)} == values


def test_trackio(logged):
    """In a process of its own: it reads the folder of this one's environment."""
    folder, told = logged
    code = (
        "import json; from trackio.sqlite_storage import SQLiteStorage as s; print(json.dumps(s.get_logs('gossip', 'first')))"
    )
    env = os.environ | {"TRACKIO_DIR": str(folder / "trackio")}
    read = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env)
    assert read.returncode == 0, read.stderr
    entries = {entry.pop("step"): entry for entry in json.loads(read.stdout.splitlines()[-1])}
    found = {
        step: {key: value for key, value in entry.items() if key.startswith("gossamer/")} for step, entry in entries.items()
    }
    assert found == dict(told)


def test_a_bench_logs_each_of_its_runs(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    spec = tmp_path / "spec.toml"
    spec.write_text(
        'name = "logged"\nreplicas = [4]\nmethods = ["ring", "complete"]\nseeds = [0]\nbackend = "tape"\n'
        '[task]\nname = "digits/mlp"\nepochs = 2\nbatch = 16\n[profile]\nevery = 5\n'
    )
    command = [
        sys.executable,
        "-m",
        "gossamer",
        "bench",
        spec,
        "--out",
        tmp_path / "out",
        "--jobs",
        "2",
        "--log",
        "tensorboard",
    ]
    done = subprocess.run(list(map(str, command)), cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    rows = json.loads(
        subprocess.run(
            [sys.executable, "-m", "gossamer", "results", str(tmp_path / "out"), "--json"], capture_output=True, text=True
        ).stdout
    )
    for row in rows:
        read = EventAccumulator(str(tmp_path / "out" / "tensorboard" / f"{row['method']}-n4-seed0"))
        read.Reload()
        accuracies = read.Scalars("gossamer/accuracy")
        assert [event.step for event in accuracies] == [row["steps"] // 2, row["steps"]]
        assert accuracies[-1].value == pytest.approx(row["value"])
        assert [event.step for event in read.Scalars("gossamer/consensus_distance")] == list(range(0, row["steps"], 5))
        assert read.Scalars("gossamer/train_loss")[-1].value > 0
