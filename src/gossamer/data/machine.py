"""Where a result was made: saved with every output, so that two can be compared knowingly."""

from __future__ import annotations

import functools
import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def memory() -> int | None:
    """Bytes of main memory, or of what the container may use of it; None where the system does not say."""
    try:
        whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return None
    try:
        return min(whole, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    except (ValueError, OSError):
        return whole


@functools.cache
def describe() -> dict[str, str | int]:
    packages = ("gossamer", "torch", "numpy", "scipy", "networkx", "plotly")
    info: dict[str, str | int] = {
        "cpu": _cpu(),
        "cores": cores(),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "git": _git(),
    }
    return info | {name: metadata.version(name) for name in packages}


def _cpu() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _git() -> str:
    """The commit of Gossamer's own source tree, if it runs from one."""
    here = Path(__file__).parent
    try:
        commit = subprocess.run(["git", "-C", here, "rev-parse", "HEAD"], capture_output=True, text=True, timeout=10)
        if commit.returncode:
            return "not a checkout"
        changed = subprocess.run(["git", "-C", here, "status", "--porcelain"], capture_output=True, text=True, timeout=10)
        return commit.stdout.strip()[:12] + (" with changes" if changed.stdout.strip() else "")
    except (OSError, subprocess.SubprocessError):
        return "unknown"
