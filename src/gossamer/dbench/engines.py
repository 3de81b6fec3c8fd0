"""Where cells run: an engine is a ``concurrent.futures.Executor`` whose workers are processes, here or elsewhere."""

from __future__ import annotations

import contextlib
import importlib
import itertools
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing import resource_tracker
from typing import Any

import torch
import torch.distributed as dist

from gossamer.dbench import signals, work
from gossamer.errors import GossamerError
from gossamer.members.store import open_link
from gossamer.spelling import nearest
from gossamer.transport.exchange import Exchange

HERE = "local"
KNOWN = "local, ray[:ADDRESS,cpus=…,gpus=…] or slurm[:partition=…,time=…]"
_RAY: dict[str, Callable[[str], Any]] = {"cpus": float, "gpus": float}
_SLURM: dict[str, Callable[[str], Any]] = {
    "cluster": str,  # submitit's other one is "local"
    "partition": str,
    "account": str,
    "qos": str,
    "time": lambda text: _minutes(text),
    "gpus": int,
    "cpus": int,
    "mem_gb": float,
    "parallel": int,
}
_OPTIONS = {"ray": _RAY, "slurm": _SLURM}


@dataclass(frozen=True)
class Where:
    """``on``: the name of an engine with its options, or an executor of the person's own. ``jobs``, ``devices``: of this machine."""

    on: str | Executor
    jobs: int | None = None
    devices: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.jobs is not None and self.jobs < 1:
            raise GossamerError(f"jobs={self.jobs} is out of range; at least one cell runs at a time")
        if not self.here and (self.jobs is not None or self.devices):
            raise GossamerError("--jobs and --devices are for cells on this machine, without --on or with --on local")
        name, _, _ = self._read()
        if name not in ("", HERE, "ray", "slurm"):
            raise GossamerError(f"there is no engine {name!r}; {nearest(name, [HERE, 'ray', 'slurm'])}")

    @property
    def here(self) -> bool:
        return self.on == HERE

    def _read(self) -> tuple[str, str | None, dict[str, Any]]:
        """Of ``"ray:head:6379,gpus=0.5"``: name, address, options."""
        if isinstance(self.on, Executor):
            return "", None, {}
        name, _, rest = self.on.partition(":")
        if name == HERE and rest:
            raise GossamerError(f"--on {self.on}: it takes no options; --jobs says how many, --devices where")
        takes = _OPTIONS.get(name, {})
        address, options = None, dict[str, Any]()
        for part in filter(None, rest.split(",")):
            key, equals, value = part.partition("=")
            if not equals and name == "ray" and address is None:
                address = part
            elif key not in takes:
                raise GossamerError(f"--on {self.on}: {name} has no option {key!r}; {nearest(key, takes, KNOWN)}")
            else:
                try:
                    options[key] = takes[key](value)
                except ValueError:
                    raise GossamerError(f"--on {self.on}: {key}={value!r} is not right; as in {KNOWN}") from None
        return name, address, options

    @contextlib.contextmanager
    def executor(self, default: int, cells: int, context: work.Context) -> Iterator[Executor | None]:
        """None: this process itself. ``default``: jobs, if none are asked for. ``cells``: no more jobs than those."""
        if isinstance(self.on, Executor):
            yield self.on
            return
        jobs = min(self.jobs or len(self.devices) or default, cells)
        if not cells or (self.here and jobs <= 1):
            yield None
            return
        made = Local(jobs, self.devices) if self.here else self._elsewhere(context)
        try:
            yield made
        except KeyboardInterrupt:  # the second one: a worker may be stuck
            if isinstance(made, Local):
                made.kill()
            raise
        finally:
            made.shutdown(cancel_futures=True)

    def check_package(self) -> None:
        """Before a store is made."""
        name, _, _ = self._read()
        if name in _OPTIONS:
            try:
                importlib.import_module(f"gossamer.integrations.{name}")
            except ModuleNotFoundError as error:
                raise GossamerError(str(error)) from None

    def _elsewhere(self, context: work.Context) -> Executor:
        name, address, options = self._read()
        options = {"gpus": int(context.device.startswith("cuda"))} | options
        try:
            if name == "ray":
                from gossamer.integrations.ray import RayExecutor

                return RayExecutor(address, **options)
            from gossamer.integrations.slurm import SlurmExecutor

            return SlurmExecutor(context.out / "slurm", **_of_submitit(options))
        except Exception as error:  # whatever an engine raises when it can't begin
            raise GossamerError(f"--on {self.on}: {(str(error).strip().splitlines() or [type(error).__name__])[0]}") from None


def check_device(device: str) -> None:
    try:
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise GossamerError(f"device {device!r} can't be used here: {str(error).splitlines()[0]}") from None


def _minutes(text: str) -> int:
    """As Slurm writes times: minutes[:seconds], hours:minutes:seconds, or days-hours[:minutes[:seconds]]."""
    days, dash, clock = text.rpartition("-")
    parts = [int(part) for part in clock.split(":")]
    if not 1 <= len(parts) <= 3:
        raise ValueError(text)
    hours, minutes = [*parts, 0][:2] if dash or len(parts) == 3 else (0, parts[0])
    return (24 * int(days if dash else 0) + hours) * 60 + minutes


def _of_submitit(options: Mapping[str, Any]) -> dict[str, Any]:
    """Our names to those of submitit."""
    names = {
        "gpus": "gpus_per_node",
        "cpus": "cpus_per_task",
        "parallel": "slurm_array_parallelism",
        "time": "timeout_min",
        "cluster": "cluster",
        "mem_gb": "mem_gb",
    }
    return {names.get(key, f"slurm_{key}"): value for key, value in options.items()}


def torchrun(device: str, side_by_side: bool) -> tuple[Exchange | None, str]:
    """Under torchrun: the other processes, and the device that is ours."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return None, device
    if side_by_side:
        raise GossamerError("--jobs, --on and --devices are for one process; under torchrun all processes work on the same run")
    if device == "cuda":
        device = f"cuda:{os.environ.get('LOCAL_RANK', '0')}"
        torch.cuda.set_device(device)
    if not dist.is_initialized():
        dist.init_process_group("nccl" if device.startswith("cuda") else "gloo")
    link = open_link(torch.device(device))
    return (Exchange(link) if link else None), device


class Local(ThreadPoolExecutor):
    """Processes of this machine, each a pool of one: one that is killed costs its own cell, and is made again. They end with this process,
    whatever ends it. ``devices`` are given to them in turn."""

    def __init__(self, jobs: int, devices: Sequence[str] = ()) -> None:
        self._devices = itertools.cycle(devices or (None,))
        self._own, self._pools = threading.local(), list[ProcessPoolExecutor]()
        if os.name == "posix":
            resource_tracker.ensure_running()  # now: where it is started it lets Ctrl-C through again
        super().__init__(jobs, initializer=self._begin)

    def submit(self, call: Callable[..., Any], /, *arguments: Any, **more: Any) -> Future[Any]:
        return super().submit(self._in_process, call, *arguments, **more)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        super().shutdown(wait, cancel_futures=cancel_futures)
        for pool in self._pools:
            pool.shutdown(wait)

    def kill(self) -> None:
        """The processes, whatever they do. What is queued is cancelled first, so that no other one is started."""
        super().shutdown(wait=False, cancel_futures=True)
        for pool in self._pools:
            for process in list((pool._processes or {}).values()):
                process.kill()

    def _begin(self) -> None:
        """In each thread."""
        signals.block_ctrl_c()  # so that workers start with it blocked: it reaches all of us, and is for the main thread to handle
        self._own.device = next(self._devices)
        self._make_pool()

    def _make_pool(self) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._own.pool = ProcessPoolExecutor(1, spawn, _begin_process, (os.getpid(), self._own.device))
        self._pools.append(self._own.pool)

    def _in_process(self, call: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return self._own.pool.submit(call, *arguments).result()
        except BrokenProcessPool:
            self._make_pool()
            raise


def _begin_process(parent: int, device: str | None) -> None:
    signals.end_with(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the bench tells us what to do
    work.use(device)
