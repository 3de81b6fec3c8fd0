"""The one exception for a person's mistake: its message says what is wrong, where, and what would be right."""


class GossamerError(ValueError):
    """Something the caller can put right. The command line prints it as one line, without a traceback."""


class Evicted(GossamerError):
    """This worker was silent for too long, and the others have gone on without it. With its next training step it joins them again."""


class Diverged(GossamerError):
    """Parameters of this worker are not finite any more. Those of the other workers are: its rows were not used."""


class TrainingDiverged(GossamerError):
    """A loss, or a parameter, that is not a number. The last checkpoint is kept."""
