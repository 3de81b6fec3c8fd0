"""Is the runtime model fast enough for clusters that nobody has at home?

    python -m benchmarks.runtime_scale

1,000 iterations of a one-peer graph over 100,000 workers (under 60 s and 4 GB), and of a lattice over 1,008 (under 10 s).
"""

from __future__ import annotations

import resource
import sys
import time

from benchmarks.timing import console, verdict
from gossamer.runtime import Workload, bound, simulate
from gossamer.runtime.cluster import build
from gossamer.runtime.methods import parse


def main() -> None:
    links = {"inter": {"gbit": 100, "latency_us": 5}, "intra": {"gbit": 1000}}
    many = build({"name": "many", "hosts": 12_500, "per_host": 8, **links, "noise": {"kind": "lognormal", "sigma": 0.1}})
    work = Workload.of_parameters(25_000_000, 0.1, 0.01)
    met = True
    for method, n, most in (
        ("one-peer-exponential", 100_000, 60),
        ("lattice:k=10", 1008, 10),
        ("lattice:k=10, edges", 1008, 10),
        ("lattice:k=100, edges", 1008, 10),
    ):
        cluster = many.sized(n)
        began = time.perf_counter()
        outcome = simulate(cluster, work, parse(method), 1000)
        taken = time.perf_counter() - began
        low = bound(cluster, work, parse(method), outcome.compute, 1000)
        console.print(f"{method}, {n:,} workers: {outcome.seconds * 1e3:.1f} ms per iteration (bound {low * 1e3:.1f})")
        met &= verdict("seconds for 1,000 iterations", taken, most)
    met &= verdict("GB of memory", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6, 4)
    sys.exit(not met)


if __name__ == "__main__":
    main()
