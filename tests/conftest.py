"""One thread per process: several test processes share two cores, and results must not depend on the thread count."""

import gc
import os

os.environ["OMP_NUM_THREADS"] = "1"

import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture
def no_gc():
    """For Ctrl-C in this process: one that arrives inside hypothesis's callback of the garbage collector is swallowed."""
    gc.disable()
    yield
    gc.enable()
