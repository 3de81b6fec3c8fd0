"""Gossamer in other people's tools. Each tool is an optional package, which Gossamer alone does not install.

- ``gossamer.integrations.loggers``: loggers for ``log=``.
- ``gossamer.integrations.lightning``: ``GossamerStrategy`` for Lightning's Trainer.
- ``gossamer.integrations.accelerate``: ``GossamerAccelerator``, an Accelerator.
- ``gossamer.integrations.transformers``: ``GossamerTrainer``, a Hugging Face Trainer.
- ``gossamer.integrations.ray``: ``RayExecutor``, for cells of a bench.
- ``gossamer.integrations.slurm``: ``SlurmExecutor``, the same by submitit.

The pages docs/logging.md, docs/trainers.md and docs/engines.md show how to use them.
"""

import contextlib
from collections.abc import Iterator


@contextlib.contextmanager
def needs(package: str, extra: str | None = None) -> Iterator[None]:
    """Around the imports of an optional package, which is also the name of the extra unless that is given."""
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != package:
            raise
        extra = extra or package
        message = f"gossamer.integrations.{extra} needs {package}, which is not installed: pip install 'gossamer[{extra}]'"
        raise ModuleNotFoundError(message, name=package) from None
