"""A program that becomes another one, which the system then kills as soon as its parent is gone.

``python -I tether.py PARENT PROGRAM ARGUMENT…``; a parent that is killed cannot end its children itself.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Sequence

_SET_PDEATHSIG = 1  # prctl(2)


def tethered(command: Sequence[str]) -> list[str]:
    """The command that starts a program tied to this process; start it from a thread that lasts."""
    return [sys.executable, "-I", "-S", __file__, str(os.getpid()), *command]


def main() -> None:
    """Ask to be killed with the parent, then become the program; status 127 if there is none of that name."""
    parent, *command = sys.argv[1:]
    ctypes.CDLL(None).prctl(_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != int(parent):
        os._exit(1)
    try:
        os.execvp(command[0], command)  # noqa: S606 - a list, no shell
    except OSError as problem:
        print(f"{command[0]}: {problem.strerror}", file=sys.stderr)
        os._exit(127)


if __name__ == "__main__":
    main()
