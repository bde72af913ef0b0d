"""The processor cores that this process may use; standard library only, since rank processes import it too."""

from __future__ import annotations

import os
from pathlib import Path

_QUOTA = Path("/sys/fs/cgroup/cpu.max")


def core_ids() -> list[int]:
    """Their numbers, ascending: those of its affinity, or all where the system has none."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def usable_cores() -> float:
    """How many it has the time of: the quota of its control group may be less than its cores."""
    found = float(len(core_ids()))
    try:
        quota, period = _QUOTA.read_text("ascii").split()
        return min(found, int(quota) / int(period))
    except (OSError, ValueError):  # no control group, or "max"
        return found


def whole_cores() -> int:
    """How many jobs that each fill a core go at a time."""
    return max(1, int(usable_cores()))
