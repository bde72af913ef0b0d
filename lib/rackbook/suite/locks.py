"""Locks on files, which the system takes away from a process that dies, however it dies."""

from __future__ import annotations

import fcntl
from pathlib import Path

from rackbook.errors import RackbookError
from rackbook.locations import shown


def taken(file: int, how: int, path: Path) -> bool:
    """Take a lock on an open file; False if another process has it.

    Args:
        file: its descriptor.
        how: ``fcntl.LOCK_EX`` or ``fcntl.LOCK_SH``, with ``fcntl.LOCK_NB`` not to wait for it.
        path: the file, for the message.

    Raises:
        RackbookError: there are no locks here, as on some network file systems: nobody could be waited for.
    """
    try:
        fcntl.flock(file, how)
    except BlockingIOError:
        return False
    except OSError as problem:
        raise RackbookError(
            f"{shown(path)}: cannot be locked: {problem.strerror}; choose a folder on a file system with locks (flock)"
        ) from None
    return True
