"""Files that can't lie: one file with a checksum, a folder of one file per worker, and what a worker or a Trainer puts into them."""

from gossamer.checkpoints.checkpoint import verify
from gossamer.checkpoints.mean import averaged

__all__ = ["averaged", "verify"]
