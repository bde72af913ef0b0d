"""One job of a sweep on a cluster: executes what a task file lists, one after the other, on the node where it runs.

``python -m rackbook.suite.job TASK.json``; started by Slurm alone. A job that is queued again starts over and finds
what it has completed.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rackbook.errors import DataError
from rackbook.suite import kernels, local, notebooks
from rackbook.suite.executions import Execution, Limits
from rackbook.suite.outcomes import TRANSIENT
from rackbook.suite.store import Store, read_result

STOPPED, TERMINATED = 3, 143


def as_record(execution: Execution) -> dict[str, Any]:
    """An execution as plain values."""
    return {
        "notebook": str(execution.notebook.path.resolve()),
        "values": execution.values,
        "swept": execution.swept,
        "repeat": execution.repeat,
        "limits": asdict(execution.limits),
        "request": execution.request,
    }


def of_record(record: dict[str, Any]) -> Execution:
    """Read :func:`as_record` back.

    Raises:
        DataError: the notebook's parameters have changed since, so that this is another execution.
    """
    execution = Execution(
        notebook=notebooks.read(Path(record["notebook"])),
        values=record["values"],
        swept=record["swept"],
        repeat=record["repeat"],
        limits=Limits(**record["limits"]),
    )
    if execution.request != record["request"]:
        raise DataError(f"{execution.label}: the notebook's parameters have changed since the job was submitted")
    return execution


def main(arguments: list[str]) -> int:
    """Execute a task file; the exit status says whether the job could do its work, not whether notebooks failed."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(TERMINATED))
    path = Path(arguments[0])
    task = json.loads(path.read_text("utf-8"))
    os.environ["RACKBOOK_RUNS"] = task["runs"]
    if task["local_dir"] is not None:
        tempfile.tempdir = local_folder(task["local_dir"])
        if (used := kernels.scratch_base()) != Path(tempfile.tempdir):
            most = kernels.LONGEST_BASE
            print(f"local_dir {tempfile.tempdir} has more than {most} characters: {used} is used", file=sys.stderr)
    results = Store(Path(task["out"]))
    results.prepare()
    executor = {"kind": "slurm", "job": identity(), "restarts": int(os.environ.get("SLURM_RESTART_COUNT", "0"))}
    executions = [of_record(record) for record in task["executions"]]
    complete = results.complete(executions)
    left = [e for e in executions if e.request not in complete and not failed_here(results, e.request, executor["job"])]
    if not left:
        return 0
    tally = local.run(left, results, jobs=1, gpus=None, executor=executor)
    if tally.stopped:
        print(tally.stopped, file=sys.stderr)
        return STOPPED
    return 0


def local_folder(text: str) -> str:
    """The folder for temporary files on this node; variables in the text are those of the job.

    Raises:
        SystemExit: there is no such folder.
    """
    folder = os.path.expandvars(text)
    if not Path(folder).is_dir():
        sys.exit(f"local_dir: got {text!r}, allowed: a folder on the node where the job runs; {folder} is none")
    return folder


def identity() -> str:
    """The job's id as Slurm writes it, with its place in the array."""
    array = os.environ.get("SLURM_ARRAY_JOB_ID")
    return f"{array}_{os.environ['SLURM_ARRAY_TASK_ID']}" if array else os.environ.get("SLURM_JOB_ID", "none")


def failed_here(results: Store, request: str, job: str, *, ended: bool = False) -> dict[str, Any] | None:
    """The record of the attempt in which an execution failed for good within a job; None if it did not.

    Args:
        results: where it lies.
        request: the execution.
        job: the job.
        ended: the job came to its end by itself: what failed for a passing reason was tried as often as it may be.
    """
    folder = results.attempts / request
    for attempt in sorted(folder.iterdir(), reverse=True) if folder.is_dir() else ():
        record = read_result(attempt)
        if record["executor"].get("job") == job and (ended or record["outcome"]["cause"] not in TRANSIENT):
            return record
    return None


def completed_here(results: Store, request: str, job: str) -> bool:
    """Whether an execution was completed within a job."""
    for folder in results.executions.glob(f"{request}-*"):
        with contextlib.suppress(DataError):  # a damaged one is shown in the index
            if read_result(folder)["executor"].get("job") == job:
                return True
    return False


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
