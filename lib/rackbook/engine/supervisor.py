"""A process of its own that starts the processes of a server and ends every one of them, whatever happens.

It runs as ``python -m rackbook.engine.supervisor``, in a session of its own: Ctrl-C in a terminal does not reach it,
its parent's end does. Requests come in on its standard input, one JSON object a line; reports go out on its output:

- ``{"start": name, "arguments": […], "environment": {…}, "log": path}`` starts a process; the answer is
  ``{"started": name, "pid": n}`` or ``{"failed": name, "why": text}``.
- ``{"detach": true}``: from now on the parent may end. ``{"stop": true}``: end everything.
- ``{"ended": name, "status": n}`` tells that a process ended; all others are then ended too.

The environment comes in by the pipe because a command line is readable by every user of the machine. The supervisor is
the new parent of every process whose own parent ended (a "child subreaper"), so nothing below it can escape by forking.
Should the supervisor itself be killed, each process that it started gets SIGTERM.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from rackbook.engine import processes

_SET_PDEATHSIG, _SET_CHILD_SUBREAPER = 1, 36  # prctl(2)
_LOOK_S = 0.25
_GRACE_S = 15.0
_ORPHANS_GRACE_S = 1.0
_TRACKERS_GRACE_S = 3.0
_KILL_S = 10.0
_TRACKER = "multiprocessing.resource_tracker"  # removes the shared memory of killed processes, then ends by itself


class Supervisor:
    """The processes of one server, and their end."""

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._parent = os.getppid()
        self._detached = False
        self._stop = False
        self._childless = True
        self._names: dict[int, str] = {}
        self._input = b""

    def run(self) -> None:
        """Serve requests until the parent ends, a process ends or a signal asks to stop; then end everything."""
        self._libc.prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        awake, wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self._asked_to_stop)
        signal.signal(signal.SIGCHLD, lambda *_: None)  # only to wake the loop
        watched = [sys.stdin.fileno(), awake]
        while not self._stop:
            ready, _, _ = select.select(watched, [], [], _LOOK_S)
            if awake in ready:
                os.read(awake, 4096)
            if sys.stdin.fileno() in ready and not self._read():
                watched.remove(sys.stdin.fileno())
            if self._reap() or (not self._detached and os.getppid() != self._parent):
                break
        self._end()

    def _asked_to_stop(self, *_: Any) -> None:
        self._stop = True

    def _read(self) -> bool:
        """Take requests; False once there will be no more."""
        content = os.read(sys.stdin.fileno(), 65536)
        self._input += content
        *lines, self._input = self._input.split(b"\n")
        for line in lines:
            self._handle(json.loads(line))
        if not content and not self._detached:
            self._stop = True
        return bool(content)

    def _handle(self, request: dict[str, Any]) -> None:
        if "start" in request:
            self._start(request)
        elif request.get("detach"):
            self._detached = True
        elif request.get("stop"):
            self._stop = True

    def _start(self, request: dict[str, Any]) -> None:
        supervisor = os.getpid()

        def prepare() -> None:
            self._libc.prctl(_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
            if os.getppid() != supervisor:
                os._exit(1)

        try:
            with Path(request["log"]).open("ab") as log:
                process = subprocess.Popen(  # noqa: S603 - the arguments are a list, no shell reads them
                    request["arguments"],
                    env=request["environment"],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                    preexec_fn=prepare,  # safe: this program has one thread
                )
        except (OSError, subprocess.SubprocessError) as problem:
            _say({"failed": request["start"], "why": f"{problem}"})
            return
        process.returncode = 0  # it is waited for here, not by its object
        self._names[process.pid] = request["start"]
        _say({"started": request["start"], "pid": process.pid})

    def _reap(self) -> bool:
        """Wait for whoever ended; whether one of the server's own processes is among them."""
        found = False
        try:
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                name = self._names.pop(ended[0], None)
                if name is not None:
                    _say({"ended": name, "status": os.waitstatus_to_exitcode(ended[1])})
                    found = True
            self._childless = False
        except ChildProcessError:
            self._childless = True
        return found

    def _end(self) -> None:
        """Ask the server's own processes to end, then kill what is left of everything below."""
        for pid in self._names:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
        deadline = time.monotonic() + _GRACE_S
        while self._names and time.monotonic() < deadline:
            self._wait(_LOOK_S)
        self._wait(_ORPHANS_GRACE_S)
        self._kill(_TRACKERS_GRACE_S, spare=_TRACKER)
        self._kill(_KILL_S)

    def _kill(self, limit_s: float, spare: str | None = None) -> None:
        deadline = time.monotonic() + limit_s
        while not self._childless and time.monotonic() < deadline:
            for pid in processes.descendants(os.getpid()):
                if spare is None or spare not in processes.command_line(pid):
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
            self._wait(0.1)

    def _wait(self, limit_s: float) -> None:
        """Wait until there is no child left: what descends from one becomes one when its parent ends."""
        deadline = time.monotonic() + limit_s
        self._reap()
        while not self._childless and time.monotonic() < deadline:
            time.sleep(0.02)
            self._reap()


def _say(report: dict[str, Any]) -> None:
    with contextlib.suppress(OSError):  # the parent may be gone
        os.write(sys.stdout.fileno(), json.dumps(report).encode() + b"\n")


if __name__ == "__main__":
    Supervisor().run()
