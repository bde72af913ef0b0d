"""The worker processes, seen from the parent: who does what, who is late, who died.

Workers are fresh interpreters rather than forks: the parent may have threads, and papermill's imports run side by side
on as many cores as there are workers. Each serves several notebooks, so the imports and the chart converter start once.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path

from rackbook.suite import outcomes
from rackbook.suite.notebooks import load_json
from rackbook.suite.tasks import Task

_GRACE_S = 300.0  # two kernel starts of 120 s, and the charts; beyond that the worker itself hangs
_END_S = 5.0
_LOG_LINES = 5


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
    """

    process: subprocess.Popen[bytes]
    pipe: Connection
    log: Path
    task: Task | None = None
    deadline: float = 0.0
    groups: list[int] = field(default_factory=list)

    @classmethod
    def start(cls, log: Path) -> _Worker:
        here, there = Pipe()
        with log.open("ab") as output:
            process = subprocess.Popen(  # noqa: S603 - our own module
                [sys.executable, "-m", "rackbook.suite.worker", str(there.fileno())],
                pass_fds=[there.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        there.close()
        return cls(process, here, log)

    def give(self, task: Task) -> None:
        self.task, self.deadline = task, time.monotonic() + task.timeout_s + _GRACE_S
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
    waiting = list(tasks)
    found: list[outcomes.Outcome] = []
    workers: list[_Worker] = []
    try:
        for number in range(min(jobs, len(waiting))):
            workers.append(_Worker.start(scratch / f"worker-{number}.log"))
        while waiting or any(w.task for w in workers):
            for number, worker in enumerate(workers):
                if worker.task is None and waiting:
                    task = waiting.pop(0)
                    on_start(task)
                    try:
                        worker.give(task)
                    except OSError:
                        worker.kill()
                        workers[number] = worker = _Worker.start(worker.log)
                        worker.give(task)
            ready = wait([w.pipe for w in workers if w.task], timeout=1.0)
            for number, worker in enumerate(workers):
                outcome, lost = None, False
                if worker.pipe in ready:
                    outcome, lost = _heard(worker)
                elif worker.task and time.monotonic() > worker.deadline:
                    outcome, lost = _lost(worker.task, "the process that executed it hung and was killed"), True
                if lost:
                    worker.kill()
                    workers[number] = _Worker.start(worker.log)
                if outcome is not None:
                    found.append(outcome)
                    on_end(outcome)
    finally:
        _end(workers)
    return found


def _heard(worker: _Worker) -> tuple[outcomes.Outcome | None, bool]:
    """Take one message; also whether the worker is gone."""
    task = worker.task
    assert task is not None  # noqa: S101 - only busy workers are waited for
    try:
        kind, content = worker.pipe.recv()
    except (EOFError, OSError):
        words = worker.last_words()
        return _lost(task, "the process that executed it ended" + (f": {words}" if words else "")), True
    if kind == "kernel":
        worker.groups.append(content)
        return None, False
    worker.task = None
    return (content if kind == "done" else _lost(task, content)), False


def _lost(task: Task, reason: str) -> outcomes.Outcome:
    """The outcome of a notebook whose execution left nothing: saved without outputs, with the reason on top."""
    content = load_json(task.path)
    for cell in content["cells"]:
        if cell["cell_type"] == "code":
            cell["outputs"], cell["execution_count"] = [], None
    note = {"cell_type": "markdown", "id": "run-failed", "metadata": {}, "source": f"**This run failed:** {reason}"}
    content["cells"].insert(0, note)
    outcome = outcomes.Outcome(
        notebook=task.notebook, succeeded=False, reason=reason, failed_cell=None, parameters=task.parameters,
        given=tuple(task.values), duration_s=0.0, run=task.run,
    )  # fmt: skip
    outcomes.write(content, task.executed, outcome)
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
