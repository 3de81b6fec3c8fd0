"""What a run would have taken on a cluster that is not here: seconds per step, predicted by the runtime model."""

from __future__ import annotations

from typing import Literal

from gossamer.data.tasks import Task
from gossamer.dbench.spec import MethodPart, Spec
from gossamer.errors import GossamerError
from gossamer.graphs import Graph
from gossamer.methods import AdaAuto
from gossamer.methods import method as parse_method
from gossamer.runtime import cluster as clusters
from gossamer.runtime.cluster import Cluster
from gossamer.runtime.methods import DDP, Gossip, Method
from gossamer.runtime.model import simulate
from gossamer.runtime.plan import of_task
from gossamer.runtime.workload import Workload
from gossamer.schedules import Schedule, schedule

# In the store: {"cluster": name, "seconds": {method: {replicas: seconds per step}},
# "graphs": {method: {replicas: {graph: seconds per step}}}}; the latter for schedules that change their graph as training
# goes, and not by the epoch.
KEY = "clock"
_ITERATIONS = 60


def predict(spec: Spec, task: Task) -> dict[str, object] | None:
    """For every cell of the grid, or None if the spec names no cluster. One replica is one worker."""
    if spec.clock is None:
        return None
    seconds: dict[str, dict[str, float]] = {}
    by_graph: dict[str, dict[str, dict[str, float]]] = {}
    try:
        cluster, work = _clocked(spec, task)
        for method in spec.methods:
            each = seconds[method.name] = {}
            for n in spec.replicas:
                planned = topology(spec, method, task, n)
                if isinstance(planned, AdaAuto):
                    levels = {level.graph.name: level.cost for level in planned.levels}
                    by_graph.setdefault(method.name, {})[str(n)] = levels
                    each[str(n)] = levels[planned.levels[0].graph.name]
                else:
                    made = simulate(cluster.sized(n), work, _method(spec, method), _ITERATIONS, epochs=spec.task.epochs)
                    each[str(n)] = made.seconds
    except GossamerError as error:
        raise GossamerError(f"spec: clock: {error}") from None
    return {"cluster": cluster.name, "seconds": seconds, "graphs": by_graph}


def topology(spec: Spec, method: MethodPart, task: Task, n: int) -> str | Schedule:
    """What the method averages over. A schedule that weighs costs weighs seconds if the spec names a cluster, and bytes if not."""
    if spec.clock is None or method.centralized:
        return method.topology
    planned = schedule(method.topology, n)
    if not isinstance(planned, AdaAuto):
        return method.topology
    cluster, work = _clocked(spec, task)
    order = _order(spec, method)

    def seconds(graph: Graph) -> float:
        """Or bytes, where the workers that are left do not fill hosts."""
        try:
            sized = cluster.sized(graph.n)
        except GossamerError:
            return graph.cost(work.row_bytes)
        return simulate(sized, work, Gossip(graph, order=order), max(_ITERATIONS, 2 * graph.period)).seconds

    return AdaAuto(n, planned.tolerance, seconds)


def _clocked(spec: Spec, task: Task) -> tuple[Cluster, Workload]:
    assert spec.clock is not None
    cluster = clusters.load(spec.clock.cluster)
    return cluster, of_task(cluster, task, spec.task.batch, spec.clock.compute_ms)


def _method(spec: Spec, method: MethodPart) -> Method:
    """Centralized training is what DDP does; the others run as the library would, in the spec's order."""
    if method.centralized:
        return DDP()
    return Gossip(method.topology, order=_order(spec, method), wire=method.wire, local_steps=method.local_steps)


def _order(spec: Spec, method: MethodPart) -> Literal["awc", "atc"]:
    return "awc" if parse_method(method.algorithm or spec.algorithm).inner.name == "awc" else "atc"
