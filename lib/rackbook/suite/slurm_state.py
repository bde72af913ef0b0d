"""What Slurm says about the jobs of one submission: asked of the controller, then of the accounting."""

from __future__ import annotations

import subprocess
import sys
import time

from rackbook.errors import RackbookError
from rackbook.suite import outcomes

WAITING, COMPLETED = "PENDING", "COMPLETED"
RUNNING = frozenset(
    {"RUNNING", "CONFIGURING", "COMPLETING", "SUSPENDED", "STOPPED", "SIGNALING", "STAGE_OUT", "RESIZING"}
)
ALIVE = RUNNING | {WAITING, "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "RESV_DEL_HOLD", "SPECIAL_EXIT"}
GONE = "GONE"
"""Neither the controller nor the accounting remembers the job."""

_CAUSES = {
    "CANCELLED": outcomes.CANCELLED,
    "REVOKED": outcomes.CANCELLED,
    "PREEMPTED": outcomes.PREEMPTED,
    "NODE_FAIL": outcomes.NODE,
    "BOOT_FAIL": outcomes.NODE,
    "TIMEOUT": outcomes.TIME,
    "DEADLINE": outcomes.TIME,
    "OUT_OF_MEMORY": outcomes.MEMORY,
}

_MEANINGS = {
    outcomes.CANCELLED: "somebody cancelled the job",
    outcomes.PREEMPTED: "the job was preempted and not queued again",
    outcomes.NODE: "the node failed",
    outcomes.TIME: "the job ran past its time limit; raise it with --time, or lower --per-job",
    outcomes.MEMORY: "the job used more memory than it was given; raise memory_gib, or mem_gib in [slurm]",
    outcomes.KILLED: "the job ended without a result",
}

_PATIENCE = frozenset({"None", "Priority", "Resources", "Dependency", "BeginTime", "JobArrayTaskLimit", "Cleaning"})
_ANSWER_S = 60

_OUTAGE_S = 600.0
"""How long a controller that does not answer is asked again: it is restarted, or overloaded, now and then."""

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 2.0, 60.0
_LARGEST_ARRAY = 1001  # Slurm's own default


class _NoAnswerError(RackbookError):
    """Slurm is there and does not answer, or complains."""


def states(name: str) -> dict[int, str]:
    """State of each job of an array, by its place in the array.

    Args:
        name: the jobs' name, which no other submission has.

    Raises:
        RackbookError: the controller does not answer for minutes.
    """
    found: dict[int, str] = {}
    for line in _asked("squeue", "-h", "-r", "--states=all", f"--name={name}", "-o", "%K|%T"):
        place, state = line.split("|")
        found[int(place) if place.isdigit() else 0] = state
    return found


def obstacles(name: str) -> set[str]:
    """Why jobs are waiting, where that is more than a matter of time: a limit, a hold, a node that is down."""
    lines = _asked("squeue", "-h", "--states=PENDING", f"--name={name}", "-o", "%r")
    return {line for line in lines if line not in _PATIENCE}


def job_of(name: str) -> str | None:
    """Slurm's id of the array with this name; None if the controller does not know it."""
    lines = _asked("squeue", "-h", "-r", "--states=all", f"--name={name}", "-o", "%F")
    return lines[0] if lines else None


def largest_array() -> int:
    """Most jobs that one array can have."""
    for line in _asked("scontrol", "show", "config"):
        key, _, value = line.partition("=")
        if key.strip() == "MaxArraySize" and value.strip().isdigit():
            return max(1, int(value))  # 0 means no arrays; the last place is one less than it
    return _LARGEST_ARRAY


def remembered(name: str) -> dict[int, str]:
    """As :func:`states`, from the accounting: of jobs that the controller has forgotten. Empty without accounting."""
    found: dict[int, str] = {}
    try:
        lines = _lines("sacct", "-n", "-P", "-X", "--starttime=now-30days", f"--name={name}", "-o", "JobID,State")
    except RackbookError:
        return found
    for line in lines:
        job, state = line.split("|")
        place = job.partition("_")[2]
        found[int(place) if place.isdigit() else 0] = state.split()[0] if state else GONE
    return found


def cause(state: str) -> str:
    """Which kind of failure a final state is; a job that just failed, or of which nothing is known, was killed."""
    return _CAUSES.get(state, outcomes.KILLED)


def reason(state: str) -> str:
    """The failure in words."""
    return f"Slurm: {_MEANINGS[cause(state)]} ({state})"


def _asked(*command: str) -> list[str]:
    """What the controller says; asked again for some minutes if it does not answer."""
    end, pause = time.monotonic() + _OUTAGE_S, _FIRST_PAUSE_S
    while True:
        try:
            return _lines(*command)
        except _NoAnswerError as problem:
            if time.monotonic() + pause > end:
                raise
            print(f"{problem}; asked again in {pause:.0f} s", file=sys.stderr, flush=True)
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE_S)


def _lines(*command: str) -> list[str]:
    try:
        done = subprocess.run(  # noqa: S603 - a fixed program, arguments as a list
            command, capture_output=True, text=True, timeout=_ANSWER_S, check=True
        )
    except FileNotFoundError:
        raise RackbookError(f"{command[0]}: not found; is Slurm installed on this machine?") from None
    except subprocess.TimeoutExpired:
        raise _NoAnswerError(f"{command[0]}: no answer within {_ANSWER_S} s") from None
    except subprocess.CalledProcessError as problem:
        raise _NoAnswerError(f"{command[0]}: {problem.stderr.strip() or problem}") from None
    return [line.strip() for line in done.stdout.splitlines() if line.strip()]
