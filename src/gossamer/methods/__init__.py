"""Room 5: what a step does. One file per method, written once for DBench and for a person's own training loop.

A Method has a few moments around the optimizer, which it never calls itself. A Step is what it sees there: the rows of parameters,
gradients and of its own state, and ``mix``, which averages any of them with the neighbours. ``policies/`` stands above the methods.
"""

from gossamer.methods.allreduce import AllReduce
from gossamer.methods.base import ALL_REDUCE, METHODS, Method, method
from gossamer.methods.choco import Choco
from gossamer.methods.gossip import AdaptThenCombine, AdaptWhileCombine, Order
from gossamer.methods.momentum import QuasiGlobalMomentum
from gossamer.methods.policies import AdaAuto, Averaging, Policy
from gossamer.methods.push_sum import PushSum
from gossamer.methods.shared_momentum import SharedMomentum
from gossamer.methods.step import Step
from gossamer.methods.tracking import GradientTracking

__all__ = [
    "ALL_REDUCE",
    "METHODS",
    "AdaAuto",
    "AdaptThenCombine",
    "AdaptWhileCombine",
    "AllReduce",
    "Averaging",
    "Choco",
    "GradientTracking",
    "Method",
    "Order",
    "Policy",
    "PushSum",
    "QuasiGlobalMomentum",
    "SharedMomentum",
    "Step",
    "method",
]
