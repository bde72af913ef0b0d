"""The index of a sweep's folder: one row per execution, for whoever analyses results or looks for what failed."""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import polars as pl

from rackbook.errors import DataError
from rackbook.suite.executions import Execution
from rackbook.suite.store import Store, read_result

FILE = "index.parquet"

SCHEMA = {
    "request": pl.String,
    "inputs": pl.String,
    "notebook": pl.String,
    "status": pl.String,
    "cause": pl.String,
    "error": pl.String,
    "parameters": pl.String,
    "repeat": pl.Int64,
    "attempts": pl.Int64,
    "started_at": pl.Datetime("ms", "UTC"),
    "finished_at": pl.Datetime("ms", "UTC"),
    "duration_s": pl.Float64,
    "verdicts": pl.String,
    "executor": pl.String,
    "job": pl.String,
    "folder": pl.String,
}
"""Columns before those of the parameters, which are called ``p_<name>``.

``status`` is "done", "failed" or "waiting"; ``attempts`` counts failed ones, retried later or not; ``parameters`` and
``verdicts`` (how many of each word the notebook shows) are JSON objects; ``folder`` is relative to that of the index.
"""


def write(results: Store, waiting: Sequence[Execution] = ()) -> pl.DataFrame:
    """Write the index over everything that lies in a folder.

    Args:
        results: the folder.
        waiting: executions that are asked for; those that are neither complete nor failed are rows, too.

    Returns:
        What was written, sorted by notebook and request.
    """
    known = _known(results.out / FILE)
    rows: list[dict[str, Any]] = []
    done, failed = set(), {}
    failures = _attempts(results)
    for name in _names(results.executions):
        row = known.get(f"{results.executions.name}/{name}") or _row(results, results.executions / name, "done")
        request = row["request"]
        done.add(request)
        rows.append(row | {"attempts": 1 + len(failures.get(request, []))})
    for request, attempts in failures.items():
        if request not in done:
            row = known.get(attempts[-1].relative_to(results.out).as_posix()) or _row(results, attempts[-1], "failed")
            failed[request] = row
            rows.append(row | {"attempts": len(attempts)})
    for execution in waiting:
        if execution.request not in done and execution.request not in failed:
            rows.append(_waiting(execution))
    frame = _frame(rows)
    partial = results.out / f".{FILE}.{uuid.uuid4().hex[:8]}.partial"
    try:
        frame.write_parquet(partial)
        descriptor = os.open(partial, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)
        partial.replace(results.out / FILE)
    finally:
        partial.unlink(missing_ok=True)
    return frame


def _frame(rows: list[dict[str, Any]]) -> pl.DataFrame:
    """Rows as a frame, with a column for each parameter: a number or switch as such, everything else as text."""
    values = [json.loads(row["parameters"]) for row in rows]
    columns = {}
    for name in sorted({name for given in values for name in given}):
        columns[f"p_{name}"] = _column([given.get(name) for given in values])
    base = pl.DataFrame([{key: row[key] for key in SCHEMA} for row in rows], schema=SCHEMA, orient="row")
    return base.with_columns(**columns).sort("notebook", "request", "inputs")


def _column(values: list[Any]) -> pl.Series:
    kinds = {type(value) for value in values if value is not None}
    for allowed, dtype in (({bool}, pl.Boolean), ({int}, pl.Int64), ({int, float}, pl.Float64)):
        if kinds <= allowed and kinds:
            return pl.Series(values, dtype=dtype, strict=False)
    texts = [v if v is None or isinstance(v, str) else json.dumps(v, ensure_ascii=False) for v in values]
    return pl.Series(texts, dtype=pl.String)


def _row(results: Store, folder: Path, status: str) -> dict[str, Any]:
    place = folder.relative_to(results.out).as_posix()
    try:
        record = read_result(folder)
    except DataError as problem:  # somebody's hand was in it: the index says so, and the rest can still be used
        request = folder.name.partition("-")[0] if status == "done" else folder.parent.name
        return dict.fromkeys(SCHEMA) | {
            "request": request, "status": "failed", "cause": "damaged", "error": str(problem), "parameters": "{}",
            "attempts": 0, "folder": place,
        }  # fmt: skip
    outcome = record["outcome"]
    return {
        "request": record["request"],
        "inputs": record["inputs"],
        "notebook": record["notebook"],
        "status": status,
        "cause": outcome["cause"] or None,
        "error": outcome["reason"] or None,
        "parameters": json.dumps(record["parameters"], ensure_ascii=False, sort_keys=True),
        "repeat": record["repeat"],
        "attempts": 1,
        "started_at": _time(record["started_at"]),
        "finished_at": _time(outcome["finished_at"]),
        "duration_s": outcome["duration_s"],
        "verdicts": json.dumps(record["verdicts"]),
        "executor": record["executor"]["kind"],
        "job": record["executor"].get("job"),
        "folder": place,
    }


def _waiting(execution: Execution) -> dict[str, Any]:
    return dict.fromkeys(SCHEMA) | {
        "request": execution.request,
        "notebook": execution.notebook.name,
        "status": "waiting",
        "parameters": json.dumps(execution.parameters, ensure_ascii=False, sort_keys=True),
        "repeat": execution.repeat,
        "attempts": 0,
    }


def _time(text: str) -> Any:
    from datetime import datetime

    return datetime.fromisoformat(text)


def _names(folder: Path) -> list[str]:
    return sorted(name for name in os.listdir(folder) if not name.startswith("."))  # noqa: PTH208 - of 10,000


def _attempts(results: Store) -> dict[str, list[Path]]:
    """Failed attempts by request, oldest first."""
    return {folder.name: found for folder in results.attempts.iterdir() if (found := sorted(folder.iterdir()))}


def _known(path: Path) -> dict[str, dict[str, Any]]:
    """The rows of the index as it is; a result never changes, so its row need not be made again."""
    try:
        frame = pl.read_parquet(path)
    except (OSError, pl.exceptions.PolarsError):
        return {}
    if [*frame.columns[: len(SCHEMA)]] != [*SCHEMA] or dict(frame.schema.items()) | SCHEMA != dict(frame.schema):
        return {}
    rows = frame.select(list(SCHEMA)).filter(pl.col("status") != "waiting", pl.col("cause").ne_missing("damaged"))
    return {row["folder"]: row for row in rows.to_dicts()}


def failed(results: Store) -> set[str]:
    """The requests that have failed and were not completed afterwards."""
    done = {name.partition("-")[0] for name in _names(results.executions)}
    return _attempts(results).keys() - done
