"""What chooses more than a graph."""

from __future__ import annotations

from abc import abstractmethod

from gossamer.methods.base import Method
from gossamer.schedules.base import Schedule


class Policy(Schedule):
    """A schedule that also says which method a step runs. Its graphs say how often rows travel, and in how many bits."""

    @abstractmethod
    def method(self, chosen: Method | None = None) -> Method:
        """``chosen``: what the person asked for, if anything."""
