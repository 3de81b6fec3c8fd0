"""DBench and the library as on macOS or Windows, as far as Linux can show it: what Linux alone has is hidden before gossamer is imported.

    python tests/elsewhere_driver.py darwin|win32 OUT

Processes that DBench starts run the top of this file, too, so the same is hidden from them.
"""

import ctypes
import multiprocessing.popen_spawn_posix  # noqa: F401
import os
import signal
import sys
import types

import filelock  # noqa: F401
import networkx  # noqa: F401  (what others do on Linux is theirs)
import plotly.io  # noqa: F401
import rich.console  # noqa: F401
import sklearn.datasets  # noqa: F401
import torch
import typer.testing  # noqa: F401

POSIX = {
    "signal": ("SIGKILL", "SIGHUP", "SIGCHLD", "SIG_BLOCK", "SIG_UNBLOCK", "pthread_sigmask"),
    "os": ("fork", "killpg", "setsid", "geteuid", "getuid"),
}


def hide(platform):
    """The standard library keeps the modules that it has imported; what is imported from now on gets copies with less in them."""
    for module in (signal, os, sys):
        copy = types.ModuleType(module.__name__)
        copy.__dict__.update(vars(module))
        for name in (*(POSIX.get(module.__name__, ()) if platform == "win32" else ()), "sched_getaffinity"):
            copy.__dict__.pop(name, None)
        sys.modules[module.__name__] = copy
    sys.modules["sys"].platform = platform
    ctypes.CDLL = no_such_library
    if platform == "win32":
        sys.modules["fcntl"] = None
    for name in ("resource", "termios", "pwd", "grp"):
        sys.modules[name] = None


def no_such_library(*_, **__):
    raise AttributeError("prctl")


hide(sys.argv[1])


def library():
    import gossamer

    torch.distributed.init_process_group("gloo", rank=0, world_size=1, store=torch.distributed.HashStore())
    model = gossamer.DecentralizedDataParallel(torch.nn.Linear(2, 2))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model.gossip(optimizer)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    print("steps", model.steps)


def benchmark(out):
    from gossamer.dbench import bench, spec

    grid = {"name": "elsewhere", "replicas": [2], "methods": ["ring", "complete"]}
    grid |= {"task": {"name": "digits/mlp", "epochs": 1, "batch": 32, "options": {"train": 128}}, "backend": "loop"}
    print("finished", bench(spec.build(grid), out, jobs=2, quiet=True).finished)


def command(*words):
    from gossamer import cli

    sys.argv = ["gossamer", *words]
    try:
        cli.main()
    except SystemExit as end:
        print(words[0], "ends with", end.code)


if __name__ == "__main__":
    if sys.argv[1] == "win32":
        out = sys.argv[2]
        library()
        benchmark(out)
        command("results", out, "--csv")
    command("lab", "run", "true")
    command("launch", "-n", "1", "echo", "hello")
