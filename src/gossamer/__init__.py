"""Gossamer: decentralized data-parallel training for PyTorch."""

from importlib.metadata import version as _version

from gossamer import _deprecated as _deprecated
from gossamer import graphs, hooks
from gossamer.data.tasks import ACCURACY, Metric, Task
from gossamer.errors import Diverged, Evicted, GossamerError, TrainingDiverged
from gossamer.graphs import Graph
from gossamer.members.outages import Outage
from gossamer.methods import AdaAuto, Averaging, Method, Policy, Step
from gossamer.optim import Recipe
from gossamer.optim.accum_adam import AccumAdam, AccumAdamW
from gossamer.optim.learning_rates import Constant, InverseSqrt, LearningRate, StepDecay, WarmupCosine
from gossamer.parallel import DecentralizedDataParallel
from gossamer.rows.decay import decay_groups
from gossamer.rows.replicas import Replicas
from gossamer.rows.vector import Vector
from gossamer.schedules import Ada, Fixed, Schedule
from gossamer.trainer import EpochRecord, Evaluation, Settings, Trainer

__version__ = _version("gossamer")

__all__ = [
    "ACCURACY",
    "AccumAdam",
    "AccumAdamW",
    "Ada",
    "AdaAuto",
    "Averaging",
    "Constant",
    "DecentralizedDataParallel",
    "Diverged",
    "EpochRecord",
    "Evaluation",
    "Evicted",
    "Fixed",
    "GossamerError",
    "Graph",
    "InverseSqrt",
    "LearningRate",
    "Method",
    "Metric",
    "Outage",
    "Policy",
    "Recipe",
    "Replicas",
    "Schedule",
    "Settings",
    "Step",
    "StepDecay",
    "Task",
    "Trainer",
    "TrainingDiverged",
    "Vector",
    "WarmupCosine",
    "decay_groups",
    "graphs",
    "hooks",
]
