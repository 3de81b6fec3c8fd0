"""TOML files by name (those that come with Gossamer) or by path (a person's own)."""

from __future__ import annotations

import difflib
import tomllib
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from gossamer.errors import GossamerError


@dataclass(frozen=True)
class Shelf:
    """The files of one ``kind`` (spec, cluster) that lie in ``package``."""

    kind: str
    package: str

    def names(self) -> list[str]:
        files = resources.files(self.package).iterdir()
        return sorted(file.name.removesuffix(".toml") for file in files if file.name.endswith(".toml"))

    def text(self, what: str | Path) -> str:
        """A file is taken before one of ours of the same name."""
        path = Path(what)
        if str(what) in self.names() and not path.is_file():
            return (resources.files(self.package) / f"{what}.toml").read_text(encoding="utf-8")
        if not path.is_file():
            near = difflib.get_close_matches(str(what), self.names(), n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"shipped {self.kind}s are {', '.join(self.names())}"
            raise GossamerError(f"there is no {self.kind} {str(what)!r}, neither as a file nor by name; {hint}")
        try:
            return path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise GossamerError(f"{self.kind} {path} can't be read: {error}") from None


def parsed(text: str, where: str) -> dict[str, Any]:
    """Raises nothing but GossamerError, whatever the text."""
    try:
        return tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError, ValueError) as error:
        raise GossamerError(f"{where} is not valid TOML: {error}") from None
