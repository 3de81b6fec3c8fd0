"""Room 2: which graph when. A Schedule sees the step, the epoch and what was last measured, and chooses a Graph."""

from gossamer.schedules.base import SCHEDULES, Ada, Change, Fixed, Moment, Resized, Schedule, rebuilt, schedule

__all__ = ["SCHEDULES", "Ada", "Change", "Fixed", "Moment", "Resized", "Schedule", "rebuilt", "schedule"]
