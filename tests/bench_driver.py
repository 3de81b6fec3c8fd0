"""Runs a bench in this process and stops in the middle of a write, so that the test can kill it just there."""

import time
from pathlib import Path

from gossamer.checkpoints import checkpoint
from gossamer.dbench import bench, load, store


def main(spec: Path, out: Path, where: str, count: int, marker: Path) -> None:
    """On the ``count``-th checkpoint or commit (``where``) half of it is done, the marker is written, and the process waits to be killed."""
    left = count

    def reached() -> bool:
        nonlocal left
        left -= 1
        return left == 0

    def wait_to_be_killed() -> None:
        marker.touch()
        time.sleep(60)

    if where == "checkpoint":
        write = checkpoint._write

        def half(file, tensors, metadata):
            write(file, tensors, metadata)
            if reached():
                file.truncate(file.tell() // 2)
                wait_to_be_killed()

        checkpoint._write = half
    else:
        add = store._add

        def uncommitted(*arguments):
            add(*arguments)
            if reached():
                wait_to_be_killed()

        store._add = uncommitted
    bench(load(spec), out, jobs=1, checkpoint_seconds=0.1, quiet=True)
