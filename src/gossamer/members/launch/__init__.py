"""``gossamer launch``: starts workers, watches over them, and starts them again."""

from gossamer.members.launch.launcher import Job, Launcher, command_for

__all__ = ["Job", "Launcher", "command_for"]
