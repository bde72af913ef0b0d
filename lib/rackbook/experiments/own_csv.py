"""A CSV file of the user's own, named by a parameter of a notebook."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Sequence
from pathlib import Path

from rackbook.errors import DataError
from rackbook.locations import shown


class OwnCsv:
    """The header and the rows of a file; what they must be, its reader checks.

    Args:
        path: the file.
        parameter: name of the parameter that names it, for the message.
        columns: what it needs, for the message.

    Attributes:
        name: the file, as messages name it.
        header: cells of the first row without the spaces around them; empty for an empty file.

    Raises:
        DataError: no such file, or not UTF-8 text.
    """

    def __init__(self, path: str | Path, *, parameter: str, columns: Sequence[str]) -> None:
        file = Path(path)
        self.name = shown(file)
        if not file.is_file():
            raise DataError(f"{self.name}: no such file; {parameter} names a CSV with columns {', '.join(columns)}")
        try:
            text = file.read_text("utf-8-sig")
        except UnicodeDecodeError as problem:
            raise DataError(f"{self.name}: not UTF-8 text ({problem.reason} at byte {problem.start})") from None
        self._lines = csv.reader(io.StringIO(text, newline=""))
        self.header = [cell.strip() for cell in next(self._lines, [])]

    def rows(self) -> Iterator[tuple[int, dict[str, str]]]:
        """Number and cells of each row that is not blank, as they stand in the file; can be asked for once.

        Raises:
            DataError: a row has more cells, or fewer, than the header.
        """
        for cells in self._lines:
            if not any(cell.strip() for cell in cells):
                continue
            number = self._lines.line_num
            if len(cells) != len(self.header):
                raise DataError(
                    f"{self.name}, row {number}: got {len(cells)} cells, expected {len(self.header)}, one per column"
                )
            yield number, dict(zip(self.header, cells, strict=True))
