"""Import paths of 0.1 that README or docs named, and where the modules are now. They work for one release, with a DeprecationWarning."""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import sys
import types
import warnings
from collections.abc import Sequence

MOVED = {
    "gossamer.checkpoint": "gossamer.checkpoints.checkpoint",
    "gossamer.exchange": "gossamer.transport.exchange",
    "gossamer.lab": "gossamer.runtime.lab",
    "gossamer.links": "gossamer.members.store",  # for open_link
    "gossamer.outages": "gossamer.members.outages",
    "gossamer.tasks": "gossamer.data.tasks",
}


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        return importlib.machinery.ModuleSpec(fullname, self) if fullname in MOVED else None

    def exec_module(self, module: types.ModuleType) -> None:
        new = MOVED[module.__name__]
        warnings.warn(
            f"{module.__name__} is {new} now; the old path goes with the next release", DeprecationWarning, stacklevel=6
        )
        found = importlib.import_module(new)
        module.__dict__.update({name: value for name, value in vars(found).items() if not name.startswith("__")})


sys.meta_path.append(_Finder())
