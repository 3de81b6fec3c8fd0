"""The runtime model: how long is an iteration on a given cluster, with which way of averaging?

``cluster.py`` and ``workload.py`` say what there is, ``methods.py`` what is compared; ``network.py`` turns a Round into transfers
and waits, ``model.py`` runs the recurrences, ``bounds.py`` has the closed form beside them. ``plan.py`` compares methods for a person,
``calibrate.py`` measures a cluster, ``fit.py`` finds a cluster's unknowns from a table of times. The recurrences are written down in
``docs/runtime-model.md``.
"""

from gossamer.runtime.bounds import bound
from gossamer.runtime.cluster import Cluster
from gossamer.runtime.methods import DDP, DecentDP, Gossip, Method, StochasticGradientPush
from gossamer.runtime.model import Outcome, simulate
from gossamer.runtime.workload import Workload

__all__ = [
    "DDP",
    "Cluster",
    "DecentDP",
    "Gossip",
    "Method",
    "Outcome",
    "StochasticGradientPush",
    "Workload",
    "bound",
    "simulate",
]
