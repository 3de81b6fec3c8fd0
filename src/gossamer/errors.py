"""The one exception for a person's mistake: its message says what is wrong, where, and what would be right. Warnings, and which torch
is too old."""

import re
import sys
import warnings

import torch


class GossamerError(ValueError):
    """Something the caller can put right. The command line prints it as one line, without a traceback."""


class Evicted(GossamerError):
    """This worker was silent for too long, and the others have gone on without it. With its next training step it joins them again."""


class Diverged(GossamerError):
    """Parameters of this worker are not finite any more. Those of the other workers are: its rows were not used."""


class TrainingDiverged(GossamerError):
    """A loss, or a parameter, that is not a number. The last checkpoint is kept."""


def warn(message: str) -> None:
    """A warning that points at the user's line: the first one outside of Gossamer and torch."""
    frame, level = sys._getframe(1), 2
    while frame.f_back and frame.f_globals.get("__name__", "").partition(".")[0] in ("gossamer", "torch", "contextlib"):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, stacklevel=level)


OLDEST_TORCH = (2, 8)  # the first in which a gloo device can be told to connect at once: create_default_device(lazy_init=False)


def check_torch(version: str) -> None:
    """At import: an older torch would fail later, in the middle of a run, and not say why."""
    found = re.match(r"(\d+)\.(\d+)", version)
    if found and (int(found[1]), int(found[2])) < OLDEST_TORCH:
        need = ".".join(map(str, OLDEST_TORCH))
        raise ImportError(f"gossamer needs torch {need} or later, and this is torch {version}; pip install 'torch>={need}'")


check_torch(torch.__version__)
