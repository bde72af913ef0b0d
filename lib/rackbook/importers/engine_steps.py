"""Per-step records of a vLLM engine, as dynamo's forward-pass metrics write them (one row per engine step)."""

from __future__ import annotations

import csv
import io
import math
from pathlib import Path
from typing import TYPE_CHECKING

from rackbook.errors import DataError
from rackbook.locations import shown
from rackbook.tables import schema

if TYPE_CHECKING:
    from collections.abc import Iterator

    import polars as pl

FILE = "fpm_metrics_phase.csv"
_COUNTS = ("ctx_tokens", "decode_requests", "decode_kv_tokens")
_NEEDED = (*_COUNTS, "latency_ms")
_EXACT = 2**53
"""Whole numbers below this are exact as floating-point numbers, and fit into 64 bits."""


def read_engine_steps(path: str | Path, *, hardware: str, model: str) -> pl.DataFrame:
    """Read measured engine steps.

    Args:
        path: an ``fpm_metrics_phase.csv``, or a folder that holds one. Blank lines, and spaces around a cell, mean
            nothing.
        hardware: what the steps ran on, as far as it is known.
        model: the model that was served.

    Returns:
        Table ``engine_steps``: one row per step that did work, in file order, origin "measured". ``step`` counts all
        rows of the file, also those of steps without work.

    Raises:
        DataError: no such file, a file without context depths (``fpm_metrics.csv``), a column that is missing or
            stands twice, a cell that is no count or no latency above 0, or no step with work; names row and column.
    """
    file = Path(path)
    if file.is_dir():
        file = file / FILE
    name = shown(file)
    if not file.is_file():
        raise DataError(f"{name}: no such file; expected a {FILE} or a folder that holds one")
    # a relative path may have no folder in it
    setting = {"hardware": hardware, "model": model, "origin": "measured", "source": file.resolve().parent.name}
    read, steps = 0, []
    for read, (row, (prefill, requests, kv_tokens, latency_ms)) in enumerate(_rows(file, name), start=1):
        if not prefill and not requests:
            continue
        steps.append(
            setting
            | {
                "step": read,
                "num_prefill_tokens": int(prefill),
                "num_decode_requests": int(requests),
                "mean_context_tokens": kv_tokens / requests if requests else None,
                "step_ms": latency_ms,
                "locator": f"row {row}",
            }
        )
    if not steps:
        raise DataError(f"{name}: no step with work in {read} rows")
    return schema("engine_steps").frame(steps, where=name)


def _rows(file: Path, name: str) -> Iterator[tuple[int, list[float]]]:
    """Line of the file, and the numbers of ``_NEEDED``, of each row that is not blank."""
    try:
        lines = csv.reader(io.StringIO(file.read_text("utf-8-sig"), newline=""), strict=True)
    except UnicodeDecodeError as problem:
        raise DataError(f"{name}: not UTF-8 text ({problem.reason} at byte {problem.start})") from None
    try:
        header = [cell.strip() for cell in next(lines, [])]
        if missing := [column for column in _NEEDED if column not in header]:
            raise DataError(
                f"{name}, row 1: columns {', '.join(missing)} are missing, got {', '.join(header) or '(none)'}; "
                f"take the {FILE} of the same run, which records context depths"
            )
        for column in _NEEDED:
            if header.count(column) > 1:
                raise DataError(f"{name}, row 1: column {column!r} stands twice")
        places = [(column, header.index(column)) for column in _NEEDED]
        for cells in lines:
            if not any(cell.strip() for cell in cells):
                continue
            row = lines.line_num
            if len(cells) != len(header):
                raise DataError(
                    f"{name}, row {row}: got {len(cells)} cells, expected {len(header)}, one per column; "
                    "is the file half written?"
                )
            yield row, [_number(cells[place], column, f"{name}, row {row}") for column, place in places]
    except csv.Error as problem:
        raise DataError(f"{name}, row {lines.line_num}: not a readable CSV: {problem}") from None


def _number(cell: str, column: str, where: str) -> float:
    try:
        value = float(cell.replace("_", "?"))  # Python reads 1_000 as a number, other readers of the file do not
    except ValueError:
        value = math.nan
    if column in _COUNTS:
        right, allowed = 0 <= value < _EXACT and value.is_integer(), "a whole number ≥ 0"
    else:
        right, allowed = 0 < value < math.inf, "a number > 0 [ms], with a point for decimals"
    if not right:
        raise DataError(f"{where}, column {column}: got {cell!r}, allowed: {allowed}")
    return value
