"""Memory of the kernels that the suite starts: measured, limited, and whether the system killed for it."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from pathlib import Path

from rackbook.engine import processes

_EVERY_S = 0.2


class Watch:
    """Ends a kernel as soon as it uses more memory than it may.

    A resource limit of the system would count reserved addresses, of which a GPU driver takes hundreds of gigabytes.

    Args:
        group: the kernel's process group.
        limit_bytes: most memory of all that :func:`used_bytes` counts together.
    """

    def __init__(self, group: int, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.exceeded_bytes = 0
        self._group = group
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Watch no longer."""
        self._done.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._done.wait(_EVERY_S):
            used = used_bytes(self._group)
            if used > self.limit_bytes:
                self.exceeded_bytes = used
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(self._group, signal.SIGKILL)
                return


def used_bytes(group: int) -> int:
    """Memory of a process group and of everything that descends from its leader, such as servers of their own session.

    A page that n processes share counts 1/n for each of them.
    """
    total = 0
    for pid in _members(group) | {group, *processes.descendants(group)}:
        with contextlib.suppress(OSError, ValueError):  # it ended while we looked
            for line in Path(f"/proc/{pid}/smaps_rollup").read_text("ascii").splitlines():
                if line.startswith("Pss:"):
                    total += int(line.split()[1]) * 1024
    return total


def _members(group: int) -> set[int]:
    found = set()
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, ValueError):
            if os.getpgid(int(folder.name)) == group:
                found.add(int(folder.name))
    return found


def system_kills() -> int:
    """How often the system has killed a process for want of memory since it started; 0 where it does not say."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/vmstat").read_text("ascii").splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return 0
