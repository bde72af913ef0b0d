"""Start the processes of a server, wait until it answers, and end every one of them again."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rackbook.engine import processes, readiness, starting
from rackbook.engine.failures import likely_cause
from rackbook.engine.readiness import ServerError
from rackbook.engine.starting import Startable
from rackbook.locations import shown

START_TIMEOUT_S = 600.0
"""Enough for a small model; a large one takes what its recipe says."""

_POLL_S = 0.25
_SAY_EVERY_S = 5.0
_REPORT_S = 5.0
_STOP_S = 40.0  # more than the supervisor gives the processes
_TAIL_LINES = 20

Say = Callable[[str], None]


@dataclass(frozen=True)
class Running:
    """A process of a server.

    Attributes:
        name: its role, with a number where the server has several.
        identity: the process.
        log: file that takes what it prints.
    """

    name: str
    identity: processes.Identity
    log: Path

    @property
    def pid(self) -> int:
        """Its number."""
        return self.identity.pid


class Server:
    """A running server; leaving its ``with`` block ends it, and so does the end of this process, however it ends.

    Attributes:
        base_url: where it answers, e.g. http://127.0.0.1:8000.
        model: the name under which it serves its model, as requests must give it.
        log_path: what its first process prints.
        processes: what was started, in order.
    """

    def __init__(self, base_url: str, log_path: Path) -> None:
        """Start nothing yet: :func:`serve` does."""
        self.base_url = base_url
        self.model = ""
        self.log_path = Path(log_path)
        self.processes: tuple[Running, ...] = ()
        self._ended: dict[str, str] = {}
        self._input = b""
        self._detached = False
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        with self.log_path.open("ab") as complaints:
            self._supervisor = subprocess.Popen(
                [sys.executable, "-P", "-m", "rackbook.engine.supervisor"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=complaints,  # not this process's: who waits for its end would wait for a detached server's
                start_new_session=True,
            )
        identity = processes.identify(self._supervisor.pid)
        assert identity is not None  # noqa: S101 - not waited for yet, so its number is still its own
        self.supervisor = identity

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        if not self._detached:
            self.stop()

    def check(self) -> None:
        """Complain if a process of the server ended.

        Raises:
            ServerError: which one, its exit status, the likely cause and its last lines.
        """
        gone = self._supervisor.poll() is not None  # asked before the last reports are read
        self._hear(0.0)
        deadline = time.monotonic() + _REPORT_S
        while not (gone or self._ended or all(process.identity.is_alive for process in self.processes)):
            if time.monotonic() > deadline:
                break
            self._hear(_POLL_S)  # it ended this moment, and why is about to be reported
        for name in self._ended:  # in the order in which they ended: the first took the others with it
            raise ServerError(self._obituary(next(process for process in self.processes if process.name == name)))
        if gone and not self._detached:
            raise ServerError(
                f"the process that looks after the server at {self.base_url} ended with status "
                f"{self._supervisor.returncode}; its processes end with it"
            )

    def log_tail(self, lines: int = _TAIL_LINES) -> str:
        """The last lines that the first process printed."""
        return readiness.tail(self.log_path, lines)

    def stop(self) -> None:
        """End every process of the server and wait until the last is gone; harmless when repeated."""
        self._request({"stop": True})
        deadline = time.monotonic() + _STOP_S
        while self._supervisor.poll() is None and time.monotonic() < deadline:
            self._hear(_POLL_S)
        if self._supervisor.poll() is None:
            self._supervisor.kill()
            self._supervisor.wait()
        for pipe in (self._supervisor.stdin, self._supervisor.stdout):
            with contextlib.suppress(OSError):
                pipe.close()
        self._sweep()

    def detach(self) -> None:
        """Let the server live on when this process ends; only :func:`stop_detached` ends it then."""
        self._request({"detach": True})
        self._detached = True

    def _start(self, command: Startable, name: str, log: Path) -> None:
        log.parent.mkdir(parents=True, exist_ok=True)
        log.touch()
        self._request(
            {
                "start": name,
                "arguments": list(command.command),
                "environment": {**os.environ, **command.environment},
                "log": str(log.absolute()),
            }
        )
        deadline = time.monotonic() + _STOP_S
        while not any(process.name == name for process in self.processes):
            self._hear(_POLL_S, log)
            if name in self._ended:
                raise ServerError(
                    f"{name} of the server at {self.base_url} does not start: {self._ended[name]}; "
                    f"the program is {command.command[0]!r}"
                )
            if self._supervisor.poll() is not None or time.monotonic() > deadline:
                raise ServerError(f"{name} of the server at {self.base_url} does not start: nobody started it")

    def _request(self, request: dict[str, Any]) -> None:
        assert self._supervisor.stdin is not None  # noqa: S101 - a pipe was asked for
        with contextlib.suppress(OSError, ValueError):  # it is gone, or was stopped before
            self._supervisor.stdin.write(json.dumps(request).encode() + b"\n")
            self._supervisor.stdin.flush()

    def _hear(self, limit_s: float, log: Path | None = None) -> None:
        """Take what the supervisor reports within a time."""
        output = self._supervisor.stdout
        assert output is not None  # noqa: S101 - a pipe was asked for
        if output.closed or not select.select([output], [], [], limit_s)[0]:
            return
        self._input += (content := os.read(output.fileno(), 65536))
        if not content:
            time.sleep(min(limit_s, 0.05))  # the supervisor closed its end: it is about to end
        *lines, self._input = self._input.split(b"\n")
        for report in map(json.loads, lines):
            if "started" in report:
                pid = report["pid"]
                identity = processes.identify(pid) or processes.Identity(pid, 0, processes.boot())
                running = Running(report["started"], identity, log or self.log_path)
                self.processes = (*self.processes, running)
            elif "failed" in report:
                self._ended[report["failed"]] = report["why"]
            elif "ended" in report:
                self._ended.setdefault(report["ended"], _status(report["status"]))

    def _obituary(self, process: Running) -> str:
        last = readiness.tail(process.log, _TAIL_LINES)
        cause = likely_cause(process.log)
        return (
            f"{process.name} of the server at {self.base_url} {self._ended[process.name]}"
            + (f"; likely cause: {cause}" if cause else "")
            + f". Its last lines, from {shown(process.log)}:\n{last or '(it printed nothing)'}"
        )

    def _sweep(self) -> None:
        """Kill what is left of the processes' sessions: something is only if the supervisor was killed."""
        for process in self.processes:
            _kill_session(process.identity)


def serve(
    commands: Sequence[Startable],
    base_url: str,
    log: Path,
    *,
    ready_urls: Sequence[str] = (),
    timeout_s: float = START_TIMEOUT_S,
    say: Say | None = None,
) -> Server:
    """Start a server and wait until it answers.

    Args:
        commands: its processes; those whose role is "router" start when all of ``ready_urls`` answer.
        base_url: where the server as a whole answers.
        log: what the first process prints, written anew; the others' go beside it, with their role in the name.
        ready_urls: where the processes behind a router answer.
        timeout_s: longest time until it answers.
        say: takes a line every few seconds while it starts; standard error if None.

    Returns:
        The server, which answers; use it in a ``with`` block.

    Raises:
        ServerError: a port is taken, a process ended, or no answer came in time; everything started is ended.
    """
    say = say or _to_stderr
    for command in commands:
        starting.refuse_secrets(command)
    for url in dict.fromkeys((*ready_urls, base_url)):
        readiness.require_free_port(url)
    names = starting.names(commands)
    logs = [log if place == 0 else log.with_name(f"{log.stem}-{name}{log.suffix}") for place, name in enumerate(names)]
    for path in logs:
        path.unlink(missing_ok=True)
    server = Server(base_url.rstrip("/"), log)
    try:
        for wanted, urls in ((False, ready_urls or (base_url,)), (True, (base_url,))):
            chosen = [place for place, command in enumerate(commands) if (command.role == starting.ROUTER) is wanted]
            for place in chosen:
                server._start(commands[place], names[place], logs[place])
            if chosen:
                for url in urls:
                    server.model = _await(server, url.rstrip("/"), timeout_s, say)
    except BaseException:
        server.stop()
        raise
    return server


def stop_detached(supervisor: processes.Identity, members: Sequence[processes.Identity]) -> None:
    """End a server that was detached, its supervisor first, and wait until the last process is gone.

    Args:
        supervisor: the process that looks after it.
        members: its processes, as they were when it was detached.
    """
    supervisor.send(signal.SIGTERM)
    deadline = time.monotonic() + _STOP_S
    while supervisor.is_alive and time.monotonic() < deadline:
        time.sleep(0.05)
    supervisor.send(signal.SIGKILL)
    for member in members:
        _kill_session(member)


def _await(server: Server, url: str, timeout_s: float, say: Say) -> str:
    started = said = time.monotonic()
    while True:
        model = readiness.answers(url)
        server.check()  # after the answer: a stranger's answer does not count
        waited = time.monotonic() - started
        if model is not None:
            say(f"server: {url} answers after {waited:.0f} s")
            return model
        if waited > timeout_s:
            logs = "\n".join(f"{shown(p.log)}:\n{readiness.tail(p.log, _TAIL_LINES)}" for p in server.processes)
            raise ServerError(f"the server at {url} does not answer: waited {waited:.0f} s. Its last lines:\n{logs}")
        if time.monotonic() - said >= _SAY_EVERY_S:
            said = time.monotonic()
            last = (readiness.tail(server.log_path, 1) or "nothing printed yet")[-100:]
            say(f"server: {waited:.0f} s, {url} does not answer yet: {last}")
        time.sleep(_POLL_S)


def _status(code: int) -> str:
    return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"


def _kill_session(leader: processes.Identity) -> None:
    for pid in processes.session_members(leader):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)


def _to_stderr(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
