"""Keys of a spec on the command line, a spec to begin with, and what works on this machine."""

import os
import re
import socket
import subprocess
import sys

import pytest

from gossamer.apps import tasks
from gossamer.dbench import start
from gossamer.dbench.spec import load, parse
from gossamer.errors import GossamerError
from gossamer.runtime import doctor
from tests.commands import ROOT, inside


def test_keys_are_changed_for_this_once():
    plain, other = load("quickstart"), load("quickstart", ["seeds=[0]", "task.epochs = 2", "task.options.hidden=[32, 16]"])
    assert (other.seeds, other.task.epochs, other.task.options) == ((0,), 2, {"hidden": [32, 16]})
    assert load("quickstart").seeds == plain.seeds == (0, 1, 2)
    assert load("quickstart", ["task.partition=dirichlet:alpha=0.5"]).task.partition == "dirichlet:alpha=0.5", "as text"
    assert load("quickstart", ['methods=["ring", {name="slow", graph="ada"}]']).method("slow").graph == "ada"
    assert load("quickstart", ["profile.every=0", "profile.every=5"]).profile.every == 5, "the last one counts"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("seeds", "'seeds' is not KEY=VALUE, such as seeds=[0]"),
        ("task..epochs=1", "is not KEY=VALUE"),
        ("task.epoch=2", "task.epoch is not a known key; did you mean 'epochs'?"),
        ("task.epochs=two", "task.epochs: .*integer.*(it is 'two')"),
        ("seeds=[0", "'seeds=[0': [0 is not a TOML value; quote it for the shell: 'seeds=[0'"),
        ("seeds=", "nothing is not a TOML value"),
        ("methods.ring.lr=0.1", "methods is not a table, so nothing in it has a name; give all of it: methods=…"),
        ("seeds=1, 2", "seeds: .*tuple.*(it is '1, 2')"),
        ("seeds=0\nname='x'", "seeds: .*tuple"),
    ],
)
def test_a_wrong_change_is_one_line(change, message):
    done = inside("bench", "quickstart", change)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert all(part in done.stderr for part in message.split(".*")), done.stderr


@pytest.mark.parametrize("task", tasks.names())
def test_there_is_a_spec_to_begin_with_for_each_task(task, tmp_path):
    text = start.spec_for(task, "mine")
    read = parse(text)
    assert (read.name, read.task.name) == ("mine", task)
    for key in tasks.defaults(task):
        assert f"#   {key} = " in text


def test_the_spec_to_begin_with_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert inside("init").stdout == "digits-mlp.toml is a spec for digits/mlp. Run it: gossamer bench digits-mlp.toml\n"
    done = inside("bench", "digits-mlp.toml", "seeds=[0]", 'methods=["centralized", "ring"]', "--jobs", 1, "--quiet")
    folder = tmp_path / "runs" / "digits-mlp-seeds-0-methods-centralized-ring"
    finished, cost = done.stdout.splitlines()
    assert finished == f"2 of 2 runs are finished. The report: {folder.relative_to(tmp_path)}/report.html", done.stderr
    assert re.fullmatch(r"Processor hours: \S+ \(centralized \S+, ring \S+\)", cost)
    values = [float(line.split(",")[7]) for line in inside("results", folder, "--csv").stdout.splitlines()[1:]]
    assert all(value > 0.85 for value in values), "it learns"
    assert "digits-mlp.toml is there already" in inside("init").stderr
    assert "there is no task 'digit/mlp'; did you mean 'digits/mlp'?" in inside("init", "digit/mlp").stderr


def test_init_says_how_to_get_the_data(tmp_path, monkeypatch):
    monkeypatch.setenv("GOSSAMER_DATA", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    done = inside("init", "cifar10/resnet8", "--out", tmp_path / "my own.toml")
    assert "Its data are not here yet: CIFAR-10; get it with: gossamer data get cifar10" in done.stdout
    assert 'name = "my own"' in (tmp_path / "my own.toml").read_text()


def test_doctor_tries_what_is_needed(tmp_path, monkeypatch):
    monkeypatch.setenv("GOSSAMER_DATA", str(tmp_path))
    done = inside("doctor")
    assert done.returncode == 0, done.stdout
    for line in ("works   torch: ", "works   gloo: two ranks have exchanged a row", "works   disk: ", "lab: ", "browser: "):
        assert line in done.stdout
    assert "absent  data: imagenet: ImageNet-1K is not here\n        there is no free download" in done.stdout


def test_doctor_sees_a_port_that_is_taken():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(doctor, "_PORT", listener.getsockname()[1])
            assert doctor._ports().state == "absent"
    assert doctor._ports().state in ("works", "absent")


def test_doctor_sees_an_interface_that_is_not_there():
    done = subprocess.run(
        [sys.executable, "-m", "gossamer", "doctor"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=120,
        env=os.environ | {"GLOO_SOCKET_IFNAME": "nosuch7"},
    )
    assert done.returncode == 1
    assert "broken  gloo: " in done.stdout
    assert "set GLOO_SOCKET_IFNAME to the interface that reaches the other workers" in done.stdout


@pytest.mark.parametrize("command", ["init", "doctor", "bench"])
def test_help_shows_how_it_is_called(command):
    help_text = inside(command, "--help").stdout
    assert f"gossamer {command}" in help_text.replace("Usage:", "")


def test_an_unknown_task_has_no_spec():
    with pytest.raises(GossamerError, match="there is no task"):
        start.spec_for("digits/mlpp", "mine")
