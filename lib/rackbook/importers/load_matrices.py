"""Loads of experts as others dump them: a matrix of layers × experts, or rows of (step, layer, expert, tokens)."""

from __future__ import annotations

import csv
import io
from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from rackbook.errors import DataError, one_of
from rackbook.experts.loads import Loads, checked, from_frame
from rackbook.locations import shown

if TYPE_CHECKING:
    from pathlib import Path

_LONG = {"layer", "expert"}
KINDS = (".csv", ".npy", ".parquet")


def read(path: Path, *, top_k: int, num_experts: int | None = None) -> Loads:
    """Read loads from a file.

    A NPY file holds (layers, experts) or (steps, layers, experts). A CSV or Parquet file holds either rows with the
    columns layer, expert, tokens and, for more than one step, step; or a matrix, one row per layer and one column per
    expert, in a CSV with or without a line of names above it.

    Args:
        path: the file.
        top_k: different experts that each token went to.
        num_experts: experts that the model has; None to believe the file.

    Raises:
        DataError: no such file, another kind, or loads that :func:`~rackbook.experts.loads.checked` refuses.
    """
    where = shown(path)
    if not path.is_file():
        raise DataError(f"{where}: no such file, expected loads of experts as {', '.join(KINDS)}")
    readers = {".csv": _csv, ".npy": _npy, ".parquet": _parquet}
    if path.suffix.lower() not in readers:
        raise DataError(one_of(path.suffix, KINDS, f"kind of file with loads of experts ({where})"))
    found = readers[path.suffix.lower()](path, where)
    if isinstance(found, pl.DataFrame):
        return from_frame(found, top_k=top_k, where=where, num_experts=num_experts)
    return checked(found, top_k=top_k, where=where, num_experts=num_experts)


def _npy(path: Path, where: str) -> np.ndarray:
    try:
        # mapped, not read: loads of thousands of steps need not fit in memory twice
        return np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError, OSError) as problem:
        raise DataError(f"{where}: no readable NPY array ({problem})") from None


def _parquet(path: Path, where: str) -> np.ndarray | pl.DataFrame:
    try:
        frame = pl.read_parquet(path)
    except pl.exceptions.PolarsError as problem:
        raise DataError(f"{where}: no readable Parquet file ({problem})") from None
    if set(frame.columns) >= _LONG:
        return frame
    if not all(dtype.is_numeric() for dtype in frame.dtypes):
        raise DataError(
            f"{where}: got the columns {', '.join(frame.columns[:6])}; allowed: layer, expert, tokens (and step), or "
            "one numeric column per expert"
        )
    return frame.to_numpy()


def _csv(path: Path, where: str) -> np.ndarray | pl.DataFrame:
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as problem:
        raise DataError(f"{where}: not UTF-8 text ({problem.reason} at byte {problem.start})") from None
    rows = [row for row in csv.reader(io.StringIO(text, newline="")) if any(cell.strip() for cell in row)]
    if not rows:
        raise DataError(f"{where}: the file is empty")
    if {cell.strip() for cell in rows[0]} >= _LONG:
        try:
            return pl.read_csv(io.BytesIO(text.encode()))
        except pl.exceptions.PolarsError as problem:
            raise DataError(f"{where}: {problem}") from None
    first = 1 if all(_number(cell) is None for cell in rows[0]) else 0
    matrix = []
    for number, row in enumerate(rows[first:], start=first + 1):
        if len(row) != len(rows[0]):
            raise DataError(f"{where}, row {number}: got {len(row)} cells, expected {len(rows[0])}, one per expert")
        values = [_number(cell) if cell.strip() else float("nan") for cell in row]
        if None in values:
            cell = row[values.index(None)]
            raise DataError(f"{where}, row {number}, column {values.index(None) + 1}: got {cell!r}, allowed: a number")
        matrix.append(values)
    if not matrix:
        raise DataError(f"{where}: the file has names but no rows")
    return np.array(matrix, dtype=float)


def _number(cell: str) -> float | None:
    try:
        return float(cell)
    except ValueError:
        return None
