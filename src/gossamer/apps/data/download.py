"""Downloads that go on where they broke off, are checked, and are in place whole or not at all."""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import http.client
import os
import shutil
import tarfile
import time
import urllib.error
import urllib.request
import zipfile
import zlib
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path, PurePosixPath
from typing import IO, Any

import filelock

from gossamer.apps.data.catalog import Archive, Dataset
from gossamer.errors import GossamerError

Progress = Callable[[str, int, int | None], None]  # a file's name, its bytes so far, its bytes in all if known

_CHUNK = 1 << 18
_TIMEOUT = 30.0  # seconds without a byte
_TRIES = 4  # in a row that bring nothing new
_PAUSE = 1.0  # seconds before the next try, doubled each time
_LOCK = "lock"


def get(dataset: Dataset, folder: Path, source: str | None, progress: Progress, pause: float = _PAUSE) -> Path:
    """Download and unpack ``dataset`` to ``folder``, which must not be there yet. ``source``: another address of the same files.

    Half a download stays in ``FOLDER.download``, and the next call goes on with it."""
    if not dataset.archives:
        raise GossamerError(f"{dataset.title} can't be downloaded: {dataset.advice}")
    work = folder.with_name(folder.name + ".download")
    fresh = work / "unpacked"
    with _disk_errors(folder), _locked(work):
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise GossamerError(f"{folder} is there already and not empty; choose another folder with --to, or remove it")
        shutil.rmtree(fresh, ignore_errors=True)
        fresh.mkdir()
        try:
            for archive in dataset.archives:
                file = work / archive.name
                fetch(_address(archive, source), file, archive.md5, progress, pause)
                try:
                    unpack(file, archive.kind, fresh)
                except GossamerError:
                    file.unlink()
                    raise
            if dataset.find(fresh) is None:
                raise GossamerError(f"{archive.name} holds no {' or '.join(dataset.marks)}: it is not {dataset.title}")
            fresh.replace(folder)
        finally:
            shutil.rmtree(fresh, ignore_errors=True)
            if folder.exists() or os.listdir(work) == [_LOCK]:
                shutil.rmtree(work)
    return folder


def _address(archive: Archive, source: str | None) -> str:
    if source is None:
        return archive.url
    return source if source.endswith(archive.name) else f"{source.rstrip('/')}/{archive.name}"


def fetch(url: str, target: Path, md5: str, progress: Progress, pause: float = _PAUSE) -> None:
    """``url`` to ``target``, through ``target.part``. A connection that breaks is taken up again, unless it keeps bringing nothing."""
    if not url.startswith(("http://", "https://")):
        raise GossamerError(f"{url} is not an address to download from; one with http:// or https:// was expected")
    part = target.with_name(target.name + ".part")
    if not target.exists():
        failures = 0
        while True:
            before = part.stat().st_size if part.exists() else 0
            reason = _more(url, part, lambda done, total: progress(target.name, done, total))
            if reason is None:
                break
            failures = failures + 1 if part.stat().st_size <= before else 1
            if failures >= _TRIES:
                raise GossamerError(
                    f"{url} broke off at byte {part.stat().st_size}: {reason}; what came is kept, give the same command again to go on"
                )
            time.sleep(pause * 2 ** (failures - 1))
        part.replace(target)
    found = _md5(target)
    if found != md5:
        size = target.stat().st_size
        target.unlink()
        raise GossamerError(
            f"{url} is not the official file: its {size} bytes have MD5 {found}, {md5} was expected; "
            "they were removed, try again or another address with --from"
        )


def _more(url: str, part: Path, progress: Callable[[int, int | None], None]) -> str | None:
    """Get the rest of the file; None when it is whole, else why it is not."""
    have = part.stat().st_size if part.exists() else 0
    headers = {"User-Agent": f"gossamer/{metadata.version('gossamer')}", "Accept-Encoding": "identity"}
    if have:
        headers["Range"] = f"bytes={have}-"
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=_TIMEOUT) as answer:
            resumed = answer.status == 206 and answer.headers.get("Content-Range", "").startswith(f"bytes {have}-")
            if answer.status == 206 and not resumed:
                raise GossamerError(f"{url}: the server sent {answer.headers.get('Content-Range')!r}, not what was asked for")
            done = have if resumed else 0
            length = answer.headers.get("Content-Length")
            total = done + int(length) if length and length.isdigit() else None
            with open(part, "ab" if resumed else "wb") as file:
                return _copy(answer, file, done, total, progress)
    except urllib.error.HTTPError as error:
        error.close()
        if error.code == 416 and have:  # nothing after what we have: it is whole, or another file
            if error.headers.get("Content-Range", "").endswith(f"/{have}"):
                return None
            part.write_bytes(b"")
            return "the server's file is shorter than what was there"
        if error.code >= 500 or error.code in (408, 429):
            part.touch()
            return f"the server says {error.code} {error.reason}"
        raise GossamerError(f"{url}: the server says {error.code} {error.reason}; try another address with --from") from None
    except (urllib.error.URLError, http.client.HTTPException, ConnectionError, TimeoutError) as error:
        part.touch()
        return f"{getattr(error, 'reason', None) or error or type(error).__name__}"


def _copy(
    answer: Any, file: IO[bytes], done: int, total: int | None, progress: Callable[[int, int | None], None]
) -> str | None:
    progress(done, total)
    while True:
        try:
            chunk = answer.read1(_CHUNK)
        except (http.client.HTTPException, OSError) as error:
            return str(error) or type(error).__name__
        if not chunk:
            break
        file.write(chunk)
        file.flush()
        done += len(chunk)
        progress(done, total)
    return None if total is None or done == total else f"the connection closed; {total} bytes were expected"


def _md5(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()


def unpack(file: Path, kind: str, folder: Path) -> None:
    """Into ``folder``, and nothing outside of it: an entry that points elsewhere is refused."""
    if kind == "file":
        shutil.copyfile(file, folder / file.name)
        return
    try:
        if kind == "tar":
            if not hasattr(tarfile, "data_filter"):
                raise GossamerError("unpacking needs Python 3.11.4 or later, whose tarfile refuses entries that point outside")
            with tarfile.open(file) as tar:
                tar.extractall(folder, filter="data")
        else:
            with zipfile.ZipFile(file) as archive:
                for name in archive.namelist():
                    if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts or "\\" in name:
                        raise GossamerError(f"{file} is refused: its entry {name!r} points outside of the folder")
                archive.extractall(folder)
    except tarfile.FilterError as error:
        raise GossamerError(f"{file} is refused: {error}") from None
    except (tarfile.TarError, gzip.BadGzipFile, zipfile.BadZipFile, zlib.error, EOFError, RuntimeError) as error:
        raise GossamerError(f"{file} can't be unpacked: {error or type(error).__name__}") from None


@contextlib.contextmanager
def _locked(work: Path) -> Iterator[None]:
    """One download of a data set at a time; the lock goes with the process that holds it."""
    work.mkdir(parents=True, exist_ok=True)
    try:
        with filelock.FileLock(work / _LOCK, timeout=0):
            yield
    except filelock.Timeout:
        raise GossamerError(f"another gossamer data get is downloading to {work}") from None


@contextlib.contextmanager
def _disk_errors(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise GossamerError(f"{error.filename or folder} can't be written: {error.strerror or error}") from None
