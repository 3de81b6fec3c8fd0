"""The one exception for a person's mistake: its message says what is wrong, where, and what would be right."""


class GossamerError(ValueError):
    """Something the caller can put right. The command line prints it as one line, without a traceback."""
