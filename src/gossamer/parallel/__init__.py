"""Front door 2: ``DecentralizedDataParallel`` for a person's own training loop."""

from gossamer.parallel.module import DecentralizedDataParallel

__all__ = ["DecentralizedDataParallel"]
