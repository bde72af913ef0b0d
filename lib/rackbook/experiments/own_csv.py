"""A CSV file of the user's own, named by a parameter of a notebook."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import polars as pl

from rackbook.errors import DataError, one_of
from rackbook.locations import shown
from rackbook.tables import Schema, column


class OwnCsv:
    """The header and the rows of a file; what a cell must be, its reader checks.

    The columns may stand in any order. A byte-order mark, blank lines, and spaces around a cell mean nothing.

    Args:
        path: the file.
        parameter: name of the parameter that names it, for the message.
        columns: what it must have.
        optional: what it may have.

    Attributes:
        name: the file, as messages name it.

    Raises:
        DataError: no such file, not UTF-8 text, or other columns.
    """

    def __init__(
        self, path: str | Path, *, parameter: str, columns: Sequence[str], optional: Sequence[str] = ()
    ) -> None:
        file = Path(path)
        self.name = shown(file)
        if not file.is_file():
            raise DataError(f"{self.name}: no such file; {parameter} names a CSV with columns {', '.join(columns)}")
        try:
            text = file.read_text("utf-8-sig")
        except UnicodeDecodeError as problem:
            raise DataError(f"{self.name}: not UTF-8 text ({problem.reason} at byte {problem.start})") from None
        self._lines = csv.reader(io.StringIO(text, newline=""))
        self._header = [cell.strip() for cell in next(self._lines, [])]
        where, allowed = self.row(1), (*columns, *optional)
        for found in self._header:
            if found not in allowed:
                raise DataError(f"{where}: {one_of(found, allowed, 'column')}")
            if self._header.count(found) > 1:
                raise DataError(f"{where}: column {found!r} stands twice")
        if missing := [name for name in columns if name not in self._header]:
            got = ", ".join(self._header) or "(none)"
            raise DataError(f"{where}: columns {', '.join(missing)} are missing, got {got}")

    def row(self, number: int) -> str:
        """A row as messages name it."""
        return f"{self.name}, row {number}"

    def rows(self) -> Iterator[tuple[int, dict[str, str]]]:
        """Number and cells of each row that is not blank, without the spaces around them; can be asked for once.

        Raises:
            DataError: a row has more cells, or fewer, than the header; or there is no row.
        """
        empty = True
        for cells in self._lines:
            texts = [cell.strip() for cell in cells]
            if not any(texts):
                continue
            number, empty = self._lines.line_num, False
            if len(texts) != len(self._header):
                raise DataError(
                    f"{self.row(number)}: got {len(texts)} cells, expected {len(self._header)}, one per column"
                )
            yield number, dict(zip(self._header, texts, strict=True))
        if empty:
            raise DataError(f"{self.name}: the file has a header but no rows")

    def positive(self, number: int, name: str, cell: str, *, optional: bool = False) -> float | None:
        """The number above 0 in a cell, a whole one where the vocabulary says so; None for nothing in an optional one.

        Args:
            number: of the row.
            name: of the column.
            cell: its text.
            optional: whether the cell may be empty.

        Raises:
            DataError: anything else.
        """
        if not cell and optional:
            return None
        expected = column(name)
        whole = expected.dtype == pl.Int64
        try:
            value = float(cell.replace("_", "?"))  # Python reads 1_000 as a number, other readers of the file do not
        except ValueError:
            value = math.nan
        if not 0 < value < math.inf or (whole and not value.is_integer()):
            allowed = f"a {'whole ' if whole else ''}number > 0 [{expected.unit}]"
            allowed += ("" if whole else ", with a point for decimals") + (", or nothing" if optional else "")
            raise DataError(f"{self.row(number)}, column {name}: got {cell!r}, allowed: {allowed}")
        return value


def read_table(path: str | Path, table: Schema, *, parameter: str) -> pl.DataFrame:
    """Read a file with the columns of a table; those that may be null can be left out.

    Args:
        path: the file.
        table: the table.
        parameter: name of the parameter that names the file, for the message.

    Returns:
        One row per row of the file that is not blank, the table's columns in order.

    Raises:
        DataError: no such file, other columns, or a cell that breaks the schema; names row and column.
    """
    needed = [name for name in (*table.coordinates, *table.values) if name not in table.optional]
    columns = [*needed, "origin", "source"]
    optional = [c.name for c in table.columns if c.name not in columns]
    file = OwnCsv(path, parameter=parameter, columns=columns, optional=optional)
    return table.of_text(file.rows(), file.name)
