"""Executing a sweep on this machine: whose turn it is, with which GPUs, and what happens after a failure."""

from __future__ import annotations

import os
import time
import uuid
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rackbook import pictures
from rackbook.errors import DataError, RackbookError
from rackbook.locations import runs_home, shown
from rackbook.suite import inputs, kernels, leases, outcomes, pool, store
from rackbook.suite.executions import ELSEWHERE, Execution, Limits
from rackbook.suite.progress import Progress
from rackbook.suite.tasks import Task

_LOOKS = 64
"""How many waiting executions are looked at for one that can start; the next call looks at the following ones."""


@dataclass
class Tally:
    """What a run of a sweep came to.

    Attributes:
        done: executions that this run completed.
        elsewhere: executions that another run completed meanwhile.
        failed: outcome of each execution that failed for good, by its label.
        stopped: why the run ended before its end; empty if it did not.
    """

    done: int = 0
    elsewhere: int = 0
    failed: dict[str, outcomes.Outcome] = field(default_factory=dict)
    stopped: str = ""


def run(
    executions: Sequence[Execution],
    results: store.Store,
    *,
    jobs: int,
    gpus: list[str] | None,
    executor: dict[str, Any] | None = None,
    progress: Progress | None = None,
) -> Tally:
    """Execute what is not complete yet; safe to kill at any moment and to run twice at once.

    Args:
        executions: which; those that are complete already are left out by the caller or found out here.
        results: where to.
        jobs: largest number of executions at a time.
        gpus: GPUs that may be handed out; None to leave all that are visible to each execution, which is right where
            executions run one after the other in an allocation of their own.
        executor: kept with each result.
        progress: told about each execution; the error stream if None.

    Raises:
        RackbookError: an execution wants more GPUs than there are.
    """
    for execution in executions if gpus is not None else ():
        if execution.limits.gpus_here > len(gpus):
            raise RackbookError(
                f"{execution.label}: wants {execution.limits.gpus_here} GPUs, available here: {len(gpus)}; "
                "name them with --gpus 0,1,…, lower gpus in the sweep, or use --executor slurm"
            )
    width = min(60, max((len(e.label) for e in executions), default=0))
    progress = progress or Progress(len(executions), forecast=True, width=width)
    with kernels.scratch_folder() as scratch:
        desk = _Desk(
            executions,
            results,
            leases.Leases(gpus) if gpus is not None else None,
            Path(scratch),
            executor or {"kind": "local"},
            progress,
        )
        try:
            pool.serve(desk, min(jobs, len(executions)), Path(scratch), fork=len(executions) > 1)
        finally:
            desk.close()
            progress.close()
            pictures.prune()
    return desk.tally


@dataclass
class _Job:
    """One attempt that is going on.

    Attributes:
        execution: what is executed.
        attempt: where it is written.
        task: what the worker was given.
        lock: descriptor of the lock on the execution.
        devices: the GPUs it holds, and its turn, as :class:`rackbook.suite.leases.Leases` names them.
    """

    execution: Execution
    attempt: store.Attempt
    task: Task
    lock: int
    devices: list[str]


class _Desk:
    """Hands out executions; see :class:`rackbook.suite.pool.Desk`."""

    def __init__(
        self,
        executions: Sequence[Execution],
        results: store.Store,
        gpus: leases.Leases | None,
        scratch: Path,
        executor: dict[str, Any],
        progress: Progress,
    ) -> None:
        self.tally = Tally()
        self._waiting = deque(executions)
        self._results, self._gpus, self._scratch = results, gpus, scratch
        self._executor, self._progress = executor, progress
        self._jobs: dict[str, _Job] = {}
        self._tries: dict[str, int] = {}
        self._run = uuid.uuid4().hex[:12]
        self._count = 0
        self._said_waiting = False

    @property
    def open(self) -> bool:
        return bool(self._waiting)

    def next(self) -> Task | None:
        for _ in range(min(_LOOKS, len(self._waiting))):
            execution = self._waiting.popleft()
            devices = self._devices(execution.limits)
            lock = None if devices is None else self._results.lock(execution.request)
            if devices is None or lock is None:  # somebody else has them, or is at work on the very same
                self._give_back(devices)
                self._waiting.append(execution)
                continue
            try:
                if self._results.is_complete(execution) is None:
                    return self._started(execution, lock, devices)
            except OSError as problem:
                os.close(lock)
                self._give_back(devices)
                self._stop(self._unwritable(problem))
                return None
            os.close(lock)
            self._give_back(devices)
            self.tally.elsewhere += 1
            self._progress.elsewhere(execution.label)
        if self._waiting and not self._jobs and not self._said_waiting:
            self._said_waiting = True
            self._progress.waits("another run has this machine or its GPUs, or executes the very same")
        return None

    def ended(self, outcome: outcomes.Outcome) -> None:
        job = self._jobs.pop(outcome.task)
        request, label = job.execution.request, job.execution.label
        tries = self._tries[request] = self._tries.get(request, 0) + 1
        try:
            if outcome.cause == outcomes.DISK:
                self._results.abandon(job.attempt)
                where = f"results: {shown(self._results.out)}, temporary files: {kernels.scratch_base()}"
                self._stop(f"{outcome.reason} ({where})")
                return
            assert job.task.trace is not None  # noqa: S101 - every task of a sweep has one
            try:
                self._results.finish(job.attempt, job.execution, outcome, job.task.trace, self._executor)
            except DataError as problem:
                cause = outcomes.CHANGED if isinstance(problem, inputs.ChangedError) else outcomes.NOTEBOOK
                outcome = replace(outcome, succeeded=False, reason=str(problem), cause=cause)
                self._results.finish(job.attempt, job.execution, outcome, job.task.trace, self._executor)
            except OSError as problem:
                if problem.errno in store.OF_THE_DISK:
                    raise
                reason = f"its files cannot be kept: {problem}"
                outcome = replace(outcome, succeeded=False, reason=reason, cause=outcomes.NOTEBOOK)
                self._results.fail(job.execution, outcome.cause, reason, self._executor)
        except OSError as problem:
            self._results.abandon(job.attempt)
            self._stop(self._unwritable(problem))
            return
        finally:
            os.close(job.lock)
            self._give_back(job.devices)
        if outcome.cause in outcomes.TRANSIENT and tries <= job.execution.limits.retries and not self.tally.stopped:
            self._progress.again(outcome, label)
            self._waiting.append(job.execution)
            return
        self._progress.ended(outcome, label)
        if outcome.succeeded:
            self.tally.done += 1
        else:
            self.tally.failed[label] = outcome

    def close(self) -> None:
        """Undo what was interrupted."""
        for job in self._jobs.values():
            self._results.abandon(job.attempt)
            os.close(job.lock)
            self._give_back(job.devices)
        self._jobs.clear()

    def _devices(self, limits: Limits) -> list[str] | None:
        """Take what an execution needs: its turn, and GPUs; None if others have it."""
        if self._gpus is None:
            return []
        turn = self._gpus.turn([limits.exclusive] if limits.exclusive else [])
        gpus = None if turn is None else self._gpus.take(limits.gpus_here)
        if turn is None or gpus is None:
            self._give_back(turn)
            return None
        return [*turn, *gpus]

    def _give_back(self, devices: list[str] | None) -> None:
        if self._gpus is not None and devices:
            self._gpus.give_back(devices)

    def _started(self, execution: Execution, lock: int, devices: list[str]) -> Task:
        attempt = self._results.begin(execution, time.time())
        work = attempt.folder / store.FILES
        work.mkdir()
        self._count += 1
        scratch = self._scratch / str(self._count)
        visible = {}
        if self._gpus is not None and not execution.limits.exclusive.startswith(ELSEWHERE):
            visible[leases.VISIBLE] = ",".join(device for device in devices if device in self._gpus.gpus)
        memory_gib = execution.limits.memory_gib
        task = Task(
            notebook=execution.notebook.name,
            path=execution.notebook.path.resolve(),
            values=execution.values,
            parameters=execution.parameters,
            executed=attempt.folder / store.NOTEBOOK,
            charts=attempt.folder / store.CHARTS,
            scratch=scratch,
            timeout_s=execution.limits.timeout_s,
            run=self._run,
            work=work,
            environment={"RACKBOOK_TRACE_ROOTS": inputs.roots(), "RACKBOOK_RUNS": str(runs_home())} | visible,
            trace=scratch / "read.json",
            memory_bytes=None if memory_gib is None else int(memory_gib * 2**30),
            id=f"{execution.request}.{self._count}",
        )
        self._jobs[task.id] = _Job(execution, attempt, task, lock, devices)
        self._progress.started(execution.label)
        return task

    def _unwritable(self, problem: OSError) -> str:
        return f"{shown(self._results.out)}: cannot write here: {problem.strerror}"

    def _stop(self, reason: str) -> None:
        """Start nothing more: the next execution would meet the same."""
        if not self.tally.stopped:
            self.tally.stopped = f"{reason}; {store.GOES_ON}"
        self._waiting.clear()
