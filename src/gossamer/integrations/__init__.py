"""Gossamer in other people's tools. Each tool is an optional package, which Gossamer alone does not install.

- ``gossamer.integrations.loggers``: loggers for ``log=``.
- ``gossamer.integrations.lightning``: ``GossamerStrategy`` for Lightning's Trainer.
- ``gossamer.integrations.accelerate``: ``GossamerAccelerator``, an Accelerator.
- ``gossamer.integrations.transformers``: ``GossamerTrainer``, a Hugging Face Trainer.

The pages docs/logging.md and docs/trainers.md show how to use them.
"""

import contextlib
from collections.abc import Iterator


@contextlib.contextmanager
def needs(package: str) -> Iterator[None]:
    """Around the imports of an optional package, which is also the name of the extra."""
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != package:
            raise
        message = f"gossamer.integrations.{package} needs {package}, which is not installed: pip install 'gossamer[{package}]'"
        raise ModuleNotFoundError(message, name=package) from None
