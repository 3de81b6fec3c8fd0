"""The inside of a lab: PID 1 of namespaces of its own. lab.py starts this file as a program; only the standard library is used.

Nothing here cleans up, because nothing has to. Every process of the lab lives in this PID namespace, and the network namespaces
have no names, so when PID 1 is gone the kernel kills the processes, and namespaces, bridge and links go with them. PID 1 goes
when the launcher does: by PR_SET_PDEATHSIG (launcher -> ``_outside`` -> PID 1), and by the end of file on the control socket.

The control socket carries JSON lines. In: ``run``, ``stop``, ``counters``. Out: ``ready``, ``lines``, ``done``, ``counters``, ``error``.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

_NEWNS, _NEWNET, _NEWPID = 0x00020000, 0x40000000, 0x20000000
_BIND, _PRIVATE = 1 << 12, (1 << 18) | (1 << 14)  # MS_BIND; MS_PRIVATE | MS_REC
_PR_SET_PDEATHSIG = 1
_MTU = 1500
_BURST, _QUEUE = 0.004, 0.020  # seconds of the rate: a smaller burst, or a shaped ingress, halves what TCP reaches
_LONGEST_LINE = 1 << 16

_libc = ctypes.CDLL(None, use_errno=True)


class SetupError(Exception):
    """The lab can't be made; the message is for a person."""


def _call(name: str, *arguments: Any) -> None:
    if getattr(_libc, name)(*arguments) != 0:
        code = ctypes.get_errno()
        raise SetupError(
            f"{name} failed: {os.strerror(code)}; the lab needs root with CAP_SYS_ADMIN, and a kernel with namespaces"
        )


def _die_with_parent() -> None:
    _call("prctl", _PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


@contextlib.contextmanager
def _inside(host: int, home: int) -> Iterator[None]:
    """In the network namespace ``host`` (a file descriptor), then back. There is one thread, so all of it moves."""
    _call("setns", host, _NEWNET)
    try:
        yield
    finally:
        _call("setns", home, _NEWNET)


def _tool(command: list[str], batch: str = "", *, needs: str) -> None:
    done = subprocess.run(command, input=batch, capture_output=True, text=True, check=False)
    if done.returncode:
        said = next(iter(done.stderr.splitlines()), f"exit code {done.returncode}")
        if any(hint in said for hint in ("nknown", "not supported", "No such file")):  # iproute2, new and old
            raise SetupError(f"this kernel has no {needs}; load the module or use a kernel that has it ({said})")
        raise SetupError(f"{' '.join(command)}: {said}")


def _shape(rate: int) -> list[str]:
    """tbf for a host's egress. Large TCP segments (GSO, up to 64 kB) that don't fit the burst are split by tbf itself."""
    burst = max(int(rate / 8 * _BURST), 8 * _MTU)
    queue = max(int(rate / 8 * _QUEUE), 32 * _MTU)  # with less, TCP stumbles at low rates
    return ["rate", f"{rate}bit", "burst", f"{burst}b", "limit", f"{burst + queue}b"]


def make_hosts(config: dict[str, Any]) -> tuple[int, list[int]]:
    """A bridge here, and per host a namespace with eth0. Returns descriptors of this namespace and of the hosts'."""
    ip, tc, device = config["ip"], config["tc"], config["interface"]
    home = os.open("/proc/self/ns/net", os.O_RDONLY)
    _no_ipv6()
    _tool([ip, "link", "add", "switch", "type", "bridge"], needs="bridge (CONFIG_BRIDGE, module bridge)")
    hosts = []
    for _ in config["hosts"]:
        _call("unshare", _NEWNET)
        hosts.append(os.open("/proc/self/ns/net", os.O_RDONLY))
        _no_ipv6()
    _call("setns", home, _NEWNET)
    links = ["link set switch up"]
    for h, fd in enumerate(hosts):
        inside = f"{device} address {_hardware(h)} netns /proc/{os.getpid()}/fd/{fd}"
        links.append(f"link add host{h} type veth peer name {inside}")
        links.append(f"link set host{h} master switch up")
    _tool([ip, "-batch", "-"], "\n".join(links), needs="veth (CONFIG_VETH, module veth)")
    for h, host in enumerate(config["hosts"]):
        with _inside(hosts[h], home):
            lines = ["link set lo up", f"address add {host['address']}/24 dev {device}", f"link set {device} up"]
            lines += [
                f"neigh add {other['address']} lladdr {_hardware(o)} dev {device} nud permanent"
                for o, other in enumerate(config["hosts"])
                if o != h
            ]
            _tool([ip, "-batch", "-"], "\n".join(lines), needs="IPv4")
            if host["rate"] is not None:
                command = [tc, "qdisc", "add", "dev", device, "root", "tbf", *_shape(host["rate"])]
                _tool(command, needs="tbf (CONFIG_NET_SCH_TBF, module sch_tbf)")
    return home, hosts


def _hardware(host: int) -> str:
    """Addresses known beforehand, so that no host has to ask: the kernel keeps 1024 answers for all namespaces together, and 33 hosts
    that all talk to each other need more."""
    return f"02:00:0a:4d:00:{host + 1:02x}"


def _names(config: dict[str, Any]) -> None:
    """host0, host1 … in /etc/hosts, as seen from inside: torch asks for the names of its peers and warns if there are none."""
    _call("mount", b"tmpfs", b"/proc", b"tmpfs", 0, None)  # a place that is ours; /proc proper covers it in a moment
    with contextlib.suppress(OSError, SetupError):
        with open("/etc/hosts") as old, open("/proc/hosts", "w") as new:
            new.write(old.read())
            for h, host in enumerate(config["hosts"]):
                new.write(f"\n{host['address']} host{h}\n::ffff:{host['address']} host{h}.lab\n")  # torch asks for the latter
        _call("mount", b"/proc/hosts", b"/etc/hosts", None, _BIND, None)


def _no_ipv6() -> None:
    """For interfaces yet to come: one address per host, and no packets that no program asked for. Loopback exists and keeps ::1."""
    with contextlib.suppress(OSError), open("/proc/sys/net/ipv6/conf/default/disable_ipv6", "w") as file:
        file.write("1")


@dataclass
class _Process:
    child: subprocess.Popen[bytes]
    pipe: int
    text: bytes = b""
    code: int | None = None


class Supervisor:
    """One thread and one loop: commands of the launcher, output and ends of the processes, and what is due."""

    def __init__(self, control: socket.socket, device: str, home: int, hosts: list[int]) -> None:
        self.control, self.device, self.home, self.hosts = control, device, home, hosts
        self.processes: list[_Process] = []
        self.first_failed: int | None = None
        self.due: list[tuple[float, signal.Signals]] = []  # when the processes that are left get which signal
        self.received = b""
        self.job: dict[str, Any] = {}
        wake, waker = socket.socketpair()
        wake.setblocking(False)
        waker.setblocking(False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(waker.fileno(), warn_on_full_buffer=False)
        self.waker = waker  # kept, or it would be closed
        self.selector = selectors.DefaultSelector()
        self.selector.register(wake, selectors.EVENT_READ, lambda: wake.recv(4096))
        self.selector.register(control, selectors.EVENT_READ, self.obey)

    def serve(self) -> None:
        while True:
            patience = max(0.0, self.due[0][0] - time.monotonic()) if self.due else None
            for key, _ in self.selector.select(patience):
                key.data()
            self.reap()
            self.signal_whoever_is_due()
            if self.processes and all(p.code is not None for p in self.processes):
                self.finish()

    def say(self, **message: Any) -> None:
        self.control.sendall(json.dumps(message).encode() + b"\n")

    def obey(self) -> None:
        data = self.control.recv(1 << 16)
        if not data:
            os._exit(0)  # the launcher is gone or has closed the lab, and so is everything in it
        *lines, self.received = (self.received + data).split(b"\n")
        for line in lines:
            message = json.loads(line)
            match message["do"]:
                case "run":
                    self.start(message)
                case "stop":
                    self.stop(message["grace"])
                case "counters":
                    self.say(event="counters", hosts=[self.counters(host) for host in self.hosts])

    def counters(self, host: int) -> list[int]:
        with _inside(host, self.home), open("/proc/thread-self/net/dev") as file:
            fields = next(line for line in file if line.strip().startswith(f"{self.device}:")).partition(":")[2].split()
        return [int(fields[8]), int(fields[0])]

    def start(self, job: dict[str, Any]) -> None:
        self.job, self.first_failed, self.due = job, None, []
        for one in job["processes"]:
            try:
                with _inside(self.hosts[one["host"]], self.home):
                    child = subprocess.Popen(
                        one["command"],
                        env=job["env"] | one["env"],
                        cwd=job["cwd"],
                        stdin=subprocess.DEVNULL,
                        stdout=subprocess.PIPE,
                        stderr=subprocess.STDOUT,
                    )
            except OSError as error:
                self.finish(f"{one['command'][0]} can't be started: {error.strerror} ({error.filename})")
                return
            assert child.stdout is not None
            pipe = child.stdout.fileno()
            os.set_blocking(pipe, False)
            index = len(self.processes)
            self.processes.append(_Process(child, pipe))
            self.selector.register(pipe, selectors.EVENT_READ, lambda index=index: self.read(index))

    def read(self, index: int, *, last: bool = False) -> None:
        """Pass on what the process has said: whole lines, or all of it if nothing more can come."""
        process = self.processes[index]
        while True:
            try:
                data = os.read(process.pipe, 1 << 16)
            except BlockingIOError:
                break
            if not data:
                if process.pipe in self.selector.get_map():
                    self.selector.unregister(process.pipe)
                break
            process.text += data
            if not last:
                break  # the others shall have their turn
        *lines, process.text = process.text.split(b"\n")
        if process.text and (last or len(process.text) > _LONGEST_LINE):
            lines.append(process.text)
            process.text = b""
        if lines:
            self.say(event="lines", process=index, lines=[line.decode(errors="replace") for line in lines])

    def reap(self, options: int = os.WNOHANG) -> None:
        """Also processes whose parent has ended: PID 1 inherits them. With ``options=0``: wait for all of them."""
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, options)
                if not pid:
                    break
                self.ended(pid, os.waitstatus_to_exitcode(status))

    def ended(self, pid: int, code: int) -> None:
        for index, process in enumerate(self.processes):
            if process.child.pid == pid:
                process.code = process.child.returncode = code
                if code and self.first_failed is None:
                    self.first_failed = index
                    if not self.job["keep_going"] and not self.due:
                        self.stop(self.job["grace"], after=self.job["grace"])

    def stop(self, grace: float, after: float = 0.0) -> None:
        now = time.monotonic()
        self.due = [(now + after, signal.SIGTERM), (now + after + grace, signal.SIGKILL)]

    def signal_whoever_is_due(self) -> None:
        while self.due and self.due[0][0] <= time.monotonic():
            _, which = self.due.pop(0)
            for process in self.processes:
                if process.code is None:
                    os.kill(process.child.pid, which)  # not reaped yet, so the number is still its own

    def kill_all(self) -> None:
        """Whatever is left in this PID namespace, except PID 1: children of children, too."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(-1, signal.SIGKILL)
        self.reap(0)

    def finish(self, error: str | None = None) -> None:
        self.kill_all()
        for index, process in enumerate(self.processes):
            self.read(index, last=True)
            if process.pipe in self.selector.get_map():
                self.selector.unregister(process.pipe)
            assert process.child.stdout is not None
            process.child.stdout.close()
        codes = [process.code for process in self.processes]
        self.processes, self.due = [], []
        if error is None:
            self.say(event="done", codes=codes, first_failed=self.first_failed)
        else:
            self.say(event="error", message=error)


def _first(control: socket.socket, config: dict[str, Any]) -> None:
    """PID 1 of the new namespaces."""
    _die_with_parent()
    _call("mount", b"none", b"/", None, _PRIVATE, None)  # or the next lines would change /proc of the whole machine
    _names(config)
    _call("mount", b"proc", b"/proc", b"proc", 0, None)
    supervisor = Supervisor(control, config["interface"], *make_hosts(config))
    supervisor.say(event="ready")
    supervisor.serve()


def _outside(control: socket.socket, config: dict[str, Any]) -> None:
    """The launcher's child: makes the namespaces, then waits. Its end is PID 1's end and the other way round."""
    _die_with_parent()
    if os.getppid() != config["launcher"]:
        os._exit(1)  # it ended before the line above
    _call("unshare", _NEWPID | _NEWNS | _NEWNET)
    child = os.fork()
    if child == 0:
        _inform(_first, control, config)
        os._exit(1)
    control.close()
    os.waitpid(child, 0)
    os._exit(0)


def _inform(work: Any, control: socket.socket, config: dict[str, Any]) -> None:
    try:
        work(control, config)
    except SetupError as error:
        control.sendall(json.dumps({"event": "error", "message": str(error)}).encode() + b"\n")
    except ConnectionError:  # the other end is closed
        os._exit(1)


if __name__ == "__main__":
    _inform(_outside, socket.socket(fileno=int(sys.argv[1])), json.loads(sys.argv[2]))
