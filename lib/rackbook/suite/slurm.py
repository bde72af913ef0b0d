"""A sweep on Slurm: submits arrays of jobs, watches them, and submits again what was lost for a passing reason.

The jobs write their results themselves, so the process that watches may be killed: the next one finds its submissions
in ``slurm/`` and takes over the jobs that are still alive.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from rackbook.suite import job, outcomes, slurm_state, submissions
from rackbook.suite.executions import Execution
from rackbook.suite.store import Store

_POLL_S, _SLOWEST_POLL_S = 1.0, 15.0
_FORGET_S = 60.0
"""A job that the controller does not know so long after it was submitted is gone; before, it may not know it yet."""


@dataclass
class _Watch:
    """What is known of the sweep while it goes on."""

    open: dict[str, Execution]
    failed: dict[str, str] = field(default_factory=dict)
    refused: str = ""
    again: dict[str, int] = field(default_factory=dict)
    lost: list[Execution] = field(default_factory=list)
    said: set[str] = field(default_factory=set)


def run(
    executions: Sequence[Execution],
    results: Store,
    options: dict[str, Any],
    *,
    name: str,
    detach: bool = False,
    say: Callable[[str], None] = lambda text: print(text, file=sys.stderr, flush=True),
) -> str:
    """Execute what is not complete yet on Slurm; safe to kill at any moment, the jobs go on.

    Args:
        executions: what is not complete.
        results: where to; a folder that all nodes see.
        options: partition, account and so on, see :func:`rackbook.suite.sweeps.slurm_options`.
        name: of the sweep.
        detach: return as soon as everything is submitted.
        say: told what happens.

    Returns:
        Why it returned before everything had ended; empty if everything has.

    Raises:
        RackbookError: Slurm or submitit is missing, or does not take the jobs.
    """
    watch = _Watch({execution.request: execution for execution in executions})
    with submissions.alone(results):
        arrays = submissions.adopted(results, watch.open)
        alive = {request for array in arrays for place in array.alive() for request in array.requests[place]}
        if taken := alive & watch.open.keys():
            say(f"{len(taken)} executions are in the queue or running from an earlier submission")
        left = [execution for request, execution in watch.open.items() if request not in alive]
        arrays += _submitted(left, watch, results, options, name, say)
    if detach:
        left_to_slurm = f"{len(watch.open)} executions are left to Slurm; the same command collects them"
        return "; ".join(filter(None, (watch.refused, left_to_slurm)))
    pause, total = _POLL_S, len(watch.open)
    while watch.open:
        before = len(watch.open)
        for array in arrays:
            _look(array, results, watch, say)
            for obstacle in slurm_state.obstacles(array.name) - watch.said:
                watch.said.add(obstacle)
                say(f"job {array.job} is kept waiting: {obstacle}; see `scontrol show job {array.job}`")
        if len(watch.open) < before:
            say(f"[{total - len(watch.open)}/{total}] {len(watch.failed)} failed, {_counts(arrays)}")
        if watch.lost:
            with submissions.alone(results):
                arrays += _submitted(watch.lost, watch, results, options, name, say)
            watch.lost.clear()
        if not watch.open:
            break
        pause = _POLL_S if len(watch.open) < before else min(pause * 1.3, _SLOWEST_POLL_S)
        time.sleep(pause)
    for label, reason in watch.failed.items():
        say(f"{label}: FAILED: {reason}")
    return watch.refused


def _submitted(
    executions: Sequence[Execution],
    watch: _Watch,
    results: Store,
    options: dict[str, Any],
    name: str,
    say: Callable[[str], None],
) -> list[submissions.Submission]:
    """Submit; what Slurm does not take is not waited for."""
    found, refused = submissions.submit(executions, results, options, name, say)
    for request, reason in refused.items():
        del watch.open[request]
        watch.refused = watch.refused or reason
    return found


def _look(array: submissions.Submission, results: Store, watch: _Watch, say: Callable[[str], None]) -> None:
    """Take what has ended in one array out of what is open."""
    mine = [r for requests in array.requests for r in requests if r in watch.open]
    if not mine:
        return
    states = array.states()  # before the results, so that a job that ended has written what it will write
    complete = results.complete(watch.open[request] for request in mine)
    for request in complete:
        del watch.open[request]
    for place, requests in enumerate(array.requests):
        left = [request for request in requests if request in watch.open]
        state = states.get(place, slurm_state.GONE)
        identity = array.identity(place)
        for request in left:
            execution = watch.open[request]
            by_itself = state == slurm_state.COMPLETED
            if by_itself and job.completed_here(results, request, identity):
                changed = results.outdated(execution)
                watch.failed[execution.label] = f"its result is out of date, {changed} has changed; start it again"
                del watch.open[request]
            elif (record := job.failed_here(results, request, identity, ended=by_itself)) is not None:
                watch.failed[execution.label] = record["outcome"]["reason"]
                del watch.open[request]
        left = [request for request in left if request in watch.open]
        if state in slurm_state.ALIVE or (state == slurm_state.GONE and time.time() - array.at < _FORGET_S):
            continue
        # a job that completes something each time comes to an end, however often its time is up
        goes_on = bool(left) and slurm_state.cause(state) == outcomes.TIME
        goes_on = goes_on and any(job.completed_here(results, request, identity) for request in requests)
        for request in left:
            _lost(watch, request, state, identity, results, say, goes_on=goes_on)
        array.requests[place] = [request for request in requests if request not in left]


def _lost(
    watch: _Watch,
    request: str,
    state: str,
    identity: str,
    results: Store,
    say: Callable[[str], None],
    *,
    goes_on: bool,
) -> None:
    """A job has ended and left an execution undone; it goes on in another one if it was just not its turn yet."""
    execution = watch.open[request]
    cause = slurm_state.cause(state)
    tries = watch.again.get(request, 0)
    lock = results.lock(request)
    if lock is None:  # another process has taken it on
        say(f"{execution.label}: is executed by another run")
        del watch.open[request]
        return
    try:
        if not goes_on:
            results.fail(execution, cause, slurm_state.reason(state), {"kind": "slurm", "job": identity})
    finally:
        os.close(lock)
    if goes_on or (cause in outcomes.TRANSIENT and tries < execution.limits.retries):
        watch.again[request] = tries + (not goes_on)
        say(f"{execution.label}: submitted again after: {slurm_state.reason(state)}")
        watch.lost.append(execution)
        return
    watch.failed[execution.label] = slurm_state.reason(state)
    del watch.open[request]


def _counts(arrays: Sequence[submissions.Submission]) -> str:
    states = [state for array in arrays for state in slurm_state.states(array.name).values()]
    running = sum(state in slurm_state.RUNNING for state in states)
    return f"{running} running, {states.count(slurm_state.WAITING)} waiting"
