"""Room 2: which graph when. A Schedule sees the step, the epoch and what was last measured, and chooses a Graph."""

from gossamer.schedules.base import Ada, AdaAuto, Change, Fixed, Moment, Order, Resized, Schedule, Sight, rebuilt, schedule

__all__ = ["Ada", "AdaAuto", "Change", "Fixed", "Moment", "Order", "Resized", "Schedule", "Sight", "rebuilt", "schedule"]
