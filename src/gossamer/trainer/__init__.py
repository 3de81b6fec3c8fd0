"""Front door 1: the loop over n replicas in p processes. DBench stands on it."""

from gossamer.checkpoints.trainer import EpochRecord
from gossamer.trainer.evaluation import Evaluation
from gossamer.trainer.loop import Settings, Trainer
from gossamer.trainer.progress import TrainingDiverged

__all__ = ["EpochRecord", "Evaluation", "Settings", "Trainer", "TrainingDiverged"]
