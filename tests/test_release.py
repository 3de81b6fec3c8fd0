"""What a release promises: which torch and Python, other systems, the version, and that its files agree."""

import os
import re
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest

import gossamer
from gossamer.errors import OLDEST_TORCH, check_torch
from tests.commands import ROOT, inside

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
FLOOR = ".".join(map(str, OLDEST_TORCH))


def python(*arguments):
    return subprocess.run([sys.executable, *map(str, arguments)], capture_output=True, text=True, timeout=120, cwd=ROOT)


@pytest.mark.parametrize("version", ["1.13.1", "2.0.0a0+git12", "2.7.1+cu126"])
def test_an_older_torch_is_refused(version):
    with pytest.raises(
        ImportError, match=rf"gossamer needs torch {FLOOR} or later, and this is torch {re.escape(version)}; pip"
    ):
        check_torch(version)


@pytest.mark.parametrize("version", ["2.8.0", "2.8.0a0+git12", "2.13.0+cpu", "3.0"])
def test_from_the_floor_on_it_is_not(version):
    check_torch(version)


def test_an_older_torch_is_refused_at_import():
    done = python("-c", "import torch; torch.__version__ = torch.torch_version.TorchVersion('2.7.1'); import gossamer")
    assert done.returncode == 1
    assert done.stderr.strip().splitlines()[-1].startswith(f"ImportError: gossamer needs torch {FLOOR} or later")


def test_the_floor_is_the_same_everywhere():
    assert f"torch>={FLOOR}" in PROJECT["dependencies"]
    matrix = (ROOT / ".github" / "workflows" / "tests.yml").read_text()
    assert f'torch: ["{FLOOR}.0"' in matrix
    assert PROJECT["requires-python"] == ">=3.11"
    for minor in (11, 12, 13, 14):
        assert f"Programming Language :: Python :: 3.{minor}" in PROJECT["classifiers"]
        assert f'"3.{minor}"' in matrix


def test_the_version_is_the_same_everywhere():
    assert metadata.version("gossamer") == gossamer.__version__ == PROJECT["version"]
    assert re.match(
        rf"gossamer {re.escape(gossamer.__version__)} \(torch [\d.]+.*, Python [\d.]+\)\n$", inside("--version").stdout
    )
    assert f"version: {PROJECT['version']}\n" in (ROOT / "CITATION.cff").read_text()


def test_the_shell_completes():
    asked = {"_GOSSAMER_COMPLETE": "complete_bash", "COMP_WORDS": "gossamer bench paper-l", "COMP_CWORD": "2"}
    program = Path(sys.executable).with_name("gossamer")
    done = subprocess.run([program], capture_output=True, text=True, timeout=120, env=os.environ | asked)
    assert done.stdout.split() == ["paper-lstm", "paper-lstm-laptop"]


def test_types_are_there_for_who_installs_it():
    assert (ROOT / "src" / "gossamer" / "py.typed").exists()


def test_as_on_windows(tmp_path):
    """The library and DBench run; what needs Linux says so."""
    done = python("-m", "tests.elsewhere_driver", "win32", tmp_path / "out")
    assert "steps 1\nfinished 2\n" in done.stdout, done.stderr
    assert done.stdout.count(",done,") == 2
    assert done.stdout.endswith("lab ends with 2\nlaunch ends with 2\n")
    assert "gossamer: lab: needs Linux, whose network namespaces it is made of; this is win32" in done.stderr
    assert "gossamer: launch: needs Linux or macOS" in done.stderr


def test_as_on_macos(tmp_path):
    done = python("-m", "tests.elsewhere_driver", "darwin", tmp_path / "out")
    assert "[0] hello" in done.stdout, done.stderr
    assert done.stdout.endswith("launch ends with 0\n")
    assert "gossamer: lab: needs Linux, whose network namespaces it is made of; this is darwin" in done.stderr
