"""Files that can't lie: damage is found, said in one line, and survived where an older step is there; what does not fit is refused."""

import io
import json
import os
import random
import threading
import types
import warnings
from dataclasses import asdict

import pytest
import safetensors
import safetensors.torch
import torch
from torch import nn

import gossamer
from gossamer import GossamerError, Recipe, Settings, Trainer
from gossamer.checkpoints import checkpoint, shards, snapshot
from gossamer.checkpoints import worker as states
from gossamer.checkpoints.checkpoint import Unreadable
from gossamer.checkpoints.trainer import fingerprint
from gossamer.dbench import bench
from gossamer.dbench import spec as specs
from gossamer.dbench.store import FILE, Store
from gossamer.members.changes import Survival
from gossamer.parallel import state as parts_of_worker
from tests.commands import inside
from tests.models import task

MUTATIONS = 2000


def net(hidden=3):
    return nn.Sequential(nn.Linear(2, hidden), nn.BatchNorm1d(hidden), nn.Linear(hidden, 1))


def wrapped(module=None, optimizer=torch.optim.AdamW, steps=0, **options):
    torch.manual_seed(steps)
    model = gossamer.DecentralizedDataParallel(module or net())
    made = optimizer(model.parameters(), lr=0.01, **options)
    model.gossip(made)
    for _ in range(steps):
        made.zero_grad()
        model(torch.randn(4, 2)).square().sum().backward()
        made.step()
    return model, made


def known(model, optimizer):
    """All that a worker knows, as something that can be compared."""
    tensors, listed = snapshot.pack(parts_of_worker.capture(model, {}))
    assert type(optimizer).__name__ in json.dumps(listed)
    return {key: t.detach().clone() for key, t in tensors.items()}, json.dumps(listed), model.steps


def same(a, b):
    return a[1:] == b[1:] and a[0].keys() == b[0].keys() and all(torch.equal(t, b[0][key]) for key, t in a[0].items())


def refused(load, *words):
    """One line, of the one kind of error."""
    with pytest.raises(GossamerError) as caught:
        load()
    assert "\n" not in str(caught.value), caught.value
    for word in words:
        assert word in str(caught.value), caught.value
    return caught.value


def one_line(load):
    """The error, if there is one, and no other kind of it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # another number of threads
        try:
            load()
        except GossamerError as error:
            return str(error)
    return None


# --- Damage ---------------------------------------------------------------------------------------------------------------------


def split(data):
    end = 8 + int.from_bytes(data[:8], "little")
    return json.loads(data[8:end]), data[end:]


def joined(header, rest):
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + rest


JUNK = (None, True, -1, 0, 7, 1e99, "", "x", [], {}, [[]], {"__tensor__": "x"}, {"__dict__": 3}, {"a": 1, "b": 2})


def edited(value, chance):
    """The same JSON with one change somewhere: another value, key, type or order."""
    if isinstance(value, dict) and value and chance.random() < 0.9:
        key = chance.choice(list(value))
        what = chance.random()
        if what < 0.15:
            return {k: v for k, v in value.items() if k != key}
        if what < 0.3:
            return {(k + "'" if k == key else k): v for k, v in value.items()}
        return {k: (edited(v, chance) if k == key else v) for k, v in value.items()}
    if isinstance(value, list) and value and chance.random() < 0.9:
        k = chance.randrange(len(value))
        what = chance.random()
        if what < 0.1:
            return value[:k] + value[k + 1 :]
        if what < 0.2:
            return [*value[:k], value[k], *value[k:]]
        return [*value[:k], edited(value[k], chance), *value[k + 1 :]]
    if isinstance(value, (int, float)) and chance.random() < 0.6:
        return value + chance.choice((-8, -1, 1, 4, 0.5))
    return chance.choice(JUNK)


def edited_header(data, chance, inner=False):
    header, rest = split(data)
    if inner or chance.random() < 0.5:
        metadata = header["__metadata__"]
        header["__metadata__"] = metadata | {"header": json.dumps(edited(json.loads(metadata["header"]), chance))}
    else:
        header = edited(header, chance)
    return joined(header, rest)


def mutated(data, chance):
    data, n = bytearray(data), len(data)
    at = chance.randrange(chance.choice((8, 8 + int.from_bytes(data[:8], "little"), n, n)))
    length = min(chance.choice((1, 4, 8, 64, 512)), n - at)
    other = chance.randrange(n - length + 1)
    what = chance.choice(("bit", "bit", "byte", "truncate", "zero", "swap", "append", "header", "header", "cut", "old"))
    if what == "bit":
        data[at] ^= 1 << chance.randrange(8)
    elif what == "byte":
        data[at] = chance.randrange(256)
    elif what == "truncate":
        del data[at:]
    elif what == "zero":
        data[at : at + length] = bytes(length)
    elif what == "swap":
        data[at : at + length], data[other : other + length] = data[other : other + length], data[at : at + length]
    elif what == "append":
        data += chance.randbytes(length)
    elif what == "cut":
        del data[at : at + length]
    elif what == "old":  # as if it were of version 1, which has no checksum
        data = data.replace(b"gossamer-checkpoint-2", b"gossamer-checkpoint-1")
        if chance.random() < 0.5:
            header, rest = split(data)
            header["__metadata__"].pop("digest", None)
            data = bytearray(joined(header, rest))
            data[-1 - chance.randrange(len(rest))] ^= 1
    else:
        return edited_header(bytes(data), chance)
    return bytes(data)


def resealed(data):
    """As a file that was written so: its checksum is right."""
    header, rest = split(data)
    header["__metadata__"] |= {"digest": "0" * 64}
    file = io.BytesIO(joined(header, rest))
    place, _, digest = checkpoint._digest(file)
    file.seek(place)
    file.write(digest.encode())
    return file.getvalue()


def library_file(tmp_path):
    model, _ = wrapped(steps=3)
    model.save(tmp_path)
    (path,) = tmp_path.glob("*.ckpt")
    fresh = wrapped()
    right = known(*wrapped(steps=3))

    def load(data):
        path.write_bytes(data)
        return fresh[0].load(tmp_path)

    return path.read_bytes(), load, lambda: known(*fresh), right


def trainer_file(tmp_path):
    def make():
        made = Settings(2, 1, 64, optimizer=Recipe("sgd", 0.1, {"momentum": 0.9}))
        return Trainer(task(lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 10)), samples=256), made, "ring")

    path = tmp_path / "a.ckpt"
    trainer, fresh = make(), make()
    trainer.run(until=2)
    trainer.save(path)

    def all_of(trainer):
        tensors, listed = snapshot.pack(gossamer.checkpoints.trainer.capture(trainer))
        return {key: t.clone() for key, t in tensors.items()}, json.dumps(listed), trainer.step

    def load(data):
        path.write_bytes(data)
        return fresh.load(path)

    return path.read_bytes(), load, lambda: all_of(fresh), all_of(trainer)


def sent_bytes(tmp_path):
    donor, newcomer = wrapped(steps=3), wrapped()

    def end(model):
        return types.SimpleNamespace(
            seat=types.SimpleNamespace(rank=1),
            _signature={"graph": "ring", **model._flat.signature()},
            _capture=lambda: parts_of_worker.capture(model, {}),
            _look=lambda: None,
            _layout=parts_of_worker.layout(model),
            _restore=lambda parts: parts_of_worker.restore(model, parts, "the state of the others", {}),
        )

    data = Survival._copied(end(donor[0]))()

    def load(data):
        Survival._unpack(end(newcomer[0]), data)
        newcomer[0]._driver.steps = 3  # comes with the change of members
        return True

    return data, load, lambda: known(*newcomer), known(*donor)


KINDS = [library_file, trainer_file, sent_bytes]


@pytest.mark.parametrize("kind", KINDS)
def test_two_thousand_damages_are_refused_or_do_no_harm(kind, tmp_path):
    data, load, now, right = kind(tmp_path)
    before, chance, harmless = now(), random.Random(1), 0
    assert not same(before, right)
    for k in range(MUTATIONS):
        bad = mutated(data, chance)
        if bad == data:
            harmless += 1
            continue
        refused(lambda bad=bad: load(bad))
        assert k % 50 or same(now(), before)
    assert same(now(), before)
    assert harmless < MUTATIONS / 10
    assert load(data)
    assert same(now(), right)


@pytest.mark.parametrize("kind", KINDS)
def test_headers_that_make_no_sense_are_one_line_even_if_their_checksum_is_right(kind, tmp_path):
    """As another program, or another version, could write them. A refusal changes nothing."""
    data, load, now, _ = kind(tmp_path)
    chance, refusals = random.Random(2), 0
    for _ in range(MUTATIONS):
        before, bad = now(), resealed(edited_header(data, chance, inner=True))
        error = one_line(lambda bad=bad: load(bad))
        if error is not None:
            refusals += 1
            assert "\n" not in error
            assert same(now(), before), error
    assert refusals > MUTATIONS / 3


def test_a_checksum_covers_every_single_byte(tmp_path):
    data = checkpoint.dumps({"x": torch.arange(3.0)}, {"v": 1})
    assert checkpoint.loads(data)[1] == {"v": 1}
    for k in range(len(data)):
        bad = bytearray(data)
        bad[k] ^= 1
        refused(lambda bad=bad: checkpoint.loads(bytes(bad)))


def test_the_averaged_model_is_a_plain_file_with_a_checksum(tmp_path):
    model, _ = wrapped(steps=1)
    model.save(tmp_path)
    path = tmp_path / "averaged.safetensors"
    net().load_state_dict(safetensors.torch.load_file(path))
    with safetensors.safe_open(path, "pt") as file:
        assert set(file.metadata()) == {"step", "digest"}
    checkpoint.verify(path)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    refused(lambda: checkpoint.verify(path), "averaged.safetensors is damaged: its checksum is wrong")


def test_tensors_of_all_kinds_are_as_they_were(tmp_path):
    """Of any dtype and memory, also where safetensors itself reads the file."""
    made = {str(dtype): torch.arange(6).to(dtype).reshape(2, 3) for dtype in checkpoint._DTYPES}
    row = torch.arange(12.0).reshape(3, 4)
    made |= {
        "view": row[:, 1],
        "turned": row.T,
        "same": row,
        "one": torch.ones(1).expand(1),
        "zero": torch.tensor(3),
        "none": row[:0],
    }
    made["a number"] = torch.tensor([7, 8])[:1].as_strided((1,), (0,))
    checkpoint.save(tmp_path / "a.ckpt", made, {"digest": "x", "y": [1, None]})
    for found in (checkpoint.load(tmp_path / "a.ckpt")[0], safetensors.torch.load_file(tmp_path / "a.ckpt")):
        assert found.keys() == made.keys()
        for key, tensor in made.items():
            assert (found[key].dtype, found[key].shape) == (tensor.dtype, tensor.shape)
            assert tensor.is_complex() or torch.equal(found[key].double(), tensor.double()), key
    with pytest.raises(GossamerError, match="'x' is torch.complex128, which safetensors does not have"):
        checkpoint.save(tmp_path / "b.ckpt", {"x": torch.ones(2, dtype=torch.complex128)}, {})


def test_the_folder_is_synced_after_the_file_has_its_name(tmp_path, monkeypatch):
    calls = []
    sync, move = os.fsync, os.replace

    def fsync(descriptor):
        calls.append("folder" if os.path.isdir(f"/proc/self/fd/{descriptor}") else "file")
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "replace", lambda *names: (calls.append("replace"), move(*names)))
    checkpoint.save(tmp_path / "a.ckpt", {"x": torch.ones(3)}, {})
    assert calls == ["file", "replace", "folder"]
    calls.clear()
    checkpoint.save(tmp_path / "new" / "er" / "a.ckpt", {"x": torch.ones(3)}, {})
    assert calls == ["folder", "folder", "file", "replace", "folder"]


# --- Version 1 ------------------------------------------------------------------------------------------------------------------


def as_version_1(path, tensors, header):
    tensors = {key: t.detach().clone() for key, t in tensors.items()}
    safetensors.torch.save_file(tensors, path, {"format": "gossamer-checkpoint-1", "header": json.dumps(header)})


def library_of_version_1(tmp_path, model, optimizer, setup=None):
    state = {
        "model": model.state_dict(),
        "optimizers": [optimizer.state_dict()],
        "schedule": model.schedule.state_dict(),
        "signals": {},
        "also": {},
    }
    tensors = {}
    header = {
        "step": model.steps,
        "setup": setup or parts_of_worker.setup(model),
        "state": snapshot.flatten("state", state, tensors),
    }
    path = tmp_path / f"step-{model.steps:09d}.rank-0-of-1.ckpt"
    as_version_1(path, tensors, header)
    return path


def test_a_library_file_of_version_1_loads(tmp_path):
    first, optimizer = wrapped(steps=3)
    path = library_of_version_1(tmp_path, first, optimizer)
    again = wrapped()
    assert again[0].load(tmp_path)
    first._driver.resume(None)  # version 1 does not say which graph the last step had
    assert same(known(*again), known(first, optimizer))
    data, chance = path.read_bytes(), random.Random(3)
    for _ in range(500):  # no checksum: it may load wrong, but there is no traceback
        path.write_bytes(mutated(data, chance))
        assert "\n" not in (one_line(lambda: again[0].load(tmp_path)) or "")
    path.write_bytes(data)
    before = known(*again)
    (sgd, _), (wide, _) = wrapped(optimizer=torch.optim.SGD, momentum=0.9), wrapped(net(4))
    refused(lambda: sgd.load(tmp_path), "the optimizer was another one", "betas", "momentum", "SGD")
    refused(lambda: wide.load(tmp_path), "another model: '0.weight' is float32 [3, 2] there and float32 [4, 2] here")
    assert same(known(*again), before)


def trainer_of_version_1(path, trainer):
    tensors = {f"x.{k}": block.x for k, block in enumerate(trainer.replicas.blocks)}
    tensors |= {f"buffer.{name}": stacked for name, stacked in trainer.replicas.buffers.items()}
    tensors["epoch_loss"] = trainer._epoch_loss
    settings = {key: value for key, value in fingerprint(trainer).items() if not key.startswith("tensor ")}
    settings["tensors"] = [[slot.name, list(slot.shape)] for block in trainer.replicas.blocks for slot in block.slots]
    header = {
        "settings": settings,
        "step": trainer.step,
        "bytes": trainer.bytes,
        "seconds": trainer.seconds,
        "epoch_degree": trainer._epoch_degree,
        "signals": trainer.signals,
        "schedule": trainer.schedule.state_dict(),
        "history": [asdict(record) for record in trainer.history],
        "optimizer": snapshot.flatten("optimizer", trainer.optimizer.state_dict(), tensors),
        "means": snapshot.flatten("means", trainer.mixer.state_dict(trainer.replicas.blocks), tensors),
        "backend": str(trainer.replicas.backend),
        "threads": torch.get_num_threads(),
    }
    as_version_1(path, tensors, header)


def trainer(graph="ring", optimizer=None, **settings):
    made = Settings(4, 2, 32, optimizer=optimizer or Recipe("sgd", 0.1, {"momentum": 0.9}), **settings)
    return Trainer(task(), made, graph)


def test_a_trainer_file_of_version_1_loads(tmp_path):
    path = tmp_path / "a.ckpt"
    first, again = trainer(), trainer()
    first.run(until=7)
    trainer_of_version_1(path, first)
    assert again.load(path)
    first.run()
    again.run()
    assert torch.equal(first.replicas.blocks[0].x, again.replicas.blocks[0].x)
    assert [record.value for record in first.history] == [record.value for record in again.history]
    data, chance = path.read_bytes(), random.Random(4)
    for _ in range(500):
        path.write_bytes(mutated(data, chance))
        assert "\n" not in (one_line(lambda: again.load(path)) or "")
    path.write_bytes(data)
    refused(lambda: trainer(seed=1).load(path), "other settings: seed (0 there, 1 here)")


# --- What does not fit ----------------------------------------------------------------------------------------------------------


def two_groups(parameters, lr):
    first, *rest = parameters
    return torch.optim.AdamW([{"params": [first]}, {"params": rest}], lr=lr)


def turned(parameters, lr):
    return torch.optim.AdamW(list(parameters)[::-1], lr=lr)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: wrapped(optimizer=torch.optim.SGD), ("the optimizers (AdamW there, SGD here)",)),
        (lambda: wrapped(optimizer=torch.optim.Adam), ("the optimizers (AdamW there, Adam here)",)),
        (lambda: wrapped(net(4)), ("parameter '0.weight' (float32 [3, 2] there, float32 [4, 2] here)", "more")),
        (lambda: wrapped(nn.Sequential(nn.Linear(2, 3))), ("parameter '1.weight' (float32 [3] there, none here)",)),
        (lambda: wrapped(net().double()), ("parameter '0.weight' (float32 [3, 2] there, float64 [3, 2] here)",)),
        (lambda: wrapped(optimizer=two_groups), ("the optimizer has 1 parameter group there and 2 here",)),
        (
            lambda: wrapped(optimizer=turned),
            ("number 0 of group 0 is '0.weight' float32 [3, 2] there and '2.bias' float32 [1]",),
        ),
    ],
)
def test_the_state_of_another_job_is_refused_before_anything_changes(make, words, tmp_path):
    wrapped(steps=3)[0].save(tmp_path)
    model, optimizer = make()
    before = known(model, optimizer)
    refused(lambda: model.load(tmp_path), *words)
    assert same(known(model, optimizer), before)


def test_a_thing_that_refuses_its_state_leaves_all_as_it_was(tmp_path):
    class Own:
        def __init__(self):
            self.value = 1

        def state_dict(self):
            return {"value": self.value}

        def load_state_dict(self, state):
            self.value = state["value"]
            if self.value != 1:
                raise RuntimeError("not with me,\nnever")

    own = Own()
    model, _ = wrapped(steps=3)
    own.value = 2
    model.save(tmp_path, {"own": own, "lr": torch.optim.lr_scheduler.StepLR(*wrapped()[1:], 3)})
    model, optimizer = wrapped()
    lr = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    own = Own()
    before = known(model, optimizer)
    refused(lambda: model.load(tmp_path, {"own": own, "lr": lr}), "also['own'] refuses its state: not with me, never")
    assert same(known(model, optimizer), before)
    assert own.value == 1
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 3)
    refused(
        lambda: model.load(tmp_path, {"own": own, "lr": cosine}), "also['lr'] is a StepLR there and a CosineAnnealingLR here"
    )


def test_a_trainer_refuses_another_task_or_optimizer(tmp_path):
    path = tmp_path / "a.ckpt"
    first = trainer()
    first.run(until=3)
    first.save(path)
    refused(lambda: trainer(optimizer=Recipe("adam", 0.1)).load(path), "other settings: optimizer", "'sgd'", "'adam'")
    wide = task(lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 20), nn.ReLU(), nn.Linear(20, 10)))
    other = Trainer(wide, first.settings, "ring")
    refused(lambda: other.load(path), "tensor '1.weight' ([16, 64] there, [20, 64] here)")
    assert other.step == 0


def test_a_part_that_is_not_known_is_refused_by_name_if_it_is_required(tmp_path):
    model, _ = wrapped(steps=2)
    parts = {**parts_of_worker.capture(model, {}), "methods/tracking": {"y": torch.ones(3)}}
    made = snapshot.Snapshot(2, parts_of_worker._whole_setup(model), parts)
    path = tmp_path / "step-000000002.rank-0-of-1.ckpt"
    snapshot.save(path, made)
    refused(lambda: wrapped()[0].load(tmp_path), "'methods/tracking'", "use the one that wrote it")
    snapshot.save(path, made, optional=["methods/tracking"])
    assert wrapped()[0].load(tmp_path)


@pytest.mark.parametrize("value", [3, "x", {}, [1], {"__dict__": {"a": 1}}, {"__tensor__": "no"}, {"__counter__": 1}, {"a": 1, "b": 2},
                                   {"__dict__": [[["list"], 1]]}, {"__dict__": [["a", 1], ["a", 2]]}, {"__tensor__": []}])  # fmt: skip
def test_what_flatten_can_not_have_written_is_refused(value):
    if value in (3, "x", [1]):
        assert snapshot.unflatten(value, {}) == value
    else:
        refused(lambda: snapshot.unflatten(value, {}))


def test_keys_that_json_can_not_hold_are_refused_when_they_are_saved():
    refused(lambda: snapshot.flatten("x", {(1, 2): 3}, {}), "the key (1, 2)")


# --- Several workers ------------------------------------------------------------------------------------------------------------

LAYOUT = snapshot.Layout(("model",), lambda tensors, header: pytest.fail("version 1"))


class Together:
    """Workers as threads, with the one collective that checkpoints need."""

    def __init__(self, size):
        self.size, self.barrier, self.rows = size, threading.Barrier(size, timeout=20), {}

    def run(self, work):
        results = [None] * self.size

        def go(rank):
            try:
                results[rank] = work(
                    types.SimpleNamespace(rank=rank, size=self.size, gather=lambda row, what: self.gather(rank, row))
                )
            except Exception as error:
                results[rank] = error

        threads = [threading.Thread(target=go, args=(rank,)) for rank in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return results

    def gather(self, rank, row):
        self.rows[rank] = row
        self.barrier.wait()
        everyone = torch.stack([self.rows[k] for k in range(self.size)])
        self.barrier.wait()
        return everyone


def saved(folder, step, size=2):
    def work(world):
        shards.save(folder, step, {"model": {"x": torch.tensor([world.rank, step])}}, {"a": "b"}, None, world)

    assert Together(size).run(work) == [None] * size


def loaded(folder, size=2, setup=None, check=lambda *_: None):
    def fits(found, where):
        snapshot.refuse_other(found, setup or {"a": "b"}, LAYOUT, where)
        check(found, where)

    made = Together(size).run(lambda world: shards.load(folder, world, LAYOUT, fits))
    return [last[0] if isinstance(last, tuple) else last for last in made]


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def file(step, rank, size=2):
    return f"step-{step:09d}.rank-{rank}-of-{size}.ckpt"


def damage(path):
    data = bytearray(path.read_bytes())
    data[-1] ^= 4
    path.write_bytes(data)


def test_a_damaged_newest_step_is_left_for_the_one_before_it_by_all(tmp_path):
    for step in (3, 6, 9):
        saved(tmp_path, step)
    assert names(tmp_path) == [file(step, rank) for step in (6, 9) for rank in (0, 1)]
    damage(tmp_path / file(9, 1))
    with pytest.warns(UserWarning, match="damaged") as warned:
        found = loaded(tmp_path)
    assert [(s.step, s.parts["model"]["x"].tolist()) for s in found] == [(6, [0, 6]), (6, [1, 6])]
    (sentence,) = [str(w.message) for w in warned]
    assert f"{tmp_path / file(9, 1)} is damaged or not a checkpoint: its checksum is wrong" in sentence
    assert f"kept as {file(9, 1)}.damaged, and training goes on from step 6" in sentence
    assert names(tmp_path) == [file(6, 0), file(6, 1), file(9, 1) + ".damaged"]
    saved(tmp_path, 9)
    saved(tmp_path, 12)
    assert names(tmp_path) == sorted([*(file(step, rank) for step in (9, 12) for rank in (0, 1)), file(9, 1) + ".damaged"])


def test_if_all_steps_are_damaged_all_workers_say_so_and_no_file_is_removed(tmp_path):
    for step in (3, 6):
        saved(tmp_path, step)
    damage(tmp_path / file(3, 0))
    damage(tmp_path / file(6, 1))
    before = names(tmp_path)
    errors = loaded(tmp_path)
    assert [type(error) for error in errors] == [Unreadable, Unreadable]
    assert str(errors[0]) == str(errors[1])
    assert "step 3 of worker 0, step 6 of worker 1 can't be read" in str(errors[0])
    assert names(tmp_path) == before


def test_a_file_under_the_name_of_another_step_is_damage(tmp_path):
    for step in (3, 6):
        saved(tmp_path, step)
    (tmp_path / file(6, 0)).write_bytes((tmp_path / file(3, 0)).read_bytes())
    with pytest.warns(UserWarning, match="it is of step 3, and its name is not"):
        assert [found.step for found in loaded(tmp_path)] == [3, 3]


def test_newer_steps_of_another_number_of_workers_are_refused_by_all(tmp_path):
    saved(tmp_path, 60, 4)
    saved(tmp_path, 120, 3)
    before = names(tmp_path)
    errors = loaded(tmp_path, 4)
    assert len({str(error) for error in errors}) == 1
    assert all(type(error) is GossamerError for error in errors)
    for word in (
        "step 120 of 3 workers",
        "60 is the last step of 4",
        "start with -n 3",
        "remove the files *-of-3.ckpt",
        "averaged",
    ):
        assert word in str(errors[0])
    assert names(tmp_path) == before
    assert [found.step for found in loaded(tmp_path, 3)] == [120] * 3
    saved(tmp_path, 180, 3)
    assert names(tmp_path) == [file(step, rank, 3) for step in (120, 180) for rank in range(3)]  # the four of before are gone
    assert all("of 3 workers (step 180), and there are 2" in str(error) for error in loaded(tmp_path, 2))
    saved(tmp_path, 150, 2)  # another run: what is later was not its own
    assert names(tmp_path) == [*(file(120, rank, 3) for rank in range(3)), file(150, 0), file(150, 1)]


def test_the_same_step_of_another_number_is_of_another_run(tmp_path):
    """2 workers up to step 40, 3 workers from their average up to step 40; then 2 must not go on from the old branch."""
    saved(tmp_path, 40, 2)
    saved(tmp_path, 20, 3)
    saved(tmp_path, 40, 3)
    assert names(tmp_path) == [file(step, rank, 3) for step in (20, 40) for rank in range(3)]
    saved(tmp_path, 40, 2)
    saved(tmp_path, 40, 3)
    assert all("of 3 workers (step 40), and there are 2" in str(error) for error in loaded(tmp_path, 2))


def test_a_step_of_another_number_that_was_cut_short_does_not_count(tmp_path):
    saved(tmp_path, 60, 4)
    saved(tmp_path, 120, 3)
    (tmp_path / file(120, 1, 3)).unlink()
    assert [found.step for found in loaded(tmp_path, 4)] == [60] * 4
    for rank in range(4):
        shards.write(tmp_path, 130, rank, 4, {"model": {}}, {"a": "b"})
    shards.prune(tmp_path, 130, 4)
    assert file(60, 0, 4) in names(tmp_path)  # the step before, in case 130 is damaged: 120 is of no use


def test_each_worker_sees_its_own_files_in_a_folder_per_host(tmp_path):
    def folder(rank):
        return tmp_path / f"host-{rank}"

    def work(step):
        return lambda world: shards.save(folder(world.rank), step, {"model": {}}, {}, None, world)

    for size, step in ((2, 3), (2, 6), (3, 9)):
        Together(size).run(work(step))
    errors = Together(2).run(lambda world: shards.load(folder(world.rank), world, LAYOUT, lambda *_: None))
    assert all("step 9 of 3 workers, and 6 is the last step of 2" in str(error) for error in errors)
    assert names(folder(0)) == [file(6, 0), file(9, 0, 3)]


def test_if_one_worker_can_not_take_its_state_none_does(tmp_path):
    saved(tmp_path, 3)

    def check(found, where):
        if where.endswith("rank-1-of-2.ckpt"):
            raise GossamerError("no")

    errors = loaded(tmp_path, check=check)
    assert "the checkpoint of worker 1 can't be loaded" in str(errors[0])
    assert str(errors[1]) == "no"
    errors = loaded(tmp_path, setup={"a": "c"})
    assert all(f"{file(3, rank)} was made with another set-up: a (b there, c here)" in str(errors[rank]) for rank in (0, 1))


def test_what_a_kill_has_left_half_written_goes_with_its_step(tmp_path):
    saved(tmp_path, 3)
    (tmp_path / f"{file(3, 0)}.123.tmp").write_bytes(b"half")
    saved(tmp_path, 6)
    saved(tmp_path, 9)
    assert names(tmp_path) == [file(step, rank) for step in (6, 9) for rank in (0, 1)]


# --- DBench ---------------------------------------------------------------------------------------------------------------------


def test_a_bench_begins_a_cell_anew_if_its_checkpoint_is_damaged_and_writes_that_down(tmp_path, monkeypatch):
    raw = {
        "name": "small", "replicas": [4], "methods": ["ring"], "seeds": [0], "backend": "loop",
        "task": {"name": "digits/mlp", "epochs": 2, "batch": 16}, "optimizer": {"lr": 0.1, "options": {"momentum": 0.9}},
    }  # fmt: skip
    whole, out = tmp_path / "whole", tmp_path / "out"
    bench(specs.build(raw), whole, task=task(), quiet=True)
    save = Trainer.save

    class Killed(Exception):
        pass

    def save_and_stop(self, path):
        save(self, path)
        if self.step > 5:
            raise Killed

    monkeypatch.setattr(Trainer, "save", save_and_stop)
    with pytest.raises(Killed):
        bench(specs.build(raw), out, task=task(), checkpoint_seconds=0, quiet=True)
    monkeypatch.undo()
    (path,) = (out / "checkpoints").iterdir()
    damage(path)
    assert bench(specs.build(raw), out, task=task(), quiet=True).complete
    stores = Store(whole / FILE), Store(out / FILE)
    a, b = (store.runs()[0] for store in stores)
    assert (a.value, a.steps, a.bytes, a.consensus_distance) == (b.value, b.steps, b.bytes, b.consensus_distance)
    assert stores[0].notes(a.id) == []
    ((kind, text),) = stores[1].notes(b.id)
    assert kind == "checkpoint"
    assert (
        "1.ckpt is damaged or not a checkpoint: its checksum is wrong; it is kept as 1.ckpt.damaged, and the run begins anew"
        in text
    )
    assert [path.name for path in (out / "checkpoints").iterdir()] == ["1.ckpt.damaged"]
    assert stores[0].changes(a.id) == stores[1].changes(b.id)
    assert inside("results", out, "--json").returncode == 0
    assert inside("report", out).returncode == 0


def test_the_signature_names_parameters_buffers_and_optimizers():
    model, optimizer = wrapped()
    made = states.signature(model._bare(), [optimizer])
    assert made["the optimizers"] == "AdamW"
    assert made["parameter '0.weight'"] == "float32 [3, 2]"
    assert made["buffer '1.num_batches_tracked'"] == "int64 []"
