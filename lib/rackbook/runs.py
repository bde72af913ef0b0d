"""Run folders: parameters, provenance, raw output and tidy points of one measurement. Written once, never changed.

While it is written a run lies as ``.<id>.partial`` beside the others; it takes its name only when everything in it is
on disk. Whatever else lies there is no run and is never read as one.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import polars as pl

from rackbook import run_files
from rackbook.errors import DataError, one_of
from rackbook.locations import DATA, shown
from rackbook.run_recorder import Recorder, home, record

__all__ = [
    "COMMITTED",
    "Recorder",
    "Run",
    "Unfinished",
    "committed",
    "home",
    "read",
    "record",
    "roots",
    "stored",
    "unfinished",
]

_PARTIAL = ".partial"

COMMITTED = DATA / "runs"
"""The small recorded runs that the notebooks show."""


@dataclass(frozen=True)
class Run:
    """One finished run.

    Attributes:
        id: ``<experiment>-<date>-<UTC time>-<4 digits of the parameters' hash>``.
        path: its folder.
        experiment: the topic it measures.
        params: parameters as plain values.
        provenance: machine, processes, start (UTC) and duration.
        flags: doubts about its quality; a run with flags settles no claim.
        files: size and SHA-256 of each file by name.
    """

    id: str
    path: Path
    experiment: str
    params: dict[str, Any]
    provenance: dict[str, Any]
    flags: tuple[str, ...]
    files: dict[str, dict[str, Any]]

    def points(self, name: str = "points") -> pl.DataFrame:
        """One of its tables, types as in the vocabulary.

        Raises:
            DataError: the run has no such table.
        """
        tables = [file.removesuffix(".csv") for file in self.files if file.endswith(".csv")]
        if name not in tables:
            raise DataError(f"run {self.id}: {one_of(name, tables, 'table of points')}")
        return run_files.read_points(self.path / f"{name}.csv")

    def raw(self, name: str) -> Path:
        """Where one of its files lies.

        Raises:
            DataError: the run has no such file.
        """
        if name not in self.files:
            raise DataError(f"run {self.id}: {one_of(name, self.files, 'file')}")
        return self.path / name


@dataclass(frozen=True)
class Unfinished:
    """A folder that is no run.

    Attributes:
        id: the id that it has or was to have.
        path: the folder.
        reason: still being written, stopped by what, or damaged how.
    """

    id: str
    path: Path
    reason: str


def roots() -> tuple[Path, ...]:
    """The folders in which runs are looked for: the committed ones, then :func:`home`."""
    return (COMMITTED, home())


def read(id_or_path: str | Path) -> Run:
    """Read a finished run and check every file of it.

    Args:
        id_or_path: an id, looked for in :func:`roots`, or a folder.

    Raises:
        DataError: no such run, one that was never finished, one of another format, or one whose files are not as they
            were written.
    """
    name = str(id_or_path)
    path = Path(name).expanduser()
    if path.is_dir() and (path.is_absolute() or len(path.parts) > 1 or (path / run_files.RECORD).is_file()):
        return _read(path)
    if len(path.parts) > 1:
        raise DataError(f"{shown(path)}: no such run folder")
    for root in roots():
        if (root / name).is_dir():
            return _read(root / name)
        if (partial := root / f".{name}{_PARTIAL}").is_dir():
            return _read(partial)
    known = {folder.name for root in roots() for folder in _folders(root) if not folder.name.startswith(".")}
    where = " and ".join(shown(root) for root in roots())
    raise DataError(f"{one_of(name, known, 'run')} Runs are looked for in {where}; a folder also does")


def stored(experiment: str | None = None) -> list[Run]:
    """The finished runs in :func:`roots`, newest first.

    Args:
        experiment: only those of this topic.
    """
    found, _ = _survey(roots())
    return [run for run in found if experiment is None or run.experiment == experiment]


def committed(experiment: str) -> list[Run]:
    """The runs of an experiment that came with the project, newest first.

    Raises:
        DataError: one of them is damaged.
    """
    folders = [folder for folder in _folders(COMMITTED) if folder.name.startswith(f"{experiment}-")]
    return [run for run in _newest_first(_read(folder) for folder in folders) if run.experiment == experiment]


def unfinished() -> list[Unfinished]:
    """What lies in :func:`roots` and is no run: still being written, stopped, or damaged.

    A run frees its texts of secrets and private paths when it ends; for one that was killed this is done here.
    """
    _, others = _survey(roots())
    for left in others:
        if left.path.name.endswith(_PARTIAL):
            _mask_abandoned(left.path)
    return others


def _survey(places: Sequence[Path]) -> tuple[list[Run], list[Unfinished]]:
    found: dict[str, Run] = {}
    others = []
    for root in dict.fromkeys(places):
        for folder in _folders(root):
            try:
                run = _read(folder)
                found.setdefault(run.id, run)  # a committed run is a copy of one that may still lie at home
            except DataError as problem:
                name = folder.name.removeprefix(".").removesuffix(_PARTIAL)
                others.append(Unfinished(name, folder, str(problem)))
    return _newest_first(found.values()), others


def _newest_first(found: Iterable[Run]) -> list[Run]:
    return sorted(found, key=lambda run: (run.provenance["started_utc"], run.id), reverse=True)


def _folders(root: Path) -> list[Path]:
    if not root.is_dir():
        return []
    return sorted(
        folder
        for folder in root.iterdir()
        if folder.is_dir() and (not folder.name.startswith(".") or folder.name.endswith(_PARTIAL))
    )


def _read(folder: Path) -> Run:
    where = shown(folder)
    if folder.name.startswith(".") or not (folder / run_files.RECORD).is_file():
        raise DataError(f"{where}: this run was never finished: {_why_unfinished(folder)}; it is not read as a result")
    content = run_files.read_json(folder / run_files.RECORD)
    if content.get("format") != run_files.FORMAT:
        raise DataError(f"{where}: got run format {content.get('format')!r}, this version reads {run_files.FORMAT}")
    try:
        run = Run(
            id=str(content["id"]),
            path=folder,
            experiment=str(content["experiment"]),
            params=dict(content["params"]),
            provenance=dict(content["provenance"]),
            flags=tuple(content["flags"]),
            files=dict(content["files"]),
        )
        wanted = {name: (int(entry["bytes"]), str(entry["sha256"])) for name, entry in run.files.items()}
        datetime.fromisoformat(run.provenance["started_utc"])
    except (KeyError, TypeError, ValueError) as problem:
        raise DataError(
            f"{where}/{run_files.RECORD}: not a run's record ({type(problem).__name__}: {problem})"
        ) from None
    for name, (size, digest) in wanted.items():
        path = folder / name
        if not path.is_file():
            raise DataError(f"{where}/{name}: is missing; the run is damaged")
        got = run_files.fingerprint(path)
        if got["bytes"] != size:
            raise DataError(f"{where}/{name}: got {got['bytes']} bytes, recorded {size}; truncated or changed")
        if got["sha256"] != digest:
            raise DataError(f"{where}/{name}: content changed since it was recorded")
    return run


def _why_unfinished(folder: Path) -> str:
    try:
        if (folder / run_files.FAILED).is_file():
            return f"it stopped with {run_files.read_json(folder / run_files.FAILED)['reason']}"
        pid = int(run_files.read_json(folder / run_files.STARTED)["pid"])
    except (DataError, KeyError, TypeError, ValueError):
        return "it was killed before it could say why"
    if run_files.is_held(folder / run_files.STARTED) or _runs_here(pid):
        return f"process {pid} may still be writing it"
    return "its process was killed"


def _runs_here(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def _mask_abandoned(folder: Path) -> None:
    """Mask the texts of a run that nobody writes any more, once; where that is not certain they stay as they are."""
    failed, started = folder / run_files.FAILED, folder / run_files.STARTED
    path = failed if failed.is_file() else started
    try:
        content = run_files.read_json(path)
        if content.get(run_files.MASKED):
            return
        if path == started and (run_files.is_held(path) is not False or _runs_here(int(content["pid"]))):
            return
        if run_files.free_folder(folder, {file.name for file in folder.glob("*.csv")}):
            run_files.write_json(path, content | {run_files.MASKED: True})
    except (DataError, OSError, KeyError, TypeError, ValueError):
        return  # the survey says what is wrong with it
