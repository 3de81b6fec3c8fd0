"""Cases that run in several workers, as ordinary tests of pytest.

    @on_workers(2, 3)
    def test_the_mean_is_the_same_on_all_workers(world):
        ...

is collected as two tests, ``[2]`` and ``[3]``. The body runs in each worker, with a World. With one worker, the body runs inside pytest.

The workers are forks of the pool's process (pool_driver.py), which imports torch once. Workers of one number live at a time: they are
kept from case to case, and made anew after a case that failed, and for another number. So a case that fails changes nothing for the
next one.
"""

import contextlib
import functools
import inspect
import json
import subprocess
import sys

import pytest

from tests import workers as launcher
from tests.world import World

LIMIT_SECONDS = 120  # for a case; a case of this length hangs
PRELOAD = ("torch._dynamo", "gossamer.cli")  # the first optimizer imports the former, which takes as long as all of torch


def on_workers(*sizes, limit=LIMIT_SECONDS):
    """A test of the decorated function, which takes a World, in each of these numbers of workers.

    - sizes: the numbers. None: from ``pytest.mark.parametrize("workers", …)``, where other parameters depend on the number.
    - limit: seconds, after which the case counts as hung.

    Further arguments of the function are parameters of pytest, and go to the workers as JSON.
    """

    def decorate(body):
        @functools.wraps(body)
        def test(workers, pool, tmp_path, **parameters):
            if workers == 1:
                body(World(0, 1, tmp_path), **parameters)
            else:
                pool.check(workers, body, parameters, tmp_path, limit)

        _, *parameters = inspect.signature(body).parameters
        names = ["workers", "pool", "tmp_path", *parameters]
        test.__signature__ = inspect.Signature([inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in names])
        return pytest.mark.parametrize("workers", sizes)(test) if sizes else test

    return decorate


class Pool:
    """pytest's end of the pool. Its process is started by the first case, and ends with pytest: at the end of its standard input."""

    def __init__(self, preload=PRELOAD):
        self.preload = preload
        self.process = None

    def check(self, size, body, parameters, folder, limit=LIMIT_SECONDS):
        """Run a case, and fail with all workers' errors."""
        errors = self.run(size, body, parameters, folder, limit)
        if errors:
            pytest.fail("\n\n".join(f"{ranks}: {text}" for text, ranks in _by_text(errors).items()), pytrace=False)

    def run(self, size, body, parameters, folder, limit=LIMIT_SECONDS):
        """What went wrong in which rank: ``{rank: text}``, the first failure first."""
        try:
            self.send(size, body, parameters, folder, limit)
            answer = self.process.stdout.readline()
        except BrokenPipeError:
            answer = ""
        except BaseException:  # pytest's own limit, or Ctrl-C: the answer would be taken for that of the next case
            self.close()
            raise
        if not answer:
            self.close()
            raise RuntimeError("the pool's process has ended; its standard error says why")
        return dict(json.loads(answer))

    def send(self, size, body, parameters, folder, limit):
        if self.process is None:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.pool_driver", *self.preload],
                env={**launcher.environment(), "PYTEST_ADDOPTS": ""},
                cwd=launcher.ROOT,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                start_new_session=True,  # Ctrl-C is for pytest alone
            )
        case = {"module": body.__module__, "name": body.__name__, "parameters": parameters, "folder": str(folder)}
        self.process.stdin.write(json.dumps({"size": size, "limit": limit, "case": case}) + "\n")
        self.process.stdin.flush()

    def close(self):
        if self.process is not None:
            with contextlib.suppress(BrokenPipeError):
                self.process.stdin.close()
            self.process.stdout.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(10)
            self.process.kill()
            self.process.wait()
            self.process = None


def _by_text(errors):
    """``{text: "ranks 0, 2"}``: an error that several workers have is shown once."""
    ranks = {}
    for rank, text in errors.items():
        ranks.setdefault(text, []).append(rank)
    return {text: f"rank{'s' if len(some) > 1 else ''} {', '.join(map(str, sorted(some)))}" for text, some in ranks.items()}


def by_size(items):
    """pytest's items in an order with few changes of the number of workers. Other tests keep their places."""
    places = [place for place, item in enumerate(items) if "pool" in getattr(item, "fixturenames", ())]
    for place, item in zip(places, sorted((items[place] for place in places), key=_size), strict=True):
        items[place] = item


def _size(item):
    return item.callspec.params.get("workers", 0) if hasattr(item, "callspec") else 0
