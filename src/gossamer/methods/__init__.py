"""The update rules. Each is written once, on a block ``[r, D]``, and never knows how the rows are spread over processes.

A step has two moments, so that communication can run under computation: ``begin`` before the forward pass, where x_t may
start to be mixed (it does not change until ``finish``), and ``finish`` after the backward pass. ``look`` is called once per
step, just before parameters are averaged: that is where the profile is taken.
"""

from gossamer.methods.allreduce import AllReduce
from gossamer.methods.base import Algorithm, Look, algorithm
from gossamer.methods.gossip import AdaptThenCombine, AdaptWhileCombine

__all__ = ["AdaptThenCombine", "AdaptWhileCombine", "Algorithm", "AllReduce", "Look", "algorithm"]
