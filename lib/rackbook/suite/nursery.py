"""Kernels that need not import what every notebook imports: forked from a process that has done it once.

``python -m rackbook.suite.nursery FD SOCKET``; started by :mod:`rackbook.suite.pool` alone, on Linux. It imports
packages, computes nothing, and runs a single Python thread, so a fork of it is as good as a fresh interpreter. Modules
of the library itself are not among the imports: each kernel reads them anew, and its trace sees them.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any, NoReturn

FRESH = "RACKBOOK_FRESH_KERNELS"
"""Environment variable: start each kernel as an interpreter of its own, if something does not bear being forked."""

ADDRESS = "RACKBOOK_NURSERY"
"""Environment variable of a worker: the socket of its nursery."""

_LONGEST_REQUEST = 1 << 20


class Kernel:
    """A kernel that a nursery has forked, with what Jupyter asks of a process.

    Attributes:
        pid: its process, which leads a process group of its own.
        returncode: as in subprocess; None while it runs.
    """

    stdin = stdout = stderr = None

    def __init__(self, connection: socket.socket, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._connection = connection
        self._heard = b""

    def poll(self) -> int | None:
        """How it ended; None while it runs. Without a nursery that could tell, it counts as killed."""
        if self.returncode is None:
            self._connection.setblocking(False)
            try:
                part = self._connection.recv(64)
                self._heard += part
                if not part:
                    self.returncode = -signal.SIGKILL
                elif self._heard.endswith(b"\n"):
                    self.returncode = int(self._heard)
            except BlockingIOError:
                pass
            except OSError:
                self.returncode = -signal.SIGKILL
            if self.returncode is not None:
                self._connection.close()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while (status := self.poll()) is None:
            if deadline is not None and time.monotonic() > deadline:
                raise TimeoutError
            time.sleep(0.02)
        return status

    def send_signal(self, number: int) -> None:
        """Send a signal to it and what it started."""
        if self.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, number)

    def terminate(self) -> None:
        """Ask it to end."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """End it."""
        self.send_signal(signal.SIGKILL)


def fork(address: str, connection_file: str, environment: dict[str, str], folder: str) -> Kernel | None:
    """Ask a nursery for a kernel.

    Args:
        address: its socket.
        connection_file: of the kernel.
        environment: all variables of the kernel.
        folder: its working folder.

    Returns:
        The kernel; None if the nursery is gone.
    """
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.connect(address)
        connection.sendall(json.dumps([connection_file, environment, folder]).encode() + b"\n")
        answer = b""
        while not answer.endswith(b"\n"):
            part = connection.recv(1)  # not a byte more: the rest is for the kernel
            if not part:
                raise ConnectionError
            answer += part
    except OSError:
        connection.close()
        return None
    return Kernel(connection, int(answer))


def main() -> None:
    """Fork kernels until the parent hangs up."""
    parent, listener = socket.socket(fileno=int(sys.argv[1])), socket.socket(socket.AF_UNIX)
    listener.bind(sys.argv[2])
    listener.listen(64)
    _prepare()
    kernels: dict[int, socket.socket] = {}
    wake_in, wake_out = os.pipe()
    os.set_blocking(wake_out, False)
    signal.set_wakeup_fd(wake_out, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    selector = selectors.DefaultSelector()
    for source in (parent, listener, wake_in):
        selector.register(source, selectors.EVENT_READ)
    while True:
        for key, _ in selector.select():
            if key.fileobj is parent:
                for pid in kernels:
                    _kill(pid)
                return
            if key.fileobj is listener:
                connection, _ = listener.accept()
                request = _read(connection)
                if request is None:
                    connection.close()
                    continue
                pid = os.fork()
                if pid == 0:
                    for other in (parent, listener, *kernels.values()):
                        other.close()
                    signal.set_wakeup_fd(-1)
                    selector.close()
                    os.close(wake_in)
                    os.close(wake_out)
                    _be_kernel(connection, *request)
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.setpgid(pid, pid)  # the child does it too: whoever is first
                kernels[pid] = connection
                selector.register(connection, selectors.EVENT_READ)
                with contextlib.suppress(OSError):
                    connection.sendall(b"%d\n" % pid)
            elif key.fileobj == wake_in:
                os.read(wake_in, 4096)
                _reap(kernels, selector)
            else:  # a worker hung up, so nobody wants its kernel any more
                with contextlib.suppress(KeyError, ValueError):  # its kernel has just ended, and with it the connection
                    selector.unregister(key.fileobj)
                for pid, connection in kernels.items():
                    if connection is key.fileobj:
                        _kill(pid)


def _prepare() -> None:
    """Import what the notebooks share."""
    if sys.path[0] in ("", str(Path.cwd())):
        del sys.path[0]
    from rackbook.startup import without_iri_grammar

    with without_iri_grammar():
        import altair
        import ipykernel.ipkernel
        import ipykernel.kernelapp
        import IPython.core.completer
        import numpy as np
        import polars as pl
        import pydantic

    import gc

    _ = altair, IPython, ipykernel, np, pl, pydantic
    gc.collect()
    gc.freeze()  # what is shared stays shared: a collection in a kernel would touch, and so copy, all of it


def _read(connection: socket.socket) -> list[Any] | None:
    connection.settimeout(5)
    text = b""
    try:
        while not text.endswith(b"\n"):
            part = connection.recv(1 << 16)
            text += part
            if not part or len(text) > _LONGEST_REQUEST:
                return None
    except OSError:
        return None
    connection.settimeout(None)
    return json.loads(text)


def _be_kernel(worker: socket.socket, connection_file: str, environment: dict[str, str], folder: str) -> NoReturn:
    """Become the kernel, in the forked process; it ends with its worker, and does not mind the end of the nursery."""
    import atexit
    import random
    import tempfile
    import threading

    status = 1
    try:
        with contextlib.suppress(PermissionError):
            os.setsid()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.environ.clear()
        os.environ.update(environment)
        os.chdir(folder)
        tempfile.tempdir = None
        random.seed()
        sys.modules["numpy"].random.seed()
        for name in [n for n in sys.modules if n.partition(".")[0] == "rackbook"]:
            del sys.modules[name]  # what a kernel imports of the library it reads itself
        launcher = sys.modules["ipykernel"].__file__.replace("ipykernel/__init__.py", "ipykernel_launcher.py")
        sys.argv = [launcher, "-f", connection_file]
        threading.Thread(target=_end_with, args=(worker,), daemon=True).start()
        sys.modules["ipykernel.kernelapp"].launch_new_instance()
        status = 0
    except SystemExit as problem:
        status = problem.code if isinstance(problem.code, int) else 0 if problem.code is None else 1
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        with contextlib.suppress(BaseException):
            atexit._run_exitfuncs()
        with contextlib.suppress(BaseException):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)


def _end_with(worker: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while worker.recv(64):
            pass
    _kill(os.getpid())


def _reap(kernels: dict[int, socket.socket], selector: selectors.BaseSelector) -> None:
    for pid in list(kernels):
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            connection = kernels.pop(pid)
            with contextlib.suppress(KeyError, ValueError):
                selector.unregister(connection)
            with contextlib.suppress(OSError):
                connection.sendall(b"%d\n" % os.waitstatus_to_exitcode(status))
            connection.close()


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


if __name__ == "__main__":
    main()
