"""The pool's process: forks workers, hands each case to all of them, and says what went wrong in which rank.

It is started by pool.py. A case comes as a line of JSON on standard input; the answer is a line on standard output.

python -m tests.pool_driver [MODULE …]    # modules that are imported before the forks
"""

import contextlib
import faulthandler
import gc
import importlib
import json
import os
import queue
import re
import selectors
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
import warnings
from dataclasses import dataclass
from datetime import timedelta
from typing import IO

import pytest
import torch
import torch.distributed as dist

from tests import workers as launcher
from tests.world import TIMEOUT_SECONDS, World

GRACE_SECONDS = 3.0  # from the first failure of a case: for the errors of the other workers
STACK_SECONDS = 0.5  # for a worker that hangs, to write where

OWN_FRAMES = re.compile(rf'  File "{re.escape(__file__)}", .* in _call\n(  File .*\n)*')  # of a stack: what called the case

# --- The pool's process -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Worker:
    rank: int
    pid: int
    replies: IO[str]
    requests: socket.socket
    output: IO[bytes]  # what it prints, to both streams

    def printed(self):
        self.output.seek(0)
        text = OWN_FRAMES.sub("", self.output.read().decode(errors="replace")).strip()
        return f"--- output of rank {self.rank} ---\n{text}" if text else ""

    def end(self):
        """Kill the process; its exit status."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


class Group:
    """Workers that belong to one process group of torch."""

    def __init__(self, size):
        self.size = size
        self.workers = []
        self.case = self.before = None  # names, of the case that runs and of the last one
        environment = launcher.environment(size)
        for rank in range(size):
            ours, theirs = socket.socketpair()
            output = tempfile.TemporaryFile(mode="a+b", buffering=0)  # noqa: SIM115 - closed with the group
            pid = os.fork()
            if pid == 0:
                _work(rank, size, environment, theirs, output, [worker.requests for worker in self.workers] + [ours])
            theirs.close()
            self.workers.append(Worker(rank, pid, ours.makefile("r"), ours, output))

    def run(self, case, limit):
        """Errors as ``{rank: text}``. None: standard input has ended, and so has pytest."""
        self.before, self.case = self.case, case["name"]
        for worker in self.workers:
            worker.output.truncate(0)
            with contextlib.suppress(BrokenPipeError):  # it has died; there is no reply
                worker.requests.sendall(_line(case))
        errors, waiting = {}, {worker.rank: worker for worker in self.workers}
        deadline = time.monotonic() + limit
        with selectors.DefaultSelector() as selector:
            selector.register(sys.stdin, selectors.EVENT_READ)
            for worker in self.workers:
                selector.register(worker.requests, selectors.EVENT_READ, worker)
            while waiting and (left := deadline - time.monotonic()) > 0:
                for key, _ in selector.select(left):
                    worker = key.data
                    if worker is None:
                        return None
                    selector.unregister(worker.requests)
                    del waiting[worker.rank]
                    if error := self._error(worker):
                        errors[worker.rank] = error
                        deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        return errors | self._hung(waiting.values(), errors, limit)

    def _error(self, worker):
        reply = worker.replies.readline()
        if not reply.endswith("\n"):
            code = worker.end()
            self.workers.remove(worker)
            how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
            before = f"; the case before it in these workers was {self.before}" if self.before else ""
            return f"the process {how} in the middle of the case{before}\n{worker.printed()}"
        error = json.loads(reply)
        return error and error + worker.printed()

    def _hung(self, waiting, errors, limit):
        for worker in waiting:
            os.kill(worker.pid, signal.SIGUSR1)  # writes its stack
        if waiting:
            time.sleep(STACK_SECONDS)
        late = f"{GRACE_SECONDS:g} s after the first failure" if errors else f"after {limit:g} s, the limit of a case"
        return {worker.rank: f"still running {late}\n{worker.printed()}" for worker in waiting}

    def end(self):
        for worker in self.workers:
            worker.end()
            worker.requests.close()
            worker.replies.close()
            worker.output.close()


class Server:
    """A plugin of pytest. So test modules are imported as by pytest itself, and an assert that fails shows its values."""

    @pytest.hookimpl(tryfirst=True)
    def pytest_cmdline_main(self):
        serve()
        return 0


def main(preload):
    for module in preload:
        importlib.import_module(module)
    pytest.main(["--capture=no"], plugins=[Server()])


def serve():
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what is printed by accident is no answer
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()  # what was imported is not looked through again, by any worker
    group = None
    try:
        while line := sys.stdin.readline():
            request = json.loads(line)
            if group is None or group.size != request["size"]:
                if group is not None:
                    group.end()
                group = Group(request["size"])
            errors = group.run(request["case"], request["limit"])
            if errors is None:
                break
            if errors:
                group.end()
                group = None
            answers.write(json.dumps(list(errors.items())) + "\n")
            answers.flush()
    finally:
        if group is not None:
            group.end()


def _line(thing):
    return (json.dumps(thing) + "\n").encode()


# --- A worker ---------------------------------------------------------------------------------------------------------------


def _work(rank, size, environment, requests, output, others):
    """A fork's whole life."""
    try:
        for end in others:
            os.close(end.detach())  # or another worker would not see the end of the pool's process
        for stream, descriptor in ((os.open(os.devnull, os.O_RDONLY), 0), (output.fileno(), 1), (output.fileno(), 2)):
            os.dup2(stream, descriptor)
        os.environ.update(environment | launcher.seat(rank))
        warnings.filterwarnings("error", category=DeprecationWarning, module="gossamer")  # as pytest has it in pyproject.toml
        faulthandler.enable()
        faulthandler.register(signal.SIGUSR1, all_threads=False)
        cases = queue.SimpleQueue()
        threading.Thread(target=_listen, args=(requests, cases), daemon=True).start()
        start = _attempt(dist.init_process_group, "gloo", timeout=timedelta(seconds=TIMEOUT_SECONDS))
        while True:
            case = cases.get()
            world = None  # and with it the models of the case before: all workers are done with it
            gc.collect()
            world = World(rank, size, case["folder"])
            error = start or _attempt(_call, case, world)
            sys.stdout.flush()
            requests.sendall(_line(error))
    finally:
        os._exit(1)


def _listen(requests, cases):
    """Also while a case runs: a worker ends as soon as the pool's process has ended."""
    for line in requests.makefile("r"):
        cases.put(json.loads(line))
    os._exit(1)


def _call(case, world):
    function = getattr(importlib.import_module(case["module"]), case["name"])
    body = getattr(function, "__wrapped__", function)  # as it was before on_workers
    torch.manual_seed(0)  # the same, in whichever order cases come
    body(world, **case["parameters"])


def _attempt(function, *arguments, **options):
    """The traceback of what is raised, from the case on; None if all went well."""
    try:
        function(*arguments, **options)
        return None
    except BaseException as error:
        frames = error.__traceback__
        while frames.tb_next and frames.tb_frame.f_code.co_filename == __file__:
            frames = frames.tb_next
        return "".join(traceback.format_exception(error.with_traceback(frames)))


if __name__ == "__main__":
    main(sys.argv[1:])
