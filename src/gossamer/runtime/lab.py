"""Several hosts on one Linux machine: network namespaces with an address and a bandwidth each.

What a slow network does to training can't be seen over loopback. A lab gives each host an ``eth0`` whose egress is limited, behind
one switch; two processes of one host talk over its own loopback, as on a real machine. CPU and disk are shared by all hosts.

    with Lab(hosts=4, rate="1gbit") as lab:
        result = lab.run(["python", "train.py"], workers_per_host=2, timeout=600, echo=False)
        print(result.exit_code, result.outputs[0], result.traffic[0].sent_bytes)

Nothing is made in the machine's own network, nothing outside can be reached from within, and when the process that opened the lab
ends, in whatever way, the kernel takes everything down (lab_supervisor.py says how).
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gossamer.errors import GossamerError

INTERFACE = "eth0"
PORT = 29500
TIMED_OUT = 124  # the exit code, as that of timeout(1)
_MOST = 250
_GRACE = 3.0  # seconds to end by oneself when another has failed, and again between SIGTERM and SIGKILL
_UNITS = {"kbit": 10**3, "mbit": 10**6, "gbit": 10**9}
_LOWEST, _HIGHEST = 10_000, 100 * 10**9
_CAPABILITIES = {"CAP_NET_ADMIN": 12, "CAP_SYS_ADMIN": 21}
_Take = Callable[[int, list[str]], None]  # what becomes of lines that a process has said
_WORKER = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class Counters:
    """What a host's ``eth0`` has sent and received, headers and acknowledgements included.

    The kernel hands on up to 64 kB with one header where the rate allows (from about 150mbit), so those add 0.1 %; below, 5 %.
    """

    sent_bytes: int
    received_bytes: int


@dataclass(frozen=True)
class Result:
    """``exit_code``: 0 if all are, else that of the first that failed (128 + number for a signal), or ``TIMED_OUT``.

    ``names``, ``exit_codes`` and ``outputs`` have one entry per process ("3" is rank 3; under torchrun, "host 3"), and ``first_failed``
    is an index into them. ``outputs`` (standard output and error together) are empty if the run was echoed. ``traffic`` is what each
    host sent and received in this run.
    """

    exit_code: int
    names: tuple[str, ...]
    exit_codes: tuple[int, ...]
    first_failed: int | None
    outputs: tuple[str, ...]
    seconds: float
    traffic: tuple[Counters, ...]


def bits_per_second(rate: str) -> int:
    """``"1gbit"``, ``"12.5mbit"``, ``"800kbit"``: decimal units, per second."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)(kbit|mbit|gbit)", rate.strip().lower())
    if found is None:
        raise GossamerError(f"lab: rate {rate!r} is not known; use a number and kbit, mbit or gbit, such as 1gbit or 12.5mbit")
    bits = round(float(found[1]) * _UNITS[found[2]])
    if not _LOWEST <= bits <= _HIGHEST:
        raise GossamerError(f"lab: rate {rate!r} is out of range; use 10kbit to 100gbit, or no rate for no limit")
    return bits


def _rates(rate: str | Sequence[str] | None, hosts: int) -> list[int | None]:
    if rate is None:
        return [None] * hosts
    each = [bits_per_second(one) for one in (rate.split(",") if isinstance(rate, str) else rate)]
    if len(each) not in (1, hosts):
        raise GossamerError(f"lab: {len(each)} rates for {hosts} hosts; give one rate for all, or one per host")
    return [*each] * (hosts // len(each))


def check() -> tuple[str, str]:
    """Raise if this machine can't hold a lab; else the programs ``ip`` and ``tc``."""
    if sys.platform != "linux":
        raise GossamerError(f"lab: needs Linux, whose network namespaces it is made of; this is {sys.platform}")
    status = Path("/proc/self/status").read_text()
    held = int(next(line for line in status.splitlines() if line.startswith("CapEff:")).split()[1], 16)
    missing = [name for name, bit in _CAPABILITIES.items() if not held >> bit & 1]
    if missing:
        raise GossamerError(
            f"lab: needs root, but {' and '.join(missing)} missing here; try sudo (in a container: --privileged)"
        )
    path = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
    programs = {name: shutil.which(name, path=path) for name in ("ip", "tc")}
    absent = [name for name, found in programs.items() if found is None]
    if absent:
        raise GossamerError(f"lab: the program {' and '.join(absent)} is not there; on Debian: apt install iproute2")
    return str(programs["ip"]), str(programs["tc"])


class Lab:
    """``hosts`` hosts, 10.77.0.1 and up. ``rate``: one for all, one per host, or None for no limit; it limits what a host *sends*.

    A context manager; it must be left in the thread that entered it (the lab ends with that thread). One run at a time.
    """

    def __init__(self, hosts: int, rate: str | Sequence[str] | None = None) -> None:
        if not 1 <= hosts <= _MOST:
            raise GossamerError(f"lab: {hosts} hosts; use 1 to {_MOST}")
        self.rates = _rates(rate, hosts)
        self.addresses = [f"10.77.0.{h + 1}" for h in range(hosts)]
        self._received = b""
        self._supervisor: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Lab:
        ip, tc = check()
        hosts = [{"address": a, "rate": r} for a, r in zip(self.addresses, self.rates, strict=True)]
        config = {"hosts": hosts, "ip": ip, "tc": tc, "interface": INTERFACE, "launcher": os.getpid()}
        self._control, theirs = socket.socketpair()
        program = str(Path(__file__).with_name("lab_supervisor.py"))
        with theirs:
            self._supervisor = subprocess.Popen(
                [sys.executable, "-I", "-S", program, str(theirs.fileno()), json.dumps(config)],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C in the terminal is the launcher's; it tells the others
            )
        try:
            self._hear("ready", None)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End everything in the lab. When this returns, no process of it is left."""
        supervisor, self._supervisor = self._supervisor, None
        if supervisor is None:
            return
        with contextlib.suppress(OSError):
            self._control.shutdown(socket.SHUT_RDWR)
        self._control.close()
        try:
            supervisor.wait(10)
        except subprocess.TimeoutExpired:
            supervisor.kill()
            supervisor.wait()

    def counters(self) -> list[Counters]:
        """Per host, since the lab was opened, as its interface counts them."""
        self._tell(do="counters")
        return [Counters(*host) for host in self._hear("counters", None)["hosts"]]

    def run(
        self,
        command: Sequence[str],
        *,
        workers_per_host: int = 1,
        env: Mapping[str, str] | None = None,
        timeout: float | None = None,
        echo: bool = True,
        keep_going: bool = False,
    ) -> Result:
        """Run ``command`` on every host, ``workers_per_host`` times, with RANK, MASTER_ADDR and so on as torchrun would set them.

        ``python`` is this interpreter. ``torchrun`` is started once per host and makes the workers itself. ``env`` is added to the
        environment of the caller. ``echo`` prints the output as it comes, with ``[rank]`` before each line; else it is captured.
        When a process fails, the others are ended after a few seconds, unless ``keep_going``. After ``timeout`` seconds all are ended.
        """
        processes = self._processes(list(command), workers_per_host)
        around = {k: v for k, v in (os.environ | dict(env or {})).items() if k not in _WORKER}
        defaults = {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}  # the latter: what was said before a kill is not lost
        job = {"processes": processes, "env": defaults | around | {"GLOO_SOCKET_IFNAME": INTERFACE}, "cwd": os.getcwd()}
        names = tuple(one["name"] for one in processes)
        outputs: list[list[str]] = [[] for _ in processes]

        def take(index: int, lines: list[str]) -> None:
            if echo:
                mark = f"[{names[index]}] " if len(names) > 1 else ""
                print("\n".join(mark + line for line in lines), flush=True)
            else:
                outputs[index] += [line + "\n" for line in lines]

        before = self.counters()
        began = time.monotonic()
        self._tell(do="run", **job, keep_going=keep_going, grace=_GRACE)
        timed_out = False
        try:
            done = self._hear("done", None if timeout is None else began + timeout, take)
        except TimeoutError:
            timed_out = True
            done = self._stop(take)
        except KeyboardInterrupt:
            with contextlib.suppress(ValueError):  # a message may have been cut in two by the interrupt
                self._stop(take)
            raise
        except GossamerError:
            raise  # nothing is running
        except BaseException:  # such as a closed pipe while echoing
            self.close()
            raise
        seconds = time.monotonic() - began
        codes = tuple(128 - code if code < 0 else code for code in done["codes"])
        first = done["first_failed"]
        traffic = tuple(
            Counters(b.sent_bytes - a.sent_bytes, b.received_bytes - a.received_bytes)
            for a, b in zip(before, self.counters(), strict=True)
        )
        code = TIMED_OUT if timed_out else 0 if first is None else codes[first]
        return Result(code, names, codes, first, tuple("".join(text) for text in outputs), seconds, traffic)

    def _processes(self, command: list[str], workers: int) -> list[dict[str, Any]]:
        """What to start where: an entry per worker, or per host if torchrun starts the workers."""
        if not command:
            raise GossamerError("lab: there is no command to run; give one, such as python train.py")
        if workers < 1:
            raise GossamerError(f"lab: {workers} workers per host; use 1 or more")
        if command[0] in ("python", "python3"):
            command[0] = sys.executable
        hosts, master = len(self.addresses), self.addresses[0]
        torchrun = [sys.executable, "-m", "torch.distributed.run"]
        if command[0] == "torchrun":
            command[:1] = torchrun
        if command[:3] == torchrun:
            if "--standalone" in command:
                raise GossamerError("lab: torchrun --standalone makes every host a job of its own; leave it out")
            options = f"--nnodes={hosts} --nproc-per-node={workers} --master-addr={master} --master-port={PORT}".split()
            return [
                {"host": h, "name": f"host {h}", "env": {}, "command": [*torchrun, *options, f"--node-rank={h}", *command[3:]]}
                for h in range(hosts)
            ]
        processes = []
        for rank in range(hosts * workers):
            host, local = divmod(rank, workers)
            values = (rank, local, hosts * workers, workers, host, host, master, PORT)
            env = dict(zip(_WORKER, map(str, values), strict=True))
            processes.append({"host": host, "name": str(rank), "command": command, "env": env})
        return processes

    def _stop(self, take: _Take) -> dict[str, Any]:
        """SIGTERM, some seconds, SIGKILL. Impatient people press Ctrl-C twice: then the lab is closed, which kills at once."""
        try:
            self._tell(do="stop", grace=_GRACE)
            return self._hear("done", time.monotonic() + _GRACE + 10, take)
        except TimeoutError:
            self.close()
            raise GossamerError("lab: its processes did not end, even by SIGKILL; the lab was closed") from None
        except BaseException:
            self.close()
            raise

    def _tell(self, **message: Any) -> None:
        if self._supervisor is None:
            raise GossamerError("lab: it is not open; use it inside `with Lab(…) as lab:`")
        with contextlib.suppress(ConnectionError):  # what went wrong is heard next
            self._control.settimeout(None)
            self._control.sendall(json.dumps(message).encode() + b"\n")

    def _hear(self, event: str, deadline: float | None, take: _Take | None = None) -> dict[str, Any]:
        """Wait for ``event``, handing on lines of output until it comes. TimeoutError at the deadline."""
        while True:
            while b"\n" not in self._received:
                self._control.settimeout(None if deadline is None else max(1e-3, deadline - time.monotonic()))
                try:
                    data = self._control.recv(1 << 16)
                except ConnectionError:
                    data = b""
                if not data:
                    self.close()
                    raise GossamerError("lab: its supervisor was ended from outside; open a new lab")
                self._received += data
            text, _, self._received = self._received.partition(b"\n")
            message: dict[str, Any] = json.loads(text)
            if message["event"] == "lines" and take is not None:
                take(message["process"], message["lines"])
            elif message["event"] == "error":
                raise GossamerError(f"lab: {message['message']}")
            elif message["event"] == event:
                return message
            if deadline is not None and time.monotonic() > deadline:
                raise TimeoutError
