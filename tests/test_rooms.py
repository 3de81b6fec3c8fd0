"""The rooms of the code: imports point downwards only, and no module is too long."""

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

from gossamer import _deprecated

SOURCE = Path(__file__).parent.parent / "src" / "gossamer"

# From the bottom to the top. A module imports from its own room and from those below.
ROOMS = [
    ["errors"],
    ["toml_files", "spelling", "_deprecated"],
    ["graphs"],
    ["schedules"],
    ["data"],
    ["rows"],
    ["transport"],
    ["checkpoints"],
    ["optim"],
    ["methods"],
    ["members"],
    ["parallel", "trainer", "hooks"],
    ["integrations"],
    ["apps"],
    ["runtime"],
    ["dbench"],
    ["__init__"],
    ["cli"],
    ["__main__"],
]
LEVEL = {room: level for level, rooms in enumerate(ROOMS) for room in rooms}
LONGEST, SHORT = 400, 80  # lines of a module, and of a method
MODULES = sorted(SOURCE.rglob("*.py"))


def room(path):
    return path.relative_to(SOURCE).with_suffix("").parts[0]


def imported(path):
    """Of each import of ours: its line, and the room that it is from."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "gossamer":
            parts = node.module.split(".")
            names = [parts[1]] if len(parts) > 1 else [alias.name for alias in node.names]
            yield from ((node.lineno, name if name in LEVEL else "__init__") for name in names)
        elif isinstance(node, ast.Import):
            for alias in node.names:
                parts = alias.name.split(".")
                if parts[0] == "gossamer":
                    yield node.lineno, parts[1] if len(parts) > 1 else "__init__"


def test_every_module_is_in_a_room():
    assert {room(path) for path in MODULES} == set(LEVEL)


def test_imports_point_downwards():
    for path in MODULES:
        here = room(path)
        wrong = [
            f"line {line} imports from {name}" for line, name in imported(path) if name != here and LEVEL[name] >= LEVEL[here]
        ]
        assert not wrong, f"{path}: {', '.join(wrong)}"


def test_policies_stand_above_methods():
    """No method imports a policy."""
    for path in (SOURCE / "methods").glob("*.py"):
        if path.name != "__init__.py":
            assert "gossamer.methods.policies" not in path.read_text(encoding="utf-8"), path


def test_the_top_level_is_small():
    modules = [path for path in SOURCE.glob("*.py") if path.name != "_deprecated.py"]
    packages = [path for path in SOURCE.iterdir() if (path / "__init__.py").exists()]
    assert len(modules) <= 8
    assert len(packages) <= 14


def test_a_method_is_a_short_file():
    """What methods are written with, how steps run them, and what outer methods share is not one."""
    for path in (SOURCE / "methods").glob("*.py"):
        if path.stem not in ("__init__", "base", "step", "outer"):
            assert len(path.read_text(encoding="utf-8").splitlines()) < SHORT, path


def test_no_module_is_too_long():
    for path in MODULES:
        assert len(path.read_text(encoding="utf-8").splitlines()) <= LONGEST, path


IMPORTS = """
import importlib, sys, warnings
warnings.simplefilter("error", DeprecationWarning)
for old in sys.argv[1:]:
    try:
        importlib.import_module(old)
    except DeprecationWarning as warning:
        print(f"DeprecationWarning: {warning}")
"""


@pytest.fixture(scope="module")
def refused():
    """What a process says that imports each old path."""
    return subprocess.run([sys.executable, "-c", IMPORTS, *_deprecated.MOVED], capture_output=True, text=True).stdout


@pytest.mark.parametrize("old", _deprecated.MOVED)
def test_an_old_path_works_and_says_what_is_right(old, refused):
    assert f"DeprecationWarning: {old} is {_deprecated.MOVED[old]} now" in refused
    module = importlib.import_module(old)
    assert (
        vars(module).items()
        >= {k: v for k, v in vars(importlib.import_module(_deprecated.MOVED[old])).items() if k[:2] != "__"}.items()
    )
