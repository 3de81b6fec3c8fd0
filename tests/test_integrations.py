"""Without its library a module of gossamer.integrations says what to install. With the libraries: tests/extras."""

import importlib
import sys

import pytest


@pytest.mark.parametrize("package", ["lightning", "accelerate", "transformers"])
def test_without_the_library(package, monkeypatch):
    for name in list(sys.modules):
        if name.split(".")[0] == package or name == f"gossamer.integrations.{package}":
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ModuleNotFoundError) as error:
        importlib.import_module(f"gossamer.integrations.{package}")
    assert str(error.value) == (
        f"gossamer.integrations.{package} needs {package}, which is not installed: pip install 'gossamer[{package}]'"
    )
    assert error.value.__suppress_context__
