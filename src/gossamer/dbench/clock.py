"""What a run would have taken on a cluster that is not here: seconds per step, predicted by the runtime model."""

from __future__ import annotations

from gossamer.dbench.spec import MethodPart, Spec
from gossamer.errors import GossamerError
from gossamer.runtime import cluster as clusters
from gossamer.runtime.methods import DDP, Gossip, Method
from gossamer.runtime.model import simulate
from gossamer.runtime.plan import of_task
from gossamer.tasks import Task

KEY = "clock"  # in the store: {"cluster": name, "seconds": {method: {replicas: seconds per step}}}
_ITERATIONS = 60


def predict(spec: Spec, task: Task) -> dict[str, object] | None:
    """For every cell of the grid, or None if the spec names no cluster. One replica is one worker."""
    if spec.clock is None:
        return None
    try:
        cluster = clusters.load(spec.clock.cluster)
        work = of_task(cluster, task, spec.task.batch, spec.clock.compute_ms)
        seconds = {
            method.name: {
                str(n): simulate(cluster.sized(n), work, _method(spec, method), _ITERATIONS, epochs=spec.task.epochs).seconds
                for n in spec.replicas
            }
            for method in spec.methods
        }
    except GossamerError as error:
        raise GossamerError(f"spec: clock: {error}") from None
    return {"cluster": cluster.name, "seconds": seconds}


def _method(spec: Spec, method: MethodPart) -> Method:
    """Centralized training is what DDP does; the others run as the library would, in the spec's order."""
    if method.centralized:
        return DDP()
    awc = (method.algorithm or spec.algorithm) == "dsgd-awc"
    return Gossip(method.topology, order="awc" if awc else "atc")
