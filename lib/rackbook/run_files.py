"""The files of a run folder: written through to disk, fingerprinted, and checked when read."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import polars as pl

from rackbook import provenance
from rackbook.errors import DataError
from rackbook.locations import shown
from rackbook.tables import Column, column

FORMAT = 1
"""Version of the layout of a run folder."""

OWN = RECORD, STARTED, FAILED = "run.json", "started.json", "failed.json"
"""Files of the run itself: of a finished one, of one that is being written, of one that stopped."""

MASKED = "masked"
"""Entry of the last two: whether the run's texts are free of secrets and private paths."""


def free_of_private_text(path: Path) -> None:
    """Mask secrets and private paths in a file, if it is text; a full disk leaves it as it was."""
    try:
        text = path.read_bytes().decode("utf-8")
    except UnicodeDecodeError:
        return
    if (public := provenance.public_text(text)) != text:
        masked = path.with_name(f".{path.name}.{os.getpid()}.masked")
        try:
            masked.write_bytes(public.encode("utf-8"))
            masked.replace(path)
        finally:
            masked.unlink(missing_ok=True)


def free_folder(folder: Path, public: Collection[str]) -> bool:
    """Mask secrets and private paths in the texts of a run that has not finished.

    Args:
        folder: of the run.
        public: names of files in it that are left as they are, as the run's own ones are.

    Returns:
        Whether every text could be written.
    """
    done = True
    for path in sorted(folder.rglob("*")):
        kept = path.parent == folder and path.name in {*OWN, *public}
        if path.is_file() and not path.is_symlink() and not kept:
            try:
                free_of_private_text(path)
            except OSError:
                done = False
    return done


@contextmanager
def held(path: Path) -> Iterator[None]:
    """Hold a file, so that :func:`is_held` tells of it until the block or the process ends, however it ends."""
    with path.open("rb") as file:
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def is_held(path: Path) -> bool | None:
    """Whether a process holds a file, on whatever host; None where the file system does not tell."""
    try:
        with path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return None
    return False


def fingerprint(path: Path) -> dict[str, Any]:
    """Size and SHA-256 of a file."""
    with path.open("rb") as file:
        return {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def plain(values: object, where: str) -> str:
    """Values as JSON, which also tells whether they are plain.

    Raises:
        DataError: NaN, infinity, or something that is no plain value.
    """
    try:
        return json.dumps(values, sort_keys=True, ensure_ascii=False, allow_nan=False)
    except (ValueError, TypeError) as problem:
        raise DataError(f"{where}: not plain finite values: {problem}") from None


def write_json(path: Path, content: object) -> None:
    """Write plain values and wait until they are on disk."""
    with path.open("w", encoding="utf-8") as file:
        json.dump(content, file, indent=1, ensure_ascii=False, allow_nan=False)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())


def sync(path: Path) -> None:
    """Wait until a file or the entries of a folder are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_json(path: Path) -> dict[str, Any]:
    """An object from a file.

    Raises:
        DataError: no JSON, e.g. truncated, or no object.
    """
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError) as problem:
        raise DataError(f"{shown(path)}: not readable JSON ({problem}); truncated?") from None
    if not isinstance(content, dict):
        raise DataError(f"{shown(path)}: got {type(content).__name__}, expected an object")
    return content


def checked_points(frame: pl.DataFrame, where: str) -> pl.DataFrame:
    """A table of points with the types of the vocabulary.

    Raises:
        DataError: no row, an unknown column, another type, or a value out of range, NaN or infinite.
    """
    if frame.is_empty():
        raise DataError(f"{where}: no point; a run without points has failed")
    try:
        typed = frame.select(pl.col(name).cast(column(name).dtype) for name in frame.columns)
    except pl.exceptions.PolarsError as problem:
        raise DataError(f"{where}: {str(problem).splitlines()[0]}") from None
    except DataError as problem:
        raise DataError(f"{where}: {problem}") from None
    for name in typed.columns:
        values = typed[name]
        if typed.schema[name] == pl.Float64 and not values.drop_nulls().is_finite().all():
            raise DataError(f"{where}, column {name}: got NaN or infinity; a missing value is null, with its reason")
        if not _in_range(values, column(name)):
            raise DataError(f"{where}, column {name}: got a value out of range, allowed: {column(name).expectation}")
        wanted = frame[name]
        if wanted.dtype.is_float() and typed.schema[name] == pl.Int64 and (wanted != values).any():
            raise DataError(f"{where}, column {name}: got a fraction, allowed: {column(name).expectation}")
    return typed


def _in_range(values: pl.Series, expected: Column) -> bool:
    given = values.drop_nulls()
    return not given.len() or not (
        (expected.minimum is not None and given.min() < expected.minimum)
        or (expected.maximum is not None and given.max() > expected.maximum)
        or (expected.allowed is not None and not given.is_in(list(expected.allowed)).all())
    )


def read_points(path: Path) -> pl.DataFrame:
    """A table of points that :func:`checked_points` let pass."""
    with path.open(encoding="utf-8") as file:
        names = file.readline().rstrip("\n").split(",")
    return pl.read_csv(path, schema={name: column(name).dtype for name in names})
