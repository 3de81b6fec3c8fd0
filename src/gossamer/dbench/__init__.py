"""DBench: from a spec to a report. Centralized and decentralized training side by side, over graphs and scales."""

from gossamer.dbench import report, spec
from gossamer.dbench.runner import bench
from gossamer.dbench.spec import Spec, load

__all__ = ["Spec", "bench", "load", "report", "spec"]
