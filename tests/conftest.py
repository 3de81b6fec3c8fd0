"""One thread per process: several test processes share two cores, and results must not depend on the thread count."""

import os

os.environ["OMP_NUM_THREADS"] = "1"

import torch

torch.set_num_threads(1)
