"""DBench: from a spec to a report. Centralized and decentralized training side by side, over graphs and scales."""

from gossamer.dbench import report, spec
from gossamer.dbench.notebook import Profiles, Results
from gossamer.dbench.notebook import Results as read
from gossamer.dbench.runner import bench
from gossamer.dbench.spec import Spec, load

__all__ = ["Profiles", "Results", "Spec", "bench", "load", "read", "report", "spec"]
