"""Writing a run folder; :mod:`rackbook.runs` is where the rest of the project takes this from."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import polars as pl
from pydantic import BaseModel

from rackbook import provenance, run_files
from rackbook.errors import DataError
from rackbook.locations import runs_home as home
from rackbook.locations import shown


@dataclass
class Recorder:
    """A run that is being written.

    Attributes:
        id: its id.
        folder: where it lies until it is finished.
    """

    id: str
    folder: Path
    _provenance: dict[str, Any]
    _flags: list[str] = field(default_factory=list)
    _public: set[str] = field(default_factory=set)
    """Files of points and plain values, which are public: masking them like a text could change what was measured."""

    def raw(self, name: str) -> Path:
        """A path to write a file of the run to; text in it is freed of secrets and private paths at the end.

        Raises:
            DataError: a name that leaves the folder or belongs to the run's own files.
        """
        path = self.folder / name
        if path.resolve().parent != self.folder.resolve() or name in (
            run_files.RECORD,
            run_files.STARTED,
            run_files.FAILED,
        ):
            raise DataError(f"run {self.id}: got the file name {name!r}, allowed: a plain name, not {run_files.RECORD}")
        return path

    def write_text(self, name: str, text: str) -> Path:
        """Keep a text, e.g. a log; secrets and private paths in it are masked."""
        path = self.raw(name)
        path.write_text(provenance.public_text(text), "utf-8")
        return path

    def write_json(self, name: str, content: object) -> Path:
        """Keep plain values; secrets and private paths in texts among them are masked.

        Raises:
            DataError: NaN, infinity, or something that is no plain value.
        """
        try:
            text = json.dumps(provenance.public_values(content), indent=1, ensure_ascii=False, allow_nan=False)
        except (ValueError, TypeError) as problem:
            raise DataError(f"run {self.id}, {name}: not plain finite values: {problem}") from None
        path = self.raw(name)
        path.write_text(text + "\n", "utf-8")
        self._public.add(name)
        return path

    def write_points(self, frame: pl.DataFrame, name: str = "points") -> Path:
        """Keep a table of points; ``origin`` becomes "measured" and ``source`` the run's id.

        Args:
            frame: columns of the vocabulary, at least one row.
            name: file name without its ending.

        Raises:
            DataError: no row, a column that the vocabulary lacks, another type, or NaN or infinity.
        """
        messages = [name for name in ("error", "missing_reason") if name in frame.columns]
        frame = frame.with_columns(
            pl.lit("measured").alias("origin"),
            pl.lit(self.id).alias("source"),
            pl.col(messages).map_elements(provenance.public_text, return_dtype=pl.String),
        )
        path = self.raw(f"{name}.csv")
        run_files.checked_points(frame, f"run {self.id}, {name}").write_csv(path)
        self._public.add(path.name)
        return path

    def flag(self, doubt: str) -> None:
        """Note a doubt about the run's quality; it is kept, shown, and bars the run from settling a claim."""
        if doubt not in self._flags:
            self._flags.append(doubt)

    def process(self, arguments: Sequence[str], environment: Mapping[str, str], role: str = "") -> None:
        """Note a process that took part, as :func:`rackbook.provenance.process` tells it."""
        entry = {"role": role} if role else {}
        self._provenance.setdefault("processes", []).append(entry | provenance.process(arguments, environment))

    def describe(self, **facts: Any) -> None:
        """Add facts to the provenance, e.g. the version that the server reports; plain values."""
        self._provenance |= facts


@contextmanager
def record(
    experiment: str,
    params: BaseModel | Mapping[str, Any],
    machine: Mapping[str, Any] | None = None,
    root: Path | None = None,
) -> Iterator[Recorder]:
    """Record a run; the run exists once the block ends without an exception.

    Args:
        experiment: the topic.
        params: a model or plain values.
        machine: what it runs on; :func:`rackbook.provenance.machine` if None.
        root: the folder of runs; :func:`home` if None.

    Raises:
        DataError: the folder cannot be written, or the parameters are no plain values.
    """
    values = params.model_dump(mode="json") if isinstance(params, BaseModel) else dict(params)
    values = provenance.public_values(json.loads(run_files.plain(values, f"parameters of {experiment}")))
    started = datetime.now(UTC)
    facts = {"machine": dict(provenance.machine() if machine is None else machine)}
    folder, run_id, started = _make_folder(experiment, values, home() if root is None else Path(root))
    facts |= {"started_utc": started.isoformat(timespec="seconds")}
    run = Recorder(run_id, folder, facts)
    run_files.write_json(
        folder / run_files.STARTED, {"id": run_id, "experiment": experiment, "params": values, "pid": os.getpid()}
    )
    clock = time.monotonic()
    with run_files.held(folder / run_files.STARTED):
        try:
            yield run
            facts["duration_s"] = round(time.monotonic() - clock, 3)
            _finish(run, experiment, values)
        except BaseException as problem:
            reason = " ".join(f"{type(problem).__name__}: {problem}".split())
            why = {"reason": provenance.public_text(reason), "after_s": round(time.monotonic() - clock, 3)}
            with contextlib.suppress(OSError):  # a full disk must not hide what went wrong
                masked = run_files.free_folder(folder, run._public)
                content = why | {"flags": run._flags, run_files.MASKED: masked}
                run_files.write_json(folder / run_files.FAILED, content)
            raise


def _make_folder(experiment: str, values: dict[str, Any], root: Path) -> tuple[Path, str, datetime]:
    digest = hashlib.sha256(run_files.plain(values, experiment).encode()).hexdigest()[:4]
    for _ in range(60):  # an id holds the second: an equal run in the same one waits for the next
        started = datetime.now(UTC)
        run_id = f"{experiment}-{started:%Y%m%d-%H%M%S}-{digest}"
        folder = root / f".{run_id}.partial"
        try:
            if not root.is_dir():
                root.mkdir(parents=True)
            folder.mkdir()
            if not (root / run_id).exists():
                return folder, run_id, started
            folder.rmdir()
        except FileExistsError:
            if not root.is_dir():
                raise DataError(f"{shown(root)}: is no folder; set RACKBOOK_RUNS to another one") from None
        except OSError as problem:
            message = f"{shown(root)}: cannot write runs here: {problem.strerror}; set RACKBOOK_RUNS to another folder"
            raise DataError(message) from None
        time.sleep(0.1)
    raise DataError(f"{shown(root)}: no free id for a run of {experiment}")


def _finish(run: Recorder, experiment: str, values: dict[str, Any]) -> None:
    files, started = {}, run.folder / run_files.STARTED
    for path in sorted(set(run.folder.iterdir()) - {started}):
        if path.name not in run._public:
            run_files.free_of_private_text(path)
        files[path.name] = run_files.fingerprint(path)
        run_files.sync(path)
    started.unlink()
    content = {
        "format": run_files.FORMAT,
        "id": run.id,
        "experiment": experiment,
        "params": values,
        "provenance": run._provenance,
        "flags": run._flags,
        "files": files,
    }
    run_files.write_json(run.folder / run_files.RECORD, content)
    run_files.sync(run.folder)
    final = run.folder.with_name(run.id)
    if final.exists():
        raise DataError(f"{shown(final)}: is there already; runs are never overwritten")
    run.folder.rename(final)
    run_files.sync(final.parent)
