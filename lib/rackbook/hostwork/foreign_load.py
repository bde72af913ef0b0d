"""How much of the machine other programs used while something was measured, from the kernel's own counts."""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

BUSY_CORES = 0.25
"""Cores in use by others, on average, above which a measurement counts as disturbed."""

STOLEN_SHARE = 0.05
"""Share of its time that a virtual machine waited for its host, above which a measurement counts as disturbed."""

_STAT = Path("/proc/stat")


@dataclass(frozen=True)
class Watch:
    """The counts at one moment.

    Attributes:
        at_s: monotonic clock.
        busy_s: CPU time that the whole machine has spent at work, without that of interrupts, which is charged to no
            program or to whichever runs; None where the system does not tell.
        stolen_s: CPU time that its host gave to others; None where the system does not tell.
        own_s: CPU time of this process and its ended children, and of the living ones that were named.
    """

    at_s: float
    busy_s: float | None
    stolen_s: float | None
    own_s: float

    @classmethod
    def now(cls, living: Iterable[int] = ()) -> Watch:
        """Read the counts.

        Args:
            living: process ids of children that work for the measurement and live on after it; with each counts what
                its own ended children used. A child that lives and is not named counts as foreign.
        """
        tick = os.sysconf("SC_CLK_TCK")
        own = sum(
            usage.ru_utime + usage.ru_stime
            for usage in map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
        )
        try:
            fields = [int(text) for text in _STAT.read_text("ascii").splitlines()[0].split()[1:]]
            user, nice, system, _idle, _waiting, _irq, _soft_irq, stolen = fields[:8]
            own += sum(_used_ticks(pid) for pid in living) / tick
        except (OSError, ValueError, IndexError):
            return cls(time.monotonic(), None, None, own)
        return cls(time.monotonic(), (user + nice + system) / tick, stolen / tick, own)

    def doubts(self, since: Watch, num_cores: float) -> list[str]:
        """What disturbed a measurement that ran from ``since`` to this moment, in sentences; none if nothing did.

        Args:
            since: the counts at its start.
            num_cores: cores of the machine that it could use.
        """
        lasted = self.at_s - since.at_s
        if None in (self.busy_s, since.busy_s, self.stolen_s, since.stolen_s) or lasted <= 0:
            return ["whether other programs ran meanwhile is not known: the system does not tell"]
        others = max(0.0, (self.busy_s - since.busy_s) - (self.own_s - since.own_s)) / lasted
        stolen = (self.stolen_s - since.stolen_s) / (lasted * num_cores)
        found = []
        if others > BUSY_CORES:
            found.append(f"other programs used {others:.1f} cores meanwhile, limit {BUSY_CORES:g}")
        if stolen > STOLEN_SHARE:
            found.append(f"the host of this virtual machine kept {stolen:.0%} of its time, limit {STOLEN_SHARE:.0%}")
        return found


def _used_ticks(pid: int) -> int:
    """CPU time of a process and its ended children, from the fields after its name in brackets."""
    fields = Path(f"/proc/{pid}/stat").read_text("ascii", errors="replace").rpartition(")")[2].split()
    return sum(map(int, fields[11:15]))
