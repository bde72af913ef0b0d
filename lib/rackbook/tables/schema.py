"""A table's schema: which columns, what one row is, and the check that every reader passes through."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import date
from numbers import Integral, Real
from pathlib import Path

import polars as pl

from rackbook.errors import DataError, one_of
from rackbook.locations import shown
from rackbook.tables.columns import Column, column

PROVENANCE = ("origin", "source", "locator", "formula", "missing_reason")
"""Columns that every table has, after its own."""

_NEEDED = {
    "published": ("source", "locator"),
    "derived": ("source", "formula"),
    "measured": ("source",),
    "modelled": ("formula",),
    "simulated": ("source",),
}

_KINDS = {pl.Int64: Integral, pl.Float64: Real, pl.Boolean: bool, pl.String: str, pl.Date: date}


@dataclass(frozen=True)
class Schema:
    """One table.

    Attributes:
        name: also the file name in ``data/published``.
        grain: what one row is.
        coordinates: columns that say where a point lies, never null.
        values: columns that hold the result.
        optional: coordinates and values that may be null; a null value needs a ``missing_reason``.
        origins: the origins that rows may have.
    """

    name: str
    grain: str
    coordinates: tuple[str, ...]
    values: tuple[str, ...]
    optional: tuple[str, ...] = ()
    origins: tuple[str, ...] = ("published", "derived", "measured", "modelled", "simulated")

    @property
    def columns(self) -> tuple[Column, ...]:
        """All columns, in file order."""
        return tuple(column(name) for name in (*self.coordinates, *self.values, *PROVENANCE))

    def frame(self, rows: list[dict[str, object]] | pl.DataFrame, *, where: str = "") -> pl.DataFrame:
        """Build a checked frame; columns that a row leaves out become null.

        Args:
            rows: dictionaries by column name, or a frame with some of the columns.
            where: what the rows are, for error messages.

        Returns:
            One row per input row, the schema's columns in order.

        Raises:
            DataError: an unknown column, a wrong type, a value out of range, a missing value or reason,
                a row that appears twice.
        """
        where = where or self.name
        records = rows.to_dicts() if isinstance(rows, pl.DataFrame) else rows
        names = {c.name for c in self.columns}
        checked = []
        for number, record in enumerate(records, start=1):
            if unknown := record.keys() - names:
                raise DataError(f"{where}, row {number}: {one_of(min(unknown), names, 'column')}")
            checked.append((number, self._row(record, f"{where}, row {number}")))
        return self._frame(checked, where)

    def read_csv(self, path: Path) -> pl.DataFrame:
        """Read and check a CSV file; empty cells and NaN are null.

        Raises:
            DataError: the file is absent, empty, has other columns, or a cell breaks the schema.
        """
        name = shown(path)
        if not path.is_file():
            expected = ", ".join(c.name for c in self.columns)
            raise DataError(f"{name}: no such file, expected a CSV with columns {expected}")
        try:
            text = path.read_bytes().decode("utf-8")
        except UnicodeDecodeError as problem:
            raise DataError(f"{name}: not UTF-8 text ({problem.reason} at byte {problem.start})") from None
        lines = list(csv.reader(io.StringIO(text, newline="")))
        header = lines.pop(0) if lines else []
        self._header(header, name)
        rows = []
        for number, cells in enumerate(lines, start=2):
            if len(cells) != len(header):
                raise DataError(f"{name}, row {number}: got {len(cells)} cells, expected {len(header)}")
            rows.append((number, dict(zip(header, cells, strict=True))))
        if not rows:
            raise DataError(f"{name}: the file has a header but no rows")
        return self.of_text(rows, name)

    def of_text(self, rows: Iterable[tuple[int, Mapping[str, str]]], where: str) -> pl.DataFrame:
        """Build a checked frame from the cells of a file; empty cells, NaN and absent columns are null.

        Args:
            rows: number of each row, and its cells by column; all of them columns of this table.
            where: the file, for error messages.

        Raises:
            DataError: a cell breaks the schema, or a row appears twice.
        """
        checked = []
        for number, cells in rows:
            at = f"{where}, row {number}"
            record = {c.name: _parse(cells.get(c.name, ""), c, at) for c in self.columns}
            checked.append((number, self._row(record, at)))
        return self._frame(checked, where)

    def _header(self, got: list[str], name: str) -> None:
        expected = [c.name for c in self.columns]
        if got == expected:
            return
        missing, unknown = sorted(set(expected) - set(got)), sorted(set(got) - set(expected))
        details = [f"missing: {', '.join(missing)}"] if missing else []
        details += [f"unknown: {', '.join(unknown)}"] if unknown else []
        detail = "; ".join(details) or f"got another order: {','.join(got)}"
        raise DataError(f"{name}, row 1: columns must be {','.join(expected)} ({detail})")

    def _row(self, record: dict[str, object], where: str) -> dict[str, object]:
        row = {c.name: _checked(record.get(c.name), c, where) for c in self.columns}
        if row["origin"] not in self.origins:
            allowed = ", ".join(self.origins)
            raise DataError(f"{where}, column origin: got {row['origin']!r}, allowed: {allowed}")
        for name in (*self.coordinates, *self.values):
            if row[name] is None and name not in self.optional:
                raise DataError(f"{where}, column {name}: got nothing, allowed: {column(name).expectation}")
        if any(row[name] is None for name in self.values) and not row["missing_reason"]:
            raise DataError(f"{where}, column missing_reason: got nothing, a missing value needs a reason")
        for name in _NEEDED[str(row["origin"])]:
            if not row[name]:
                raise DataError(f"{where}, column {name}: got nothing, a {row['origin']} point must have it")
        return row

    def _frame(self, rows: list[tuple[int, dict[str, object]]], where: str) -> pl.DataFrame:
        seen: dict[tuple[object, ...], int] = {}
        for number, row in rows:
            key = tuple(row[name] for name in (*self.coordinates, "origin", "source"))
            if key in seen:
                point = ", ".join("(none)" if part is None else str(part) for part in key)
                raise DataError(f"{where}, row {number}: the same point as row {seen[key]}: {point}")
            seen[key] = number
        kept = [row for _, row in rows]
        return pl.DataFrame(kept, schema={c.name: c.dtype for c in self.columns}, orient="row")


def _parse(cell: str, expected: Column, where: str) -> object:
    text = cell.strip()
    if not text:
        return None
    try:
        if expected.dtype in (pl.Int64, pl.Float64) and "_" in text:
            raise ValueError("Python reads 1_000 as a number, other readers of the file do not")
        if expected.dtype == pl.Int64:
            return int(text)
        if expected.dtype == pl.Float64:
            return float(text)
        if expected.dtype == pl.Boolean:
            return {"true": True, "false": False}[text]
        if expected.dtype == pl.Date:
            return date.fromisoformat(text)
    except (ValueError, KeyError):
        raise _not_allowed(cell, expected, where) from None
    return text


def _not_allowed(got: object, expected: Column, where: str) -> DataError:
    return DataError(f"{where}, column {expected.name}: got {got!r}, allowed: {expected.expectation}")


def _checked(value: object, expected: Column, where: str) -> object:
    if value is None or (isinstance(value, Real) and math.isnan(value)):
        return None
    right_kind = isinstance(value, _KINDS[expected.dtype])
    if isinstance(value, bool):
        right_kind = expected.dtype == pl.Boolean
    in_range = right_kind and not (
        (isinstance(value, Real) and math.isinf(value))
        or (expected.minimum is not None and value < expected.minimum)
        or (expected.maximum is not None and value > expected.maximum)
        or (expected.allowed is not None and value not in expected.allowed)
    )
    if not in_range:
        raise _not_allowed(value, expected, where)
    return {pl.Float64: float, pl.Int64: int}.get(expected.dtype, lambda kept: kept)(value)
