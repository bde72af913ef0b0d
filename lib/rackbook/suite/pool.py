"""The worker processes, seen from the parent: who does what, who is late, who died.

Workers are fresh interpreters rather than forks: the parent may have threads, and papermill's imports run side by side
on as many cores as there are workers. Each serves several notebooks, so the imports and the chart converter start once.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Protocol

from rackbook.suite import memory, nursery, outcomes
from rackbook.suite.notebooks import load_json
from rackbook.suite.tasks import Task

_GRACE_S = 300.0  # two kernel starts of 120 s, and the charts; beyond that the worker itself hangs
_END_S = 5.0
_LOG_LINES = 5
_LONGEST_SOCKET_PATH = 100


@dataclass
class _Worker:
    """One worker process.

    Attributes:
        process: the process, in a session of its own so that Ctrl-C reaches the parent alone.
        pipe: tasks go out, messages come in.
        log: file that takes what the process prints.
        task: what it is at; None while idle.
        deadline: on the monotonic clock, when its task must be done.
        groups: process groups of the kernels it started for its task.
        kills: how often the system had killed a process for want of memory when the task began.
    """

    process: subprocess.Popen[bytes]
    pipe: Connection
    log: Path
    task: Task | None = None
    deadline: float = 0.0
    groups: list[int] = field(default_factory=list)
    kills: int = 0

    @classmethod
    def start(cls, log: Path, nursery_address: Path | None) -> _Worker:
        here, there = Pipe()
        with log.open("ab") as output:
            process = subprocess.Popen(  # noqa: S603 - our own module
                [sys.executable, "-m", "rackbook.suite.worker", str(there.fileno())],
                pass_fds=[there.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                env=os.environ | ({} if nursery_address is None else {nursery.ADDRESS: str(nursery_address)}),
            )
        there.close()
        return cls(process, here, log)

    def give(self, task: Task) -> None:
        self.task, self.deadline = task, time.monotonic() + task.timeout_s + _GRACE_S
        self.kills = memory.system_kills()
        self.groups.clear()
        self.pipe.send(task)

    def last_words(self) -> str:
        lines = self.log.read_text("utf-8", "replace").strip().splitlines()
        return " | ".join(lines[-_LOG_LINES:])

    def kill(self) -> None:
        groups = self.groups if self.task else []  # the worker itself ends the groups of a finished task
        own = [self.process.pid] if self.process.poll() is None else []
        for group in (*groups, *own):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(group, signal.SIGKILL)
        self.process.wait()
        self.pipe.close()


@dataclass
class _Nursery:
    """The process from which the kernels are forked.

    Attributes:
        address: its socket; None where kernels are started afresh.
        process: the process.
        hold: it ends when this end of the pipe is closed.
    """

    address: Path | None = None
    process: subprocess.Popen[bytes] | None = None
    hold: socket.socket | None = None

    @classmethod
    def start(cls, scratch: Path) -> _Nursery:
        address = scratch / "nursery"
        if sys.platform != "linux" or nursery.FRESH in os.environ or len(os.fsencode(address)) > _LONGEST_SOCKET_PATH:
            return cls()
        here, there = socket.socketpair()
        with (scratch / "nursery.log").open("ab") as output:
            process = subprocess.Popen(  # noqa: S603 - our own module
                [sys.executable, "-m", "rackbook.suite.nursery", str(there.fileno()), str(address)],
                pass_fds=[there.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        there.close()
        return cls(address, process, here)

    def end(self) -> None:
        """Let it end, and with it every kernel that it still has."""
        if self.process is None or self.hold is None:
            return
        self.hold.close()
        try:
            self.process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


class Desk(Protocol):
    """Says which task is next; asked again whenever a worker is free."""

    def next(self) -> Task | None:
        """The next task; None if none can start at the moment."""

    def ended(self, outcome: outcomes.Outcome) -> None:
        """Take the outcome of a task."""

    @property
    def open(self) -> bool:
        """Whether a task may still come, be it only after another has ended."""


@dataclass
class _List:
    """Tasks that are all known at the start."""

    waiting: list[Task]
    on_start: Callable[[Task], None]
    on_end: Callable[[outcomes.Outcome], None]
    found: list[outcomes.Outcome] = field(default_factory=list)

    def next(self) -> Task | None:
        if not self.waiting:
            return None
        self.on_start(self.waiting[0])
        return self.waiting.pop(0)

    def ended(self, outcome: outcomes.Outcome) -> None:
        self.found.append(outcome)
        self.on_end(outcome)

    @property
    def open(self) -> bool:
        return bool(self.waiting)


def run(
    tasks: Iterable[Task],
    jobs: int,
    scratch: Path,
    *,
    on_start: Callable[[Task], None] = lambda _task: None,
    on_end: Callable[[outcomes.Outcome], None] = lambda _outcome: None,
) -> list[outcomes.Outcome]:
    """Execute tasks in parallel; one that fails never stops the others.

    Args:
        tasks: in the order in which they shall start.
        jobs: largest number of notebooks at a time.
        scratch: folder for the workers' logs.
        on_start: called when a task goes to a worker.
        on_end: called when its outcome is there.

    Returns:
        The outcomes, in the order in which they came.
    """
    desk = _List(list(tasks), on_start, on_end)
    serve(desk, min(jobs, len(desk.waiting)), scratch, fork=len(desk.waiting) > 1)
    return desk.found


def serve(desk: Desk, jobs: int, scratch: Path, *, fork: bool = True) -> None:
    """Execute what a desk hands out until it closes and the last task has ended.

    Args:
        desk: where tasks come from and outcomes go.
        jobs: largest number of notebooks at a time.
        scratch: folder for the workers' logs.
        fork: fork the kernels from a process that has imported what they share; a single one costs less without.
    """
    workers: list[_Worker] = []
    kernels = _Nursery.start(scratch) if fork else _Nursery()
    try:
        for number in range(jobs):
            workers.append(_Worker.start(scratch / f"worker-{number}.log", kernels.address))
        while desk.open or any(w.task for w in workers):
            for number, worker in enumerate(workers):
                if worker.task is None and (task := desk.next()) is not None:
                    try:
                        worker.give(task)
                    except OSError:
                        worker.kill()
                        workers[number] = worker = _Worker.start(worker.log, kernels.address)
                        worker.give(task)
            ready = wait([w.pipe for w in workers if w.task], timeout=1.0)
            for number, worker in enumerate(workers):
                outcome, lost = None, False
                if worker.pipe in ready:
                    outcome, lost = _heard(worker)
                elif worker.task and time.monotonic() > worker.deadline:
                    reason = "the process that executed it hung and was killed"
                    outcome, lost = _lost(worker.task, reason, outcomes.TIME), True
                if lost:
                    worker.kill()
                    workers[number] = _Worker.start(worker.log, kernels.address)
                if outcome is not None:
                    desk.ended(outcome)
    finally:
        _end(workers)
        kernels.end()


def _heard(worker: _Worker) -> tuple[outcomes.Outcome | None, bool]:
    """Take one message; also whether the worker is gone."""
    task = worker.task
    assert task is not None  # noqa: S101 - only busy workers are waited for
    try:
        kind, content = worker.pipe.recv()
    except (EOFError, OSError):
        words = worker.last_words()
        reason = "the process that executed it ended" + (f": {words}" if words else "")
        return _lost(task, reason, _cause_of_end(worker)), True
    if kind == "kernel":
        worker.groups.append(content)
        return None, False
    worker.task = None
    return (content if kind == "done" else _lost(task, *content)), False


def _cause_of_end(worker: _Worker) -> str:
    with contextlib.suppress(subprocess.TimeoutExpired):
        worker.process.wait(_END_S)
    if worker.process.returncode != -signal.SIGKILL:
        return outcomes.NOTEBOOK
    return outcomes.NO_MEMORY if memory.system_kills() > worker.kills else outcomes.KILLED


def _lost(task: Task, reason: str, cause: str) -> outcomes.Outcome:
    """The outcome of a notebook whose execution left nothing: saved without outputs, with the reason on top."""
    content = load_json(task.path)
    for cell in content["cells"]:
        if cell["cell_type"] == "code":
            cell["outputs"], cell["execution_count"] = [], None
    note = {"cell_type": "markdown", "id": "run-failed", "metadata": {}, "source": f"**This run failed:** {reason}"}
    content["cells"].insert(0, note)
    outcome = outcomes.Outcome(
        notebook=task.notebook, succeeded=False, reason=reason, failed_cell=None, parameters=task.parameters,
        given=tuple(task.values), duration_s=0.0, run=task.run, cause=cause, task=task.id,
    )  # fmt: skip
    try:
        outcomes.write(content, task.executed, outcome)
    except OSError as problem:
        if not outcomes.is_full(problem):
            raise
        outcome = replace(
            outcome, cause=outcomes.DISK, reason=f"{reason}; and it could not be saved: {problem.strerror}"
        )
    return outcome


def _end(workers: list[_Worker]) -> None:
    """Hang up, which ends each worker and its kernel, and kill whoever does not listen."""
    for worker in workers:
        worker.pipe.close()
    deadline = time.monotonic() + _END_S
    for worker in workers:
        with contextlib.suppress(subprocess.TimeoutExpired):
            worker.process.wait(max(0.0, deadline - time.monotonic()))
    for worker in workers:
        worker.kill()
