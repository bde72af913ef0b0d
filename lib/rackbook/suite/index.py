"""The index of a sweep's folder: one row per execution, for whoever analyses results or looks for what failed."""

from __future__ import annotations

import io
import json
import os
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import polars as pl

from rackbook.errors import DataError
from rackbook.suite.executions import Execution
from rackbook.suite.store import Store, read_result

FILE = "index.parquet"
YES_NO = "yes/no"
"""Unit of a claim that is true or false."""

_DAMAGED = "damaged"

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
    "claims": pl.List(
        pl.Struct(
            {
                "claim": pl.String,
                "statement": pl.String,
                "published": pl.Float64,
                "found": pl.Float64,
                "tolerance": pl.Float64,
                "unit": pl.String,
                "basis": pl.String,
                "verdict": pl.String,
            }
        )
    ),
    "executor": pl.String,
    "job": pl.String,
    "folder": pl.String,
}
"""Columns before those of the parameters, which are called ``p_<name>``.

``status`` is "done" (the result that counts), "outdated" (a result of inputs that have changed since), "failed" or
"waiting". An execution that no sweep asks for any more keeps the word that the last one gave it. ``attempts`` is how
many it took, the failed ones included; ``parameters`` and ``verdicts`` (how many of each word the notebook shows) are
JSON objects; ``folder`` is relative to that of the index. ``claims`` holds what the notebook found beside what is
published, null where there is no result or an older version of the runner wrote it:
``frame.explode("claims").unnest("claims")`` has a row of each. Where the unit is "yes/no", 1 is yes.
"""


def write(results: Store, asked: Sequence[Execution] = (), complete: Mapping[str, Path] | None = None) -> pl.DataFrame:
    """Write the index over everything that lies in a folder.

    Args:
        results: the folder.
        asked: executions that are asked for; those that are neither complete nor failed are rows, too.
        complete: of those asked for, the folders of the complete ones by request; looked up if None.

    Returns:
        What was written, sorted by notebook and request.
    """
    complete = results.complete(asked) if complete is None else complete
    rows = _rows(results, asked, complete)
    settled = complete.keys() | _failed(rows)
    rows += [_waiting(execution) for execution in asked if execution.request not in settled]
    frame = _frame(rows)
    partial = results.out / f".{FILE}.{uuid.uuid4().hex[:8]}.partial"
    try:
        content = io.BytesIO()  # a full disk is an OSError, as everywhere else; polars has an error of its own
        frame.write_parquet(content)
        partial.write_bytes(content.getvalue())
        descriptor = os.open(partial, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)
        partial.replace(results.out / FILE)
    finally:
        partial.unlink(missing_ok=True)
    return frame


def failed(results: Store, asked: Sequence[Execution], complete: Mapping[str, Path]) -> set[str]:
    """The requests that have failed and were not completed afterwards.

    Args:
        results: the folder.
        asked: the executions that are asked for.
        complete: the folders of the complete ones by request.
    """
    return _failed(_rows(results, asked, complete))


def _failed(rows: list[dict[str, Any]]) -> set[str]:
    return {row["request"] for row in rows if row["status"] == "failed" and row["cause"] != _DAMAGED}


def _rows(results: Store, asked: Sequence[Execution], complete: Mapping[str, Path]) -> list[dict[str, Any]]:
    """A row for each result, and for the last failure of each execution that is not complete."""
    known = _known(results.out / FILE)
    failures = _attempts(results)
    judged = {execution.request for execution in asked}
    counting = {folder.name for folder in complete.values()}
    rows: list[dict[str, Any]] = []
    done: set[str] = set()
    reached: dict[str, int] = {}
    for name in _names(results.executions):
        row = known.get(f"{results.executions.name}/{name}") or _row(results, results.executions / name, "done")
        request = row["request"]
        if row["cause"] != _DAMAGED and request in judged:
            row["status"] = "done" if name in counting else "outdated"
        if row["status"] == "done" or name in counting:
            done.add(request)
        reached[request] = max(row["attempts"], reached.get(request, 0))
        rows.append(row)
    for request, attempts in failures.items():
        # a failure before an outdated result was overcome then, and says nothing about the present inputs
        if request not in done and len(attempts) >= reached.get(request, 0):
            place = attempts[-1].relative_to(results.out).as_posix()
            rows.append(known.get(place) or _row(results, attempts[-1], "failed"))
    return rows


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
            "request": request, "status": "failed", "cause": _DAMAGED, "error": str(problem), "parameters": "{}",
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
        "attempts": record["attempt"],
        "started_at": _time(record["started_at"]),
        "finished_at": _time(outcome["finished_at"]),
        "duration_s": outcome["duration_s"],
        "verdicts": json.dumps(record["verdicts"]),
        "claims": _claims(record.get("claims")),
        "executor": record["executor"]["kind"],
        "job": record["executor"].get("job"),
        "folder": place,
    }


def _claims(records: list[dict[str, Any]] | None) -> list[dict[str, Any]] | None:
    """What a result says about each claim, with true and false as numbers."""
    if records is None:
        return None
    return [
        record
        | {name: None if record[name] is None else float(record[name]) for name in ("published", "found", "tolerance")}
        | ({"unit": YES_NO} if isinstance(record["published"], bool) else {})
        for record in records
    ]


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
    folders = [folder for folder in results.attempts.iterdir() if folder.is_dir()]  # a file browser leaves files
    return {folder.name: found for folder in folders if (found := sorted(folder.iterdir()))}


def _known(path: Path) -> dict[str, dict[str, Any]]:
    """The rows of the index as it is; a result never changes, so its row need not be made again."""
    try:
        frame = pl.read_parquet(path)
    except (OSError, pl.exceptions.PolarsError):
        return {}
    if [*frame.columns[: len(SCHEMA)]] != [*SCHEMA] or dict(frame.schema.items()) | SCHEMA != dict(frame.schema):
        return {}
    rows = frame.select(list(SCHEMA)).filter(pl.col("status") != "waiting", pl.col("cause").ne_missing(_DAMAGED))
    return {row["folder"]: row for row in rows.to_dicts()}
