"""The folder of a sweep: what is complete, what failed, and who is at work. Nothing half written can be read in it.

``executions/<request>-<inputs>/`` holds one complete execution each. The first half of the name is the hash of what
was asked for (notebook and parameters), the second that of everything it depended on (notebook source, library,
versions, data, files of the user), listed in ``inputs/<inputs>.json``. A result counts as long as nothing in that list
has changed; one that does not count stays where it is, and the new one gets another name.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import shutil
import time
import uuid
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rackbook.errors import DataError, RackbookError
from rackbook.locations import shown, without_folders
from rackbook.suite import artefacts, locks
from rackbook.suite.executions import Execution
from rackbook.suite.inputs import Digests, States, before, manifest, name_of
from rackbook.suite.notebooks import load_json
from rackbook.suite.outcomes import Outcome

FORMAT = 1
"""Version of the layout."""

NOTEBOOK, CHARTS, FILES, RESULT = "notebook.ipynb", "charts", "files", "result.json"

OF_THE_DISK = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS})
"""Errors that every further execution would meet, too; any other one is about the files of one execution."""

GOES_ON = "what is complete is kept, the same command goes on from there"
"""What a person can rely on when a run stops early."""


@dataclass(frozen=True)
class Attempt:
    """Where one attempt at an execution is written until it has ended.

    Attributes:
        folder: private folder beside its later place.
        started: when, in seconds of the system's clock.
        number: counts the attempts in this folder, from 1.
        earlier: the states of the notebook and the files of the user, as :func:`rackbook.suite.inputs.before` has them.
    """

    folder: Path
    started: float
    number: int
    earlier: States


class Store:
    """The results of any number of sweeps in one folder.

    Args:
        out: the folder; need not exist to ask what is complete in it.
    """

    def __init__(self, out: Path) -> None:
        self.out = out.absolute()
        self.executions, self.attempts = self.out / "executions", self.out / "attempts"
        self.inputs, self.locks = self.out / "inputs", self.out / "locks"
        self.digests = Digests()
        self._manifests: dict[str, dict[str, Any]] = {}

    def prepare(self) -> None:
        """Make the folders.

        Raises:
            RackbookError: it cannot be written here.
        """
        try:
            for folder in (self.executions, self.attempts, self.inputs, self.locks):
                folder.mkdir(parents=True, exist_ok=True)
        except OSError as problem:
            where = f"{shown(self.out)}: cannot write here: {problem.strerror}"
            raise RackbookError(f"{where}; choose another folder with --out") from None

    def complete(self, executions: Iterable[Execution]) -> dict[str, Path]:
        """Of these, the complete ones whose inputs are still the same: folder by request."""
        by_request: dict[str, list[str]] = {}
        with contextlib.suppress(FileNotFoundError), os.scandir(self.executions) as entries:
            for entry in entries:
                request, dash, inputs = entry.name.partition("-")
                if dash and not entry.name.startswith("."):
                    by_request.setdefault(request, []).append(inputs)
        found = {}
        for execution in executions:
            for inputs in by_request.get(execution.request, ()):
                if self._is_current(inputs, execution):
                    found[execution.request] = self.executions / f"{execution.request}-{inputs}"
        return found

    def is_complete(self, execution: Execution) -> Path | None:
        """The folder of an execution that is complete with the present inputs."""
        for folder in self.executions.glob(f"{execution.request}-*"):
            if self._is_current(folder.name.partition("-")[2], execution):
                return folder
        return None

    def outdated(self, execution: Execution) -> str:
        """What has changed since the last result of an execution that is not complete; empty if there is no result."""
        folders = sorted(self.executions.glob(f"{execution.request}-*"), key=lambda folder: folder.stat().st_mtime)
        listed = self._manifest(folders[-1].name.partition("-")[2]) if folders else None
        if listed is None:
            return ""
        return next(self.digests.changes(listed, execution.notebook, execution.parameters), "")

    def _is_current(self, inputs: str, execution: Execution) -> bool:
        listed = self._manifest(inputs)
        return listed is not None and self.digests.current(inputs, listed, execution.notebook, execution.parameters)

    def _manifest(self, inputs: str) -> dict[str, Any] | None:
        if inputs not in self._manifests:
            try:
                self._manifests[inputs] = json.loads((self.inputs / f"{inputs}.json").read_text("utf-8"))
            except (OSError, ValueError):
                return None
        return self._manifests[inputs]

    def lock(self, request: str) -> int | None:
        """Take the right to run an execution, as a file descriptor to close; None if another process has it.

        Raises:
            RackbookError: nothing can be locked here.
        """
        path = self.locks / request
        held = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        if locks.taken(held, fcntl.LOCK_EX | fcntl.LOCK_NB, path):
            return held
        os.close(held)
        return None

    def begin(self, execution: Execution, started: float) -> Attempt:
        """Make a place for an attempt; what a dead attempt left goes. Call it with the lock held."""
        for left in self.executions.glob(f".{execution.request}.*.partial"):
            shutil.rmtree(left, ignore_errors=True)
        folder = self.executions / f".{execution.request}.{uuid.uuid4().hex[:8]}.partial"
        folder.mkdir()
        failed = self.attempts / execution.request
        number = 1 + sum(1 for _ in failed.iterdir()) if failed.is_dir() else 1
        return Attempt(folder, started, number, before(execution.notebook, execution.parameters))

    def finish(
        self, attempt: Attempt, execution: Execution, outcome: Outcome, trace: Path, executor: dict[str, Any]
    ) -> Path:
        """Make an attempt a result, in one step: before it nothing is there, after it everything is.

        Args:
            attempt: from :meth:`begin`; its folder holds the executed notebook and the charts.
            execution: what was executed.
            outcome: what became of it.
            trace: what the kernel read.
            executor: how it was executed, e.g. ``{"kind": "slurm", "job": "17_3"}``.

        Returns:
            Folder of the result: among the executions if it succeeded, otherwise among the attempts.

        Raises:
            OSError: the disk is full, or fails, or a file of the execution cannot be read; the attempt is undone.
            DataError: it is said to have succeeded, and its kernel left no trace, or an input was changed meanwhile
                (ChangedError); nothing of the attempt has changed.
        """
        listed = None
        if outcome.succeeded:
            listed = manifest(trace, execution.notebook, execution.parameters, self.digests, attempt.earlier)
        judged = artefacts.verdicts(load_json(attempt.folder / NOTEBOOK)) or [] if outcome.succeeded else []
        record: dict[str, Any] = {
            "format": FORMAT,
            "request": execution.request,
            "inputs": None,
            "notebook": execution.notebook.name,
            "parameters": execution.parameters,
            "given": sorted(execution.values),
            "repeat": execution.repeat,
            "attempt": attempt.number,
            "started_at": datetime.fromtimestamp(attempt.started, UTC).isoformat(timespec="seconds"),
            "executor": executor,
            "verdicts": _counts(judged),
            "claims": [{name: claim[key] for name, key in _CLAIM.items()} for claim in judged],
            "outcome": _told_once(outcome),
        }
        try:
            if listed is not None:
                record["inputs"] = name_of(listed)
                self._keep_manifest(record["inputs"], listed)
                place = self.executions / f"{execution.request}-{record['inputs']}"
            else:
                stamp = datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
                place = self.attempts / execution.request / f"{stamp}-{uuid.uuid4().hex[:4]}"
                place.parent.mkdir(exist_ok=True)
            (attempt.folder / RESULT).write_text(
                json.dumps(record, indent=1, sort_keys=True, ensure_ascii=False, allow_nan=False) + "\n", "utf-8"
            )
            work = attempt.folder / FILES
            if work.is_dir() and not any(work.iterdir()):
                work.rmdir()
            _sync_tree(attempt.folder)
            try:
                attempt.folder.rename(place)
            except OSError as problem:
                if problem.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                    raise
                shutil.rmtree(attempt.folder)  # a runner on another machine was first; one result is enough
            _sync(place.parent)
        except BaseException:
            shutil.rmtree(attempt.folder, ignore_errors=True)
            raise
        return place

    def fail(self, execution: Execution, cause: str, reason: str, executor: dict[str, Any]) -> Path:
        """Keep that an execution failed where nothing of it is left, e.g. with a job that was cancelled."""
        outcome = Outcome(
            notebook=execution.notebook.name, succeeded=False, reason=reason, failed_cell=None,
            parameters=execution.parameters, given=tuple(execution.values), duration_s=0.0, run="", cause=cause,
        )  # fmt: skip
        attempt = self.begin(execution, time.time())
        return self.finish(attempt, execution, outcome, attempt.folder, executor)

    def abandon(self, attempt: Attempt) -> None:
        """Undo an attempt that was interrupted."""
        shutil.rmtree(attempt.folder, ignore_errors=True)

    def _keep_manifest(self, name: str, listed: dict[str, Any]) -> None:
        path = self.inputs / f"{name}.json"
        if not path.exists():
            partial = path.with_name(f".{name}.{uuid.uuid4().hex[:8]}.partial")
            try:
                partial.write_text(json.dumps(listed, indent=1, sort_keys=True, ensure_ascii=False) + "\n", "utf-8")
                _sync(partial)
                partial.replace(path)
            finally:
                partial.unlink(missing_ok=True)
            _sync(self.inputs)
        self._manifests[name] = listed


def _told_once(outcome: Outcome) -> dict[str, Any]:
    """An outcome without what the record says already."""
    record = outcome.metadata() | {"reason": without_folders(outcome.reason)}
    return {key: value for key, value in record.items() if key not in ("notebook", "parameters", "given", "task")}


_CLAIM = {
    "claim": "id", "statement": "statement", "published": "value", "found": "found", "tolerance": "tolerance",
    "unit": "unit", "basis": "basis", "verdict": "verdict",
}  # fmt: skip
"""What a result keeps of each claim, by its name in the record of a verdict."""


def _counts(judged: list[dict[str, Any]]) -> dict[str, int]:
    words = [claim["verdict"] for claim in judged]
    return {word: words.count(word) for word in sorted(set(words))}


def read_result(folder: Path) -> dict[str, Any]:
    """The record of one result.

    Raises:
        DataError: it is missing, damaged, or of another version of the layout.
    """
    try:
        record = json.loads((folder / RESULT).read_text("utf-8"))
    except (OSError, ValueError) as problem:
        raise DataError(
            f"{shown(folder)}: no readable {RESULT} ({problem}); delete the folder to run it again"
        ) from None
    if not isinstance(record, dict) or record.get("format") != FORMAT:
        got = record.get("format") if isinstance(record, dict) else record
        raise DataError(f"{shown(folder / RESULT)}: got the format {got!r}, allowed: {FORMAT}")
    return record


def _sync_tree(folder: Path) -> None:
    for path in folder.rglob("*"):
        if not path.is_symlink() and (path.is_file() or path.is_dir()):  # a pipe would never open
            _sync(path)
    _sync(folder)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
