"""Readers of trace files that others publish: Mooncake, vLLM's timed traces, Azure."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import polars as pl

from rackbook.errors import DataError, ParameterError, one_of
from rackbook.locations import shown
from rackbook.replay.traces import COLUMNS, Trace

MOONCAKE_BLOCK_TOKENS = 512
"""Tokens that one hash id of a Mooncake trace stands for (the trace's own description)."""

TIMED_BLOCK_TOKENS = 16
"""Tokens that one hash id of a timed trace stands for (default of vLLM's ``--timed-trace-chunk-hash-size``)."""


def read(path: str | Path) -> Trace:
    """Read a trace file by its ending: ``.csv`` is an Azure trace, ``.jsonl`` one with hash ids.

    The first request of a ``.jsonl`` tells which kind it is by the number of its hash ids: one per 512 tokens is
    Mooncake's, with times in milliseconds, one per 16 is a timed trace with times in seconds. For others, call
    :func:`read_timed` with their block size and unit of time.

    Raises:
        DataError: no such file, another ending, or a line that is not what it should be.
    """
    readers: dict[str, Callable[[str | Path], Trace]] = {".jsonl": _read_by_blocks, ".csv": read_azure}
    ending = Path(path).suffix
    if ending not in readers:
        raise DataError(f"{shown(Path(path))}: {one_of(ending, readers, 'ending of a trace file')}")
    return readers[ending](path)


def _read_by_blocks(path: str | Path) -> Trace:
    name = shown(Path(path))
    for number, line in enumerate(_lines(path), start=1):
        entry = _entry(line, f"{name}, line {number}")
        blocks, tokens = len(entry["hash_ids"]), entry["input_length"]
        fitting = [size for size in (MOONCAKE_BLOCK_TOKENS, TIMED_BLOCK_TOKENS) if blocks == -(-tokens // size)]
        if tokens < 1 or len(fitting) > 1:  # nothing to tell them apart by
            continue
        if fitting:
            return read_mooncake(path) if fitting == [MOONCAKE_BLOCK_TOKENS] else read_timed(path)
        raise DataError(
            f"{name}, line {number}: got {blocks} hash ids for {tokens} tokens, expected one per "
            f"{MOONCAKE_BLOCK_TOKENS} (Mooncake) or {TIMED_BLOCK_TOKENS} (timed trace)"
        )
    return read_mooncake(path)


def read_mooncake(path: str | Path) -> Trace:
    """Read a Mooncake trace: a timed trace with times in milliseconds and a hash id per 512 tokens.

    Raises:
        DataError: no such file, or a line that is not what it should be; names the line.
    """
    found = _read_hashed(path, MOONCAKE_BLOCK_TOKENS, 1e-3)
    return Trace(f"Mooncake trace {Path(path).name}", "measured", found)


def read_timed(path: str | Path, *, block_tokens: int = TIMED_BLOCK_TOKENS, seconds_per_unit: float = 1.0) -> Trace:
    """Read a timed trace as vLLM's benchmark does, with its default labels and without cutting its prompts.

    One JSON object per line with timestamp, input_length, output_length and hash_ids. Where chat_id and parent_chat_id
    are recorded, a chat and those that follow it are a session.

    Args:
        path: the file.
        block_tokens: tokens that one hash id stands for (``--timed-trace-chunk-hash-size``).
        seconds_per_unit: of the timestamps (``--timed-trace-sec-multiplier``).

    Raises:
        DataError: no such file, or a line that is not what it should be; names the line.
        ParameterError: a block or a unit that is not positive.
    """
    if block_tokens < 1 or not 0 < seconds_per_unit < float("inf"):
        raise ParameterError(
            f"got block_tokens = {block_tokens!r}, seconds_per_unit = {seconds_per_unit!r}; allowed: at least 1, a "
            "number > 0"
        )
    return Trace(f"timed trace {Path(path).name}", "measured", _read_hashed(path, block_tokens, seconds_per_unit))


def _read_hashed(path: str | Path, block_tokens: int, seconds_per_unit: float) -> pl.DataFrame:
    """The requests of a trace with hash ids.

    A request's known prefix is the run of its first hash ids that earlier requests had: what an endless cache would
    hit. Times count from the first request.
    """
    name = shown(Path(path))
    seen: set[object] = set()
    root: dict[object, object] = {}  # first chat of each chat's session
    rows: list[tuple[object, ...]] = []
    first: float | None = None
    for number, line in enumerate(_lines(path), start=1):
        entry = _entry(line, f"{name}, line {number}")
        ids, chat = entry["hash_ids"], entry.get("chat_id")
        known = next((i for i, block in enumerate(ids) if block not in seen), len(ids))
        seen.update(ids)
        cached = min(known * block_tokens, max(entry["input_length"] - 1, 0))
        first = entry["timestamp"] if first is None else first
        arrival_s = (entry["timestamp"] - first) * seconds_per_unit
        if chat is not None:
            root[chat] = root.get(entry.get("parent_chat_id"), chat)
        session = None if chat is None else str(root[chat])
        rows.append((number - 1, session, arrival_s, entry["input_length"], cached, entry["output_length"]))
    return pl.DataFrame(rows, schema=COLUMNS, orient="row")


def _entry(line: str, where: str) -> dict[str, Any]:
    try:
        entry = json.loads(line)
        return entry | {
            "hash_ids": list(entry["hash_ids"]),
            "timestamp": float(entry["timestamp"]),
            "input_length": int(entry["input_length"]),
            "output_length": int(entry["output_length"]),
        }
    except (ValueError, KeyError, TypeError) as problem:
        raise DataError(
            f"{where}: got {line.strip()[:80]!r} ({type(problem).__name__}: {problem}), "
            "expected a JSON object with timestamp, input_length, output_length [tokens], hash_ids"
        ) from None


def read_azure(path: str | Path) -> Trace:
    """Read an Azure LLM inference trace: a CSV with TIMESTAMP, ContextTokens, GeneratedTokens.

    Prefixes and sessions are not recorded. Arrivals count from the first request.

    Raises:
        DataError: no such file, another header, or a row that is not what it should be; names the row.
    """
    name, expected = shown(Path(path)), ["TIMESTAMP", "ContextTokens", "GeneratedTokens"]
    rows: list[tuple[object, ...]] = []
    first: datetime | None = None
    for number, cells in enumerate(csv.reader(_lines(path)), start=1):
        if number == 1:
            if cells != expected:
                raise DataError(f"{name}, row 1: got columns {','.join(cells)}, expected {','.join(expected)}")
            continue
        try:
            time, input_tokens, output_tokens = cells
            moment = datetime.fromisoformat(time)
            first = first or moment
            arrival_s = (moment - first).total_seconds()
            rows.append((number - 2, None, arrival_s, int(input_tokens), None, int(output_tokens)))
        except (ValueError, TypeError) as problem:
            raise DataError(
                f"{name}, row {number}: got {','.join(cells)!r} ({problem}), expected a date and time, tokens, tokens"
            ) from None
    return Trace(f"Azure trace {Path(path).name}", "measured", pl.DataFrame(rows, schema=COLUMNS, orient="row"))


def _lines(path: str | Path) -> list[str]:
    if not Path(path).is_file():
        raise DataError(f"{shown(Path(path))}: no such file")
    return Path(path).read_text("utf-8").splitlines()
