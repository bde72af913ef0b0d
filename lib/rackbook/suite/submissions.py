"""Submissions to Slurm: arrays of jobs, made with submitit, and found again by whoever comes later."""

from __future__ import annotations

import fcntl
import json
import math
import sys
import time
import uuid
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rackbook.errors import RackbookError
from rackbook.locations import runs_home
from rackbook.suite import job, locks, slurm_state
from rackbook.suite.executions import Execution
from rackbook.suite.store import Store

SPARE_MIN = 5
"""Minutes of a job beside the time limits of its executions: starts, charts, writing."""

SPARE_GIB = 1.0
"""Memory of a job beside the limit of its execution: the runner, its worker, the pictures."""

_MAX_JOBS = 256  # submitit's default

FILE = "submission.json"


class RefusedError(RackbookError):
    """Slurm did not take an array of jobs."""


@dataclass
class Submission:
    """One array of jobs.

    Attributes:
        folder: its task files and what submitit keeps.
        name: the jobs' name, by which Slurm finds them again.
        requests: what each job of the array executes.
        job: Slurm's id of the array; None if that was not recorded any more.
        at: when it was submitted, in seconds of the system's clock.
    """

    folder: Path
    name: str
    requests: list[list[str]]
    job: str | None
    at: float

    def identity(self, place: int) -> str:
        """A job's id as Slurm writes it."""
        return f"{self.job}_{place}" if len(self.requests) > 1 else f"{self.job}"

    def write(self) -> None:
        """Keep it, in one step."""
        path = self.folder / FILE
        content = {"name": self.name, "job": self.job, "at": self.at, "requests": self.requests}
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps(content, indent=1), "utf-8")
        partial.replace(path)

    def alive(self) -> list[int]:
        """The places of the jobs that wait or run."""
        states = slurm_state.states(self.name)
        return [
            place for place, requests in enumerate(self.requests) if requests and states.get(place) in slurm_state.ALIVE
        ]

    def states(self) -> dict[int, str]:
        """State of each job by its place, as far as Slurm remembers it."""
        found = slurm_state.states(self.name)
        if len(found) < len(self.requests):
            found = slurm_state.remembered(self.name) | found
        return found


@contextmanager
def alone(results: Store) -> Iterator[None]:
    """While it is held no other process submits from this folder."""
    path = results.out / "slurm" / ".lock"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        locks.taken(file.fileno(), fcntl.LOCK_EX, path)
        yield


def adopted(results: Store, wanted: Container[str]) -> list[Submission]:
    """Earlier submissions that hold something of this sweep."""
    found = []
    for path in sorted((results.out / "slurm").glob(f"*/{FILE}")):
        record = json.loads(path.read_text("utf-8"))
        submission = Submission(path.parent, record["name"], record["requests"], record["job"], record["at"])
        if any(request in wanted for requests in submission.requests for request in requests):
            alive = submission.alive()
            submission.job = submission.job or slurm_state.job_of(submission.name)
            for place, requests in enumerate(submission.requests):
                if place not in alive:
                    requests.clear()  # its end was seen, or is no news any more; what it left undone is submitted anew
            if alive:
                found.append(submission)
    return found


def submit(
    executions: Sequence[Execution], results: Store, options: dict[str, Any], name: str, say: Callable[[str], None]
) -> tuple[list[Submission], dict[str, str]]:
    """Submit executions, those with the same needs as one array, or as several that each have the size Slurm allows.

    All are looked at before the first is submitted. An array that Slurm does not take leaves the others alone.

    Returns:
        What was submitted, and by request why Slurm did not take an execution.

    Raises:
        RackbookError: an execution does not fit the options, submitit is missing, or Slurm took nothing at all.
    """
    groups: dict[tuple[Any, ...], list[list[Execution]]] = {}
    for e in executions:
        limits = e.limits
        needs = (
            limits.gpus, limits.timeout_s, limits.memory_gib, bool(limits.exclusive), limits.hosts, limits.gpus_per_host
        )  # fmt: skip
        chunks = groups.setdefault(needs, [[]])
        if len(chunks[-1]) == options.get("per_job", 1):
            chunks.append([])
        chunks[-1].append(e)
    most, ready = slurm_state.largest_array() if groups else 0, []
    for chunks in groups.values():
        parts = in_parts(chunks, most)
        at_once = math.ceil(options.get("max_jobs", _MAX_JOBS) / len(parts))
        wanted = _parameters(chunks[0], options | {"max_jobs": at_once})
        ready += [(part, wanted) for part in parts]
    found, refused = [], {}
    for part, wanted in ready:
        try:
            found.append(_submit_array(part, results, wanted, options.get("local_dir"), name, say))
        except RefusedError as problem:
            say(f"{part[0][0].label}: {problem}")
            refused |= {execution.request: str(problem) for chunk in part for execution in chunk}
    if refused and not found:
        raise RackbookError(next(iter(refused.values())))
    return found, refused


def in_parts(chunks: list[Any], most: int) -> list[list[Any]]:
    """Cut a list into as few parts as possible, none longer than ``most``, their lengths as equal as can be."""
    count, size = math.ceil(len(chunks) / most), len(chunks)
    return [chunks[size * place // count : size * (place + 1) // count] for place in range(count)]


def _submit_array(
    chunks: list[list[Execution]],
    results: Store,
    wanted: dict[str, Any],
    local_dir: str | None,
    name: str,
    say: Callable[[str], None],
) -> Submission:
    try:
        import submitit
        from submitit.core.utils import FailedJobError, FailedSubmissionError
    except ModuleNotFoundError:
        raise RackbookError("--executor slurm needs submitit: pip install 'rackbook[slurm]'") from None
    executions = [execution for chunk in chunks for execution in chunk]
    identity = f"{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}-{uuid.uuid4().hex[:6]}"
    folder = results.out / "slurm" / identity
    folder.mkdir(parents=True)
    tasks = []
    for number, chunk in enumerate(chunks):
        tasks.append(folder / f"task-{number}.json")
        content = {
            "out": str(results.out),
            "runs": str(runs_home()),
            "local_dir": local_dir,
            "executions": [job.as_record(execution) for execution in chunk],
        }
        tasks[-1].write_text(json.dumps(content, indent=1, ensure_ascii=False), "utf-8")
    submission = Submission(
        folder, f"{name}-{identity}", [[e.request for e in chunk] for chunk in chunks], None, time.time()
    )
    submission.write()  # before Slurm knows of it, so that jobs of a killed submitter can be found by their name
    try:
        executor = submitit.SlurmExecutor(folder=folder / "submitit")
        executor.update_parameters(**wanted, job_name=submission.name)
        command = submitit.helpers.CommandFunction([sys.executable, "-m", "rackbook.suite.job"], verbose=False)
        jobs = executor.map_array(command, [str(task) for task in tasks])
    except (FailedJobError, FailedSubmissionError, RuntimeError) as problem:
        (folder / FILE).unlink()
        raise RefusedError(f"Slurm did not take the jobs: {problem}") from None
    submission.job = jobs[0].job_id.partition("_")[0]
    submission.write()
    say(f"submitted {len(executions)} executions as job {submission.job}, {len(chunks)} in its array")
    return submission


def _shape(execution: Execution, options: dict[str, Any]) -> tuple[int, int]:
    """Nodes of a job, and GPUs of each: those of the plan; without one as the options say where GPUs are wanted.

    Raises:
        RackbookError: the options give fewer GPUs than are wanted.
    """
    limits = execution.limits
    if limits.hosts is not None:
        return limits.hosts, (limits.gpus_per_host or 0) if limits.gpus else 0
    if not limits.gpus:
        return 1, 0
    nodes = options.get("nodes", 1)
    per_node = options.get("gpus_per_node", math.ceil(limits.gpus / nodes))
    if limits.gpus > nodes * per_node:
        raise RackbookError(
            f"{execution.label}: wants {limits.gpus} GPUs, the job has {nodes} nodes × {per_node} GPUs; "
            "raise --nodes or --gpus-per-node"
        )
    return nodes, per_node


def _parameters(executions: Sequence[Execution], options: dict[str, Any]) -> dict[str, Any]:
    """Options as submitit wants them."""
    limits = executions[0].limits
    nodes, per_node = _shape(executions[0], options)
    found = {
        key: options[key] for key in ("partition", "account", "qos", "constraint", "cpus_per_task") if key in options
    }
    memory_gib = options.get("mem_gib")
    if memory_gib is None and limits.memory_gib is not None:
        memory_gib = limits.memory_gib + SPARE_GIB
    memory = None if memory_gib is None else f"{math.ceil(memory_gib * 1024)}M"
    if limits.exclusive and memory is None:
        memory = "0"  # Slurm's word for all that the node has
    return found | {
        "nodes": nodes,
        "gpus_per_node": per_node or None,
        "mem": memory,
        "exclusive": True if limits.exclusive else None,
        "time": options.get("time_min") or math.ceil(limits.timeout_s * options.get("per_job", 1) / 60) + SPARE_MIN,
        "array_parallelism": options["max_jobs"],
        "use_srun": False,  # a live notebook itself spreads over the nodes, with srun from the first one
        "stderr_to_stdout": True,
        "additional_parameters": {"requeue": True},
    }
