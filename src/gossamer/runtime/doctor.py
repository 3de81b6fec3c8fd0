"""``gossamer doctor``: tries what Gossamer needs, rather than looking at version numbers, and says what to do about what fails."""

from __future__ import annotations

import platform
import shutil
import socket
import tempfile
import threading
import webbrowser
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist

from gossamer.apps.data import catalog
from gossamer.data import machine
from gossamer.errors import OLDEST_TORCH, GossamerError
from gossamer.runtime import lab
from gossamer.transport.link import Link, Message, Tag

_WAIT_SECONDS = 10.0
_ROOM_GB = 1.0  # for results and checkpoints of a small bench
_PORT = 29500  # torchrun's, if it is not told another one


@dataclass(frozen=True)
class Finding:
    """``absent``: good to have, and not here. ``broken``: training can't work."""

    name: str
    state: Literal["works", "absent", "broken"]
    what: str
    advice: str = ""

    def __str__(self) -> str:
        advice = f"\n        {self.advice}" if self.advice else ""
        return f"{self.state:<8}{self.name}: {self.what}{advice}"


def examine() -> list[Finding]:
    return [finding() for finding in (_python, _torch, _gloo, _ports, _disk, _lab, _browser)] + [
        _data(dataset) for dataset in catalog.ALL if dataset.marks
    ]


def _python() -> Finding:
    own = machine.describe()
    return Finding(
        "Python",
        "works",
        f"{own['python']}, {platform.system()}, {own['cores']} cores; gossamer {own['gossamer']}, numpy {own['numpy']}",
    )


def _torch() -> Finding:
    """The oldest one is held at import."""
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    devices = f"{gpus} CUDA devices; the path over NCCL is not tested yet" if gpus else "CPU only"
    need = ".".join(map(str, OLDEST_TORCH))
    return Finding("torch", "works", f"{torch.__version__} ({need} or later is needed), {devices}")


def _gloo() -> Finding:
    """Two ranks in this process send each other a row over the interface that workers would take."""
    advice = "set GLOO_SOCKET_IFNAME to the interface that reaches the other workers (lo for one machine)"
    if not (dist.is_available() and dist.is_gloo_available()):
        return Finding("gloo", "broken", "this torch is built without it", "install torch's usual build")
    failures: list[str] = []
    store = dist.HashStore()
    ranks = [threading.Thread(target=_send_and_receive, args=(store, rank, failures), daemon=True) for rank in (0, 1)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(2 * _WAIT_SECONDS)
    if failures or any(rank.is_alive() for rank in ranks):
        return Finding("gloo", "broken", failures[0] if failures else "two ranks could not reach each other", advice)
    return Finding("gloo", "works", "two ranks have exchanged a row")


def _send_and_receive(store: dist.Store, rank: int, failures: list[str]) -> None:
    try:
        link = Link(store, rank, 2, timeout=_WAIT_SECONDS, name="gossamer/doctor")
        sent, came = torch.full((1000,), float(rank)), torch.empty(1000)
        tag = Tag(0, False, 0).part(0)
        for _, work in link.post([Message(1 - rank, tag, sent)], [Message(1 - rank, tag, came)]):
            work.wait(timedelta(seconds=_WAIT_SECONDS))
        if not bool((came == 1 - rank).all()):
            failures.append("what came is not what was sent")
        link.discard()
    except (RuntimeError, GossamerError) as error:
        failures.append(str(error).splitlines()[0])


def _ports() -> Finding:
    def free(port: int) -> str:
        with socket.socket() as listener:
            try:
                listener.bind(("127.0.0.1", port))
            except OSError as error:
                return str(error.strerror)
        return ""

    refused = free(0)
    if refused:
        return Finding(
            "ports", "broken", f"no port of 127.0.0.1 can be listened on: {refused}", "allow it in the sandbox or firewall"
        )
    if free(_PORT):
        return Finding(
            "ports",
            "absent",
            f"{_PORT}, torchrun's default, is taken",
            "torchrun --standalone takes a free one, or give --master-port",
        )
    return Finding("ports", "works", f"{_PORT}, torchrun's default, is free")


def _disk() -> Finding:
    try:
        with tempfile.NamedTemporaryFile(dir=".") as file:
            file.write(b"x")
    except OSError as error:
        return Finding(
            "disk", "broken", f"{Path.cwd()} can't be written: {error.strerror}", "go to another folder, or give --out"
        )
    gb = shutil.disk_usage(".").free / 1e9
    if gb < _ROOM_GB:
        return Finding("disk", "broken", f"{gb:.1f} GB are free in {Path.cwd()}", "free some, or give --out")
    return Finding("disk", "works", f"{gb:.0f} GB are free in this folder")


def _lab() -> Finding:
    try:
        lab.check()
    except GossamerError as error:
        what, _, advice = str(error).removeprefix("lab: ").partition("; ")
        return Finding("lab", "absent", what, advice)
    return Finding("lab", "works", "gossamer lab can make hosts with limited links")


def _browser() -> Finding:
    try:
        name = webbrowser.get().name
    except webbrowser.Error:
        names = ("chromium", "chromium-browser", "google-chrome", "firefox")
        name = next((name for name in names if shutil.which(name)), "")
    if not name:
        return Finding("browser", "absent", "none was found", "a report is one HTML file: copy it to a machine that has one")
    return Finding("browser", "works", f"{name}, for reports")


def _data(dataset: catalog.Dataset) -> Finding:
    found = dataset.find()
    name = f"data: {dataset.name}"
    if found is None:
        return Finding(name, "absent", f"{dataset.title} is not here", dataset.advice)
    return Finding(name, "works", f"in {found.parent}")
