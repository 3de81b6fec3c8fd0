"""The store: one SQLite file per output folder. Readable while a bench goes on; the schema is in docs/store.md.

Only the bench writes it: when a run is finished, what its file says (records.py) becomes rows, in one transaction. That needs no shared
memory, which SQLite's WAL would: so the folder may be on a network file system.
"""

from __future__ import annotations

import contextlib
import json
import sqlite3
import uuid
import zlib
from collections.abc import Iterator
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from gossamer.dbench import records
from gossamer.dbench.failures import NONE
from gossamer.dbench.records import Number, Record, Rows
from gossamer.dbench.spec import Cell, Spec, build, differences
from gossamer.errors import GossamerError
from gossamer.rows.profile import Profile
from gossamer.schedules import Change
from gossamer.trainer import EpochRecord

FILE = "dbench.sqlite"
_APPLICATION = 0x676F7373  # "goss", so that a foreign SQLite file is known as one
_VERSION = 3
_READABLE = (1, 2, 3)  # 1 knew no failures; 2 no spread over the replicas, and no metric on their own data
_SCHEMA = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE runs (
    id INTEGER PRIMARY KEY, method TEXT NOT NULL, replicas INTEGER NOT NULL, seed INTEGER NOT NULL, failures TEXT NOT NULL,
    status TEXT NOT NULL, message TEXT, machine TEXT, backend TEXT, threads INTEGER, tensors TEXT, steps INTEGER,
    value REAL, value_mean REAL, value_worst REAL, value_spread REAL, value_own REAL, value_train REAL,
    bytes INTEGER, seconds REAL, consensus_distance REAL, processor_seconds REAL,
    UNIQUE (method, replicas, seed, failures));
CREATE TABLE epochs (
    run INTEGER NOT NULL, epoch INTEGER NOT NULL, step INTEGER NOT NULL, lr REAL, train_loss REAL, value REAL, graph TEXT,
    degree REAL, bytes INTEGER, consensus_distance REAL, seconds REAL, PRIMARY KEY (run, epoch));
CREATE TABLE profiles (
    run INTEGER NOT NULL, step INTEGER NOT NULL, epoch INTEGER NOT NULL, consensus_distance REAL, bytes INTEGER,
    norms BLOB NOT NULL, PRIMARY KEY (run, step));
CREATE TABLE events (
    run INTEGER NOT NULL, step INTEGER NOT NULL, epoch INTEGER NOT NULL, kind TEXT NOT NULL, graph TEXT, reason TEXT,
    PRIMARY KEY (run, step, kind));
"""
# Made when first a method notes a number: so stores have it only then, and need no other version.
_NUMBERS = """
CREATE TABLE IF NOT EXISTS numbers (
    run INTEGER NOT NULL, step INTEGER NOT NULL, name TEXT NOT NULL, value REAL, PRIMARY KEY (run, step, name))
"""
_PENDING = "INSERT INTO runs (method, replicas, seed, failures, status) VALUES (?, ?, ?, ?, 'pending')"
_GROWS = ("methods", "replicas", "seeds")  # keys of a spec that may get more values: finished runs stay what they are
FINISHED = ("done", "diverged")
_IDENTITY = "identity"  # of the store, in meta


@dataclass(frozen=True)
class ProfileRow:
    step: int
    epoch: int
    consensus_distance: float
    bytes: int
    norms: np.ndarray  # float32 [replicas that took part, tensors]


@dataclass(frozen=True)
class Run:
    """One cell of the grid as the store knows it. Numbers are None until the run is finished."""

    id: int
    method: str
    replicas: int
    seed: int
    status: str
    message: str | None
    machine: str | None  # JSON: where it was begun
    backend: str | None
    threads: int | None
    tensors: tuple[str, ...]
    steps: int | None
    value: float | None
    value_mean: float | None
    value_worst: float | None
    value_train: float | None
    bytes: int | None
    seconds: float | None
    consensus_distance: float | None
    failures: str = NONE
    value_spread: float | None = None
    value_own: float | None = None
    processor_seconds: float | None = None  # with evaluation, and steps that a kill has lost

    @property
    def cell(self) -> Cell:
        return Cell(self.method, self.replicas, self.seed, self.failures)


class Store:
    def __init__(self, path: Path) -> None:
        """Open an existing store."""
        if not path.is_file():
            raise GossamerError(
                f"there is no DBench output in {path.parent} (no {path.name}); make one with: gossamer bench quickstart"
            )
        self.path = path
        with _clear_errors(path):
            self._db = sqlite3.connect(path, timeout=60, isolation_level=None)
            application, self._version = (
                self._db.execute(f"PRAGMA {key}").fetchone()[0] for key in ("application_id", "user_version")
            )
            if application != _APPLICATION:
                raise GossamerError(f"{path} is not a DBench store, but some other SQLite file")
            if self._version not in _READABLE:
                raise GossamerError(
                    f"{path} has schema version {self._version}; this Gossamer reads version {_VERSION}: use the one that made it"
                )
            self._db.execute("PRAGMA synchronous = FULL")

    @classmethod
    def create(cls, path: Path, spec: Spec, metric: tuple[str, bool], task: dict[str, Any]) -> Store:
        """A new store for this spec, or the existing one if it is for the same spec and task; the grid may have grown since.
        ``metric``: its name, higher is better. ``task``: what else must stay the same, as plain data."""
        meta = {
            "spec": spec.model_dump(mode="json"),
            "metric": {"name": metric[0], "higher_is_better": metric[1]},
            "task": task,
        }
        if not path.exists():
            with _clear_errors(path):
                # Made under another name and moved, so that a kill in between leaves no half-made store.
                new = path.with_suffix(".new")
                for leftover in (new, *path.parent.glob(new.name + "-*")):
                    leftover.unlink(missing_ok=True)
                left = [*(path.parent / "checkpoints").glob("*.ckpt*"), *(path.parent / records.FOLDER).glob("*.records")]
                for file in left:
                    file.unlink()  # of a store that is gone: its runs begin again
                db = sqlite3.connect(new, isolation_level=None)
                db.executescript(_SCHEMA)
                db.execute(f"PRAGMA application_id = {_APPLICATION}")
                db.execute(f"PRAGMA user_version = {_VERSION}")
                db.executemany("INSERT INTO meta VALUES (?, ?)", [(key, json.dumps(value)) for key, value in meta.items()])
                db.executemany(_PENDING, [astuple(cell) for cell in spec.cells()])
                db.close()
                new.rename(path)
        store = cls(path)
        with contextlib.suppress(
            sqlite3.OperationalError
        ):  # an older store that is being read stays in WAL mode until next time
            store._db.execute("PRAGMA journal_mode = DELETE")
        for key, value in meta.items():
            # The spec through today's Spec, so that a key which is new since then and has its default is no difference.
            before = store.spec().model_dump(mode="json") if key == "spec" else store.meta(key)
            if key == "spec" and store._version >= 2 and _grown(before, value):
                store._grow(spec)
                continue
            found = differences(before, value)
            if found:
                store.close()
                raise GossamerError(f"{path.parent} holds results of another {key} ({'; '.join(found)}); choose another --out")
        return store

    def _grow(self, spec: Spec) -> None:
        """Cells that the spec did not have before."""
        held = {run.cell for run in self.runs()}
        cells = [astuple(cell) for cell in spec.cells() if cell not in held]
        with self._transaction() as db:
            db.execute("DELETE FROM meta WHERE key = 'partition'")  # counted for the old grid
            db.execute("UPDATE meta SET value = ? WHERE key = 'spec'", (json.dumps(spec.model_dump(mode="json")),))
            db.executemany(_PENDING, cells)

    def close(self) -> None:
        self._db.close()

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        with _clear_errors(self.path):
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield self._db
                self._db.execute("COMMIT")
            except BaseException:
                with contextlib.suppress(sqlite3.Error):
                    self._db.execute("ROLLBACK")
                raise

    def _query(self, sql: str, *arguments: Any) -> list[tuple[Any, ...]]:
        with _clear_errors(self.path):
            return self._db.execute(sql, arguments).fetchall()

    # --- Reading ---------------------------------------------------------------------------------------------------------

    def meta(self, key: str) -> Any:
        found = self._query("SELECT value FROM meta WHERE key = ?", key)
        return json.loads(found[0][0]) if found else None

    def spec(self) -> Spec:
        return build(self.meta("spec"), str(self.path), stored=True)

    def runs(self, where: str = "", *arguments: Any) -> list[Run]:
        there, otherwise = self._columns("runs"), {"failures": f"'{NONE}'"}  # of older versions some are missing
        columns = ", ".join(name if name in there else otherwise.get(name, "NULL") for name in Run.__dataclass_fields__)
        rows = self._query(f"SELECT {columns} FROM runs {where} ORDER BY id", *arguments)
        named = [dict(zip(Run.__dataclass_fields__, row, strict=True)) for row in rows]
        return [Run(**(row | {"tensors": tuple(json.loads(row["tensors"] or "[]"))})) for row in named]

    def _columns(self, table: str) -> set[str]:
        """None, if there is no such table."""
        return {row[1] for row in self._query(f"PRAGMA table_info({table})")}

    def run(self, run: int) -> Run:
        return self.runs("WHERE id = ?", run)[0]

    def epochs(self, run: int) -> list[EpochRecord]:
        columns = ", ".join(EpochRecord.__dataclass_fields__)
        return [EpochRecord(*row) for row in self._query(f"SELECT {columns} FROM epochs WHERE run = ? ORDER BY epoch", run)]

    def profiles(self, run: Run) -> list[ProfileRow]:
        sql = "SELECT step, epoch, consensus_distance, bytes, norms FROM profiles WHERE run = ? ORDER BY step"
        rows = self._query(sql, run.id)
        return [
            ProfileRow(step, epoch, distance, received, _unpacked(blob, len(run.tensors)))
            for step, epoch, distance, received, blob in rows
        ]

    def changes(self, run: int) -> list[Change]:
        sql = "SELECT step, epoch, graph, reason FROM events WHERE run = ? AND kind = 'graph' ORDER BY step"
        return [Change(*row) for row in self._query(sql, run)]

    def notes(self, run: int) -> list[tuple[Any, ...]]:
        """Kind and text of what else has happened."""
        return self._query("SELECT kind, reason FROM events WHERE run = ? AND kind != 'graph' ORDER BY step", run)

    def numbers(self, run: int) -> list[Number]:
        """What the method has noted, step by step."""
        if not self._columns("numbers"):
            return []
        rows = self._query("SELECT step, name, value FROM numbers WHERE run = ? ORDER BY step, name", run)
        return [Number(*row) for row in rows]

    def find(self, cell: Cell) -> Run:
        return next(run for run in self.runs() if run.cell == cell)

    # --- Writing ---------------------------------------------------------------------------------------------------------

    def set_meta(self, key: str, value: Any) -> None:
        with self._transaction() as db:
            db.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (key, json.dumps(value)))

    def identity(self) -> str:
        """Of this store among all: files of runs name it."""
        if self.meta(_IDENTITY) is None:
            self.set_meta(_IDENTITY, uuid.uuid4().hex)
        return self.meta(_IDENTITY)

    def mark_running(self, run: int) -> None:
        with self._transaction() as db:
            db.execute("UPDATE runs SET status = 'running' WHERE id = ?", (run,))

    def take(self, run: int, record: Record) -> None:
        """What the file of a run says, in one transaction: a run is finished whole or not at all."""
        begun = record.begun
        values: dict[str, Any] = {
            "status": record.status,
            "message": record.message,
            "machine": json.dumps(begun["machine"]),
            "backend": begun["backend"],
            "threads": begun["threads"],
            "tensors": json.dumps(begun["tensors"]),
        }
        there = self._columns("runs")
        numbers = record.result | {"processor_seconds": record.processor_seconds}
        values |= {name: number for name, number in numbers.items() if name in there}
        columns = ", ".join(f"{name} = ?" for name in values)
        with self._transaction() as db:
            for table in filter(self._columns, ("epochs", "profiles", "events", "numbers")):
                db.execute(f"DELETE FROM {table} WHERE run = ?", (run,))
            _add(db, run, record.rows)
            notes = [(run, kind, text) for kind, text in record.notes]
            db.executemany("INSERT OR REPLACE INTO events VALUES (?, 0, 0, ?, NULL, ?)", notes)
            db.execute(f"UPDATE runs SET {columns} WHERE id = ?", (*values.values(), run))


def _add(db: sqlite3.Connection, run: int, rows: Rows) -> None:
    blobs = [(run, p.step, p.epoch, p.consensus_distance, p.bytes, _packed(p)) for p in rows.profiles]
    db.executemany("INSERT OR REPLACE INTO profiles VALUES (?, ?, ?, ?, ?, ?)", blobs)
    columns = ", ".join(EpochRecord.__dataclass_fields__)
    marks = ", ".join("?" * (1 + len(EpochRecord.__dataclass_fields__)))
    epochs = [(run, *astuple(epoch)) for epoch in rows.epochs]
    db.executemany(f"INSERT OR REPLACE INTO epochs (run, {columns}) VALUES ({marks})", epochs)
    events = [(run, c.step, c.epoch, "graph", c.graph, c.reason) for c in rows.changes]
    db.executemany("INSERT OR REPLACE INTO events VALUES (?, ?, ?, ?, ?, ?)", events)
    if rows.numbers:
        db.execute(_NUMBERS)
        db.executemany("INSERT OR REPLACE INTO numbers VALUES (?, ?, ?, ?)", [(run, *astuple(n)) for n in rows.numbers])


def _packed(profile: Profile) -> bytes:
    return zlib.compress(profile.norms.numpy().astype("<f4").tobytes(), level=1)


def _unpacked(blob: bytes, tensors: int) -> np.ndarray:
    return np.frombuffer(zlib.decompress(blob), dtype="<f4").reshape(-1, tensors)


@contextlib.contextmanager
def _clear_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except sqlite3.Error as error:
        text = str(error)
        if "full" in text or "disk I/O" in text:
            raise GossamerError(
                f"{path} can't be written: {text}; finished runs are kept, free some space and run the same command again"
            ) from None
        if "locked" in text:
            raise GossamerError(f"{path} is being read by another process, and that has not ended for a minute") from None
        if "unable to open" in text or "readonly" in text:
            raise GossamerError(f"{path} can't be opened for writing: {text}") from None
        raise GossamerError(f"{path} is damaged or not a DBench store: {text}") from None


def _grown(before: dict[str, Any], now: dict[str, Any]) -> bool:
    """The grid has all that it had, and more."""
    same = all(before[key] == now[key] for key in before if key not in _GROWS)
    return same and before != now and all(value in now[key] for key in _GROWS for value in before[key])
