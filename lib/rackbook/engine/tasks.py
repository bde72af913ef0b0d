"""Run processes that end by themselves, all at the same time, and leave none of them behind."""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from rackbook.engine import readiness
from rackbook.engine.failures import likely_cause
from rackbook.engine.plan import Process
from rackbook.errors import RackbookError
from rackbook.locations import shown

_TAIL_LINES = 25
_SAY_EVERY_S = 30.0
_LOOK_S = 0.25
_STOP_S = 40.0  # more than a supervisor gives its process

Say = Callable[[str], object]


class TaskError(RackbookError, RuntimeError):
    """A process that could not be started, failed, or took too long."""


class _Task:
    """One process under a supervisor of its own, which ends it and everything below it with this process."""

    def __init__(self, process: Process, name: str, log: Path) -> None:
        self.name, self.log, self.program = name, log, process.command[0]
        self.status: int | None = None
        self.problem: str | None = None
        self._input = b""
        log.touch()
        self._supervisor = subprocess.Popen(
            [sys.executable, "-P", "-m", "rackbook.engine.supervisor"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        request = {
            "start": name,
            "arguments": list(process.command),
            "environment": {**os.environ, **process.environment},
            "log": str(log.absolute()),
        }
        assert self._supervisor.stdin is not None  # noqa: S101 - a pipe was asked for
        with contextlib.suppress(OSError):  # it is gone, which hear() will tell
            self._supervisor.stdin.write(json.dumps(request).encode() + b"\n")
            self._supervisor.stdin.flush()

    @property
    def is_over(self) -> bool:
        return self.status is not None or self.problem is not None

    def fileno(self) -> int:
        assert self._supervisor.stdout is not None  # noqa: S101 - a pipe was asked for
        return self._supervisor.stdout.fileno()

    def hear(self) -> None:
        """Take what the supervisor reports; there is something, or its end."""
        content = os.read(self.fileno(), 65536)
        self._input += content
        *lines, self._input = self._input.split(b"\n")
        for report in map(json.loads, lines):
            if "failed" in report:
                self.problem = f"does not start: {report['why']}; the program is {self.program!r}"
            elif "ended" in report:
                self.status = report["status"]
        if not content and not self.is_over:
            self.problem = "lost the process that looked after it, and was ended with it"

    def stop(self) -> None:
        """End the process and everything below it, and wait until it is gone."""
        for pipe in (self._supervisor.stdin, self._supervisor.stdout):
            with contextlib.suppress(OSError):
                pipe.close()  # whereupon the supervisor ends everything
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._supervisor.wait(_STOP_S)
        if self._supervisor.poll() is None:
            self._supervisor.kill()
            self._supervisor.wait()


def run(
    processes: Sequence[Process], logs: Sequence[Path], *, timeout_s: float, say: Say = lambda _: None, what: str = ""
) -> None:
    """Start processes together and wait until all have ended; none outlives the call, or this process.

    Args:
        processes: what to start; their ``command`` is.
        logs: files for what they print, one each.
        timeout_s: longest time.
        say: takes a line now and then.
        what: they do, for messages.

    Raises:
        TaskError: one cannot be started, ended with another status than 0, or the time is up; the others are ended.
    """
    tasks: list[_Task] = []
    started = said = time.monotonic()
    try:
        for process, log in zip(processes, logs, strict=True):
            host = f" on host {process.host_index}" if len(processes) > 1 else ""
            tasks.append(_Task(process, f"{what or process.role}{host}", log))
        while running := [task for task in tasks if not task.is_over]:
            for task in select.select(running, [], [], _LOOK_S)[0]:
                task.hear()
            _complain(tasks)
            now = time.monotonic()
            if now - started > timeout_s:
                raise TaskError(
                    f"{running[0].name} took longer than {timeout_s:g} s; the last lines of {shown(running[0].log)}:\n"
                    f"{readiness.tail(running[0].log, _TAIL_LINES)}"
                )
            if now - said >= _SAY_EVERY_S:
                said = now
                say(f"{what}, {now - started:.0f} s: {readiness.tail(tasks[0].log, 1)[:160] or 'nothing printed yet'}")
    finally:
        for task in tasks:
            task.stop()


def _complain(tasks: Sequence[_Task]) -> None:
    for task in tasks:
        if task.problem is not None:
            raise TaskError(f"{task.name} {task.problem}")
        if task.status:
            ended = f"was ended by signal {-task.status}" if task.status < 0 else f"ended with status {task.status}"
            cause = likely_cause(task.log)
            raise TaskError(
                f"{task.name} {ended}{f'; likely cause: {cause}' if cause else ''}. Its last lines, from "
                f"{shown(task.log)}:\n{readiness.tail(task.log, _TAIL_LINES) or '(it printed nothing)'}"
            )
