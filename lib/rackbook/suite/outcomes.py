"""What became of one notebook in a run; kept in the executed notebook itself, so that a report needs nothing else."""

from __future__ import annotations

import errno
import json
import platform
import re
from dataclasses import asdict, dataclass, field, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rackbook.cores import whole_cores
from rackbook.errors import DataError
from rackbook.locations import shown
from rackbook.suite.notebooks import load_json

KEY = "rackbook"
"""Key in the notebook's metadata."""

_ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


NOTEBOOK, TIME, MEMORY, DISK = "notebook", "time limit", "memory limit", "disk full"
START, KILLED, NO_MEMORY, NODE, PREEMPTED = "kernel start", "killed", "out of memory", "node failure", "preempted"
CANCELLED, CHANGED = "cancelled", "input changed"

CAUSES = {
    NOTEBOOK: "the notebook itself: a cell raised, stopped early or crashed the kernel",
    TIME: "it ran past its time limit",
    MEMORY: "it used more memory than it was allowed",
    DISK: "no space was left to write the result",
    START: "the kernel did not start",
    KILLED: "somebody or something outside killed the kernel or its worker",
    NO_MEMORY: "the system ran out of memory and killed the kernel or its worker",
    NODE: "the node failed",
    PREEMPTED: "the job was preempted",
    CANCELLED: "somebody cancelled the job",
    CHANGED: "a file that it reads was changed while it ran",
}
"""Kinds of failure, with their meaning."""

TRANSIENT = frozenset({START, KILLED, NO_MEMORY, NODE, PREEMPTED, CHANGED})
"""Those that another attempt may well not meet; all others would come again."""


def is_full(problem: BaseException) -> bool:
    """Whether an error says that a disk is full."""
    return isinstance(problem, OSError) and problem.errno in (errno.ENOSPC, errno.EDQUOT)


@dataclass(frozen=True)
class Outcome:
    """The result of executing one notebook.

    Attributes:
        notebook: its name.
        succeeded: every cell ran, the last one shows verdicts, and the charts are written.
        reason: why it failed; empty if it did not.
        failed_cell: which code cell failed, counted from 1 in the notebook as committed plus papermill's injected
            cell; None if it succeeded or no cell is to blame.
        parameters: all values it ran with.
        given: names of the parameters that were not left on their default.
        duration_s: from kernel start to the last chart written, monotonic clock.
        finished_at: date and time, UTC, ISO 8601.
        machine: cores, system and Python version; no name of a host or person.
        run: id shared by the notebooks of one batch.
        cause: what kind of failure it is, one of CAUSES; empty if it succeeded.
        task: id of the task within the batch; empty where the notebook's name tells it.
    """

    notebook: str
    succeeded: bool
    reason: str
    failed_cell: int | None
    parameters: dict[str, Any]
    given: tuple[str, ...]
    duration_s: float
    run: str
    finished_at: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))
    machine: dict[str, Any] = field(default_factory=lambda: machine())
    cause: str = ""
    task: str = ""

    def metadata(self) -> dict[str, Any]:
        """As plain values for the notebook's metadata."""
        return asdict(self) | {"given": list(self.given)}


def machine() -> dict[str, Any]:
    """What the notebooks run on, without the name of a host or person."""
    return {
        "cores": whole_cores(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
    }


def of_executed(path: Path) -> tuple[Outcome, dict[str, Any]]:
    """Read an executed notebook back.

    Returns:
        Its outcome, and the whole notebook.

    Raises:
        DataError: half written, or not executed by this suite.
    """
    content = load_json(path)
    record = content.get("metadata", {}).get(KEY)
    if not isinstance(record, dict) or record.keys() != {f.name for f in fields(Outcome)}:
        raise DataError(f"{shown(path)}: not a notebook that `rackbook run` executed")
    outcome = Outcome(**(record | {"given": tuple(record["given"])}))
    if outcome.notebook != path.stem:
        raise DataError(f"{shown(path)}: holds the results of {outcome.notebook}; was it renamed?")
    return outcome, content


def write(content: dict[str, Any], path: Path, outcome: Outcome | None = None) -> None:
    """Write a notebook file in one step: a reader sees the old file or the new one, never half of it.

    Args:
        content: the notebook, in place extended by the outcome.
        path: the file.
        outcome: what became of it; None to leave the metadata as they are.
    """
    if outcome is not None:
        content["metadata"][KEY] = outcome.metadata()
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(json.dumps(content, indent=1, sort_keys=True, ensure_ascii=False) + "\n", "utf-8")
    partial.replace(path)


def without_colour(text: str) -> str:
    """A traceback without the terminal's colour codes."""
    return _ANSI.sub("", text)
