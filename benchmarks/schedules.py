"""A million schedules of survival in simulated time, on all cores: none may show a worker anything that must not be.

python -m benchmarks.schedules [SCHEDULES] [FIRST SEED]        the same schedules as tests/test_simulator.py, and more
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import time

from tests import simulator

_EACH = 5_000


def _part(first: int) -> dict[int, str]:
    return simulator.search(range(first, first + _EACH))


def main(count: int, first: int) -> int:
    cores, began = os.cpu_count() or 1, time.perf_counter()
    found: dict[int, str] = {}
    with multiprocessing.get_context("fork").Pool(cores) as pool:  # all is imported, and there are no threads
        for k, part in enumerate(pool.imap_unordered(_part, range(first, first + count, _EACH)), 1):
            found |= part
            took = time.perf_counter() - began
            if k % 10 == 0 or k * _EACH >= count:
                print(f"{k * _EACH:,} schedules, {k * _EACH / took:,.0f} per second, {len(found)} violations", flush=True)
    for seed, what in sorted(found.items()):
        print(f"  seed {seed}: {what}")
    print(f"{count:,} schedules in {time.perf_counter() - began:.0f} s on {cores} cores: {len(found)} violations")
    return 1 if found else 0


if __name__ == "__main__":
    given = [int(argument) for argument in sys.argv[1:]]
    sys.exit(main(*(given + [1_000_000, 0][len(given) :])))
