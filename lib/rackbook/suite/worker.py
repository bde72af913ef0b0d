"""A worker process of the suite: takes tasks from its parent over a pipe and executes them one after the other.

``python -m rackbook.suite.worker FD``; started by :mod:`rackbook.suite.pool` alone.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from multiprocessing.connection import Connection


def main() -> None:
    """Serve tasks until the parent closes its end of the pipe."""
    pipe = Connection(int(sys.argv[1]))
    from rackbook.suite import outcomes
    from rackbook.suite.execution import execute

    groups: list[int] = []

    def on_kernel(group: int) -> None:
        groups.append(group)
        pipe.send(("kernel", group))

    while True:
        try:
            task = pipe.recv()
        except (EOFError, OSError):
            return
        groups.clear()
        busy = threading.Event()
        watcher = threading.Thread(target=_end_with_parent, args=(pipe, busy, groups), daemon=True)
        watcher.start()
        try:
            result = ("done", execute(task, on_kernel))
        except Exception as problem:  # whatever went wrong belongs to this notebook, not to the batch
            cause = outcomes.DISK if outcomes.is_full(problem) else outcomes.NOTEBOOK
            result = ("broken", (f"{type(problem).__name__}: {problem}", cause))
        busy.set()
        watcher.join()
        pipe.send(result)


def _end_with_parent(pipe: Connection, done: threading.Event, groups: list[int]) -> None:
    """Kill the kernel and this process as soon as the parent hangs up in the middle of a task."""
    while not done.wait(0.1):
        if pipe.poll(0):  # while a task runs the parent sends nothing: only an end of file is readable
            for group in groups:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(group, signal.SIGKILL)
            os._exit(1)


if __name__ == "__main__":
    main()
