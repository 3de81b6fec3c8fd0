"""Room 5: what a step does. One file per method, written once for DBench and for a person's own training loop.

A Method has a few moments around the optimizer, which it never calls itself. A Step is what it sees there: the rows of parameters,
gradients and of its own state, and ``mix``, which averages any of them with the neighbours. ``policies/`` stands above the methods.
"""

from gossamer.methods.adagossip import AdaGossip
from gossamer.methods.adam import CDAdam, DAdam
from gossamer.methods.allreduce import AllReduce
from gossamer.methods.around import Around
from gossamer.methods.base import ALL_REDUCE, METHODS, Method, known, method
from gossamer.methods.choco import Choco
from gossamer.methods.control import ConsensusControl
from gossamer.methods.d_squared import DSquared
from gossamer.methods.decentlam import DecentLaM
from gossamer.methods.diloco import DiLoCo
from gossamer.methods.gossip import AdaptThenCombine, AdaptWhileCombine, Order
from gossamer.methods.gut import GlobalUpdateTracking
from gossamer.methods.local import Local
from gossamer.methods.merge import FinalMerge
from gossamer.methods.momentum import QuasiGlobalMomentum
from gossamer.methods.momentum_tracking import MomentumTracking
from gossamer.methods.noloco import NoLoCo
from gossamer.methods.normalized_tracking import NormalizedTracking
from gossamer.methods.outer import Outer
from gossamer.methods.periodic import PeriodicMean
from gossamer.methods.policies import AdaAuto, Auto, Averaging, Policy
from gossamer.methods.push_sum import PushSum
from gossamer.methods.qg_adam import QuasiGlobalAdam
from gossamer.methods.shared_momentum import SharedMomentum
from gossamer.methods.slowmo import SlowMo
from gossamer.methods.step import Step
from gossamer.methods.tracking import GradientTracking

__all__ = [
    "ALL_REDUCE",
    "METHODS",
    "AdaAuto",
    "AdaGossip",
    "AdaptThenCombine",
    "AdaptWhileCombine",
    "AllReduce",
    "Around",
    "Auto",
    "Averaging",
    "CDAdam",
    "Choco",
    "ConsensusControl",
    "DAdam",
    "DSquared",
    "DecentLaM",
    "DiLoCo",
    "FinalMerge",
    "GlobalUpdateTracking",
    "GradientTracking",
    "Local",
    "Method",
    "MomentumTracking",
    "NoLoCo",
    "NormalizedTracking",
    "Order",
    "Outer",
    "PeriodicMean",
    "Policy",
    "PushSum",
    "QuasiGlobalAdam",
    "QuasiGlobalMomentum",
    "SharedMomentum",
    "SlowMo",
    "Step",
    "known",
    "method",
]
