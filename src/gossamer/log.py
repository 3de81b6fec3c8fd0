"""A log in the store, which all workers read in the same order."""

from __future__ import annotations

import json
from typing import Any

from gossamer.roster import Event, decode, encode


class Log:
    """Events in the store, one after the other; the first to write an entry wins, and the others read it and try the next."""

    def __init__(self, store: Any, prefix: str) -> None:
        self._store, self._prefix, self._read = store, prefix, 0

    def news(self) -> list[Event]:
        events = []
        while self._store.check([self._key]):
            events.append(decode(json.loads(self._store.get(self._key))))
            self._read += 1
        return events

    def append(self, event: Event) -> bool:
        """Whether it stands where we have read up to; if not, somebody else's does."""
        text = json.dumps(encode(event))
        return bool(self._store.compare_set(self._key, "", text).decode() == text)

    @property
    def _key(self) -> str:
        return f"{self._prefix}/{self._read}"
