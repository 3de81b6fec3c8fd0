"""One thread per process: several test processes share two cores, and results must not depend on the thread count.

Processes are started by the hundred, so what they import is compiled once, whatever the environment says. Ctrl-C reaches them also where
the test run itself was started in the background by a script, which ignores it."""

import gc
import os
import signal

os.environ["OMP_NUM_THREADS"] = "1"
os.environ["PYTHONDONTWRITEBYTECODE"] = ""

import pytest
import torch

from tests.pool import Pool, by_size

signal.signal(signal.SIGINT, signal.default_int_handler)
torch.set_num_threads(1)


def pytest_collection_modifyitems(items):
    by_size(items)
    gc.collect()
    gc.freeze()  # what was imported is not looked through again


@pytest.fixture(scope="session")
def pool():
    """Workers for the cases of ``on_workers``."""
    started = Pool()
    yield started
    started.close()


@pytest.fixture
def no_gc():
    """For what makes a lot and no cycles. For Ctrl-C in this process: one that arrives inside hypothesis's callback of the collector is swallowed."""
    gc.disable()
    yield
    gc.enable()
