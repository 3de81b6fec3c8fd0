"""Above methods: how to average, as a person says it (``Averaging``), or as a policy finds it while training runs.

A schedule chooses graphs. A policy chooses among methods, periods and wires as well.
"""

from gossamer.methods.policies.ada_auto import AdaAuto
from gossamer.methods.policies.auto import Auto
from gossamer.methods.policies.averaging import Averaging
from gossamer.methods.policies.base import Policy

__all__ = ["AdaAuto", "Auto", "Averaging", "Policy"]
