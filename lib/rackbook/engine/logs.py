"""What a vLLM server writes to its log: iterations, throughput, EPLB balancedness and speculative decoding, as frames.

Line forms: ``vllm/v1/metrics/loggers.py``, ``vllm/distributed/eplb/eplb_state.py`` and
``vllm/v1/spec_decode/metrics.py`` of vLLM 0.32.0 and 0.33.0.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import polars as pl

from rackbook.errors import DataError
from rackbook.tables import column

_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_LOGGED_AT = re.compile(r"\b(?:DEBUG|INFO|WARNING|ERROR|CRITICAL) (\d\d-\d\d \d\d:\d\d:\d\d)\b")
_CORE = re.compile(r"\bEngineCore_DP(\d+)\b")
_NUMBER = r"(-?\d+(?:\.\d+)?|nan|inf)"


@dataclass(frozen=True)
class _Form:
    """One kind of line: how to recognise it, how to read it, and the columns that come out."""

    what: str
    marks: tuple[str, ...]
    pattern: re.Pattern[str]
    columns: tuple[str, ...]
    make: Callable[[re.Match[str]], list[dict[str, Any]]]


def _rank(text: str | None) -> int | None:
    return None if text is None else int(text)


_ITERATION = _Form(
    "iteration",
    ("Iteration(", "iteration elapsed time:"),
    re.compile(
        r"(?:Engine (\d+): )?Iteration\((\d+)\): (\d+) context requests, (\d+) context tokens, "
        rf"(\d+) generation requests, (\d+) generation tokens, iteration elapsed time: {_NUMBER} ms( \(dummy\))?"
        rf"(?:, \w+ KV cache usage: {_NUMBER}%)?"
    ),
    (
        "rank", "iteration", "num_prefill_requests", "num_prefill_tokens", "num_decode_requests", "num_decode_tokens",
        "step_ms", "dummy_step", "kv_use_percent",
    ),
    lambda m: [
        {
            "rank": _rank(m[1]),
            "iteration": int(m[2]),
            "num_prefill_requests": int(m[3]),
            "num_prefill_tokens": int(m[4]),
            "num_decode_requests": int(m[5]),
            "num_decode_tokens": int(m[6]),
            "step_ms": _finite(m[7], "iteration elapsed time"),
            "dummy_step": m[8] is not None,
            "kv_use_percent": None if m[9] is None else _finite(m[9], "KV cache usage"),
        }
    ],
)  # fmt: skip

_THROUGHPUT = _Form(
    "throughput",
    ("Avg prompt throughput:", "Avg generation throughput:"),
    re.compile(
        rf"(?:Engine (\d+): |\d+ Engines Aggregated: )?Avg prompt throughput: {_NUMBER} tokens/s, "
        rf"Avg generation throughput: {_NUMBER} tokens/s, Running: (\d+) reqs, Waiting: (\d+) reqs"
        rf"(?:.*?KV cache usage: {_NUMBER}%)?(?:, Prefix cache hit rate: {_NUMBER}%)?"
    ),
    (
        "rank",
        "prompt_tok_per_s",
        "output_tok_per_s",
        "num_running",
        "num_queued",
        "kv_use_percent",
        "prefix_hit_percent",
    ),
    lambda m: [
        {
            "rank": _rank(m[1]),
            "prompt_tok_per_s": _finite(m[2], "prompt throughput"),
            "output_tok_per_s": _finite(m[3], "generation throughput"),
            "num_running": int(m[4]),
            "num_queued": int(m[5]),
            "kv_use_percent": None if m[6] is None else _finite(m[6], "KV cache usage"),
            "prefix_hit_percent": None if m[7] is None else _finite(m[7], "hit rate"),
        }
    ],
)

_EPLB = _Form(
    "EPLB",
    ("EPLB step:",),
    re.compile(
        rf"EPLB step: (\d+)(?: for model (.+?))?: avg_tokens={_NUMBER}, max_tokens={_NUMBER}, balancedness={_NUMBER}"
        r"(?:, steps until the next rearrangement: (-?\d+))?"
    ),
    ("eplb_step", "model", "mean_rank_tokens", "max_rank_tokens", "balancedness_of_sums", "steps_to_rearrangement"),
    lambda m: [
        {
            "eplb_step": int(m[1]),
            "model": m[2],
            "mean_rank_tokens": _finite(m[3], "avg_tokens"),
            "max_rank_tokens": _finite(m[4], "max_tokens"),
            # 0.0 is what vLLM prints where no token was routed at all
            "balancedness_of_sums": None if float(m[4]) == 0 else _finite(m[5], "balancedness"),
            "steps_to_rearrangement": _rank(m[6]),
        }
    ],
)

_SPECULATION = _Form(
    "speculative decoding",
    ("SpecDecoding metrics:",),
    re.compile(
        rf"SpecDecoding metrics: Mean acceptance length: {_NUMBER}, Accepted throughput: {_NUMBER} tokens/s, "
        rf"Drafted throughput: {_NUMBER} tokens/s, Accepted: (\d+) tokens, Drafted: (\d+) tokens, "
        r"Per-position acceptance rate: ([\d., nainf]*), Avg Draft acceptance rate: (?:-?[\d.]+|nan)%"
    ),
    ("num_accepted_tokens", "num_drafted_tokens", "acceptance_length", "draft_position", "position_accepted_percent"),
    lambda m: [
        {
            "num_accepted_tokens": int(m[4]),
            "num_drafted_tokens": int(m[5]),
            "acceptance_length": _finite(m[1], "mean acceptance length"),
            "draft_position": position,
            "position_accepted_percent": 100 * _finite(rate, "per-position acceptance rate"),
        }
        for position, rate in enumerate(m[6].split(", "), start=1)
    ],
)


def iterations(text: str, where: str = "log") -> pl.DataFrame:
    """Iterations of the engines, as ``--enable-logging-iteration-details`` writes them.

    The time runs from the start of the model's execution to its result in the engine core, on the host's clock, and is
    written to a hundredth of a millisecond. Where vLLM schedules a step before it has the result of the one before,
    only what is left to wait for counts: 0.00 where the host is the slower one, so zero is no error here. A dummy step
    is one that a data-parallel rank without work runs because the others have some.

    Args:
        text: the log; a last line without its end is still being written and left out.
        where: the log's name, for messages.

    Returns:
        One row per line: locator (line), logged_at, rank, iteration, num_prefill_requests, num_prefill_tokens,
        num_decode_requests, num_decode_tokens, step_ms, dummy_step, kv_use_percent.

    Raises:
        DataError: a line of this kind that has another form, e.g. that of another version.
    """
    return _read(_ITERATION, text, where)


def throughputs(text: str, where: str = "log") -> pl.DataFrame:
    """The averages that a server writes every ten seconds; prompt tokens are those computed, without cache hits.

    Returns:
        One row per line: locator, logged_at, rank (null for all engines together), prompt_tok_per_s, output_tok_per_s,
        num_running, num_queued, kv_use_percent, prefix_hit_percent (since the start of the server).

    Raises:
        DataError: as :func:`iterations`.
    """
    return _read(_THROUGHPUT, text, where)


def eplb_steps(text: str, where: str = "log") -> pl.DataFrame:
    """The balancedness that ``log_balancedness`` writes.

    vLLM's quantity is the sum over layers of the mean load of the ranks ÷ the sum over layers of the largest, of one
    step: not the mean over layers of mean ÷ max.

    Returns:
        One row per line: locator, logged_at, eplb_step, model, mean_rank_tokens, max_rank_tokens,
        balancedness_of_sums (null for a step without tokens), steps_to_rearrangement.

    Raises:
        DataError: as :func:`iterations`.
    """
    return _read(_EPLB, text, where)


def speculation(text: str, where: str = "log") -> pl.DataFrame:
    """What became of drafted tokens, in each logging interval.

    Returns:
        One row per line and position in the draft: locator, logged_at, num_accepted_tokens, num_drafted_tokens,
        acceptance_length (with the token that the target adds), draft_position, position_accepted_percent.

    Raises:
        DataError: as :func:`iterations`.
    """
    return _read(_SPECULATION, text, where)


def _read(form: _Form, text: str, where: str) -> pl.DataFrame:
    lines = text.split("\n")
    rows: list[dict[str, Any]] = []
    for number, raw in enumerate(lines[:-1], start=1):  # what follows the last newline is not yet a line
        if not all(mark in raw for mark in form.marks):
            continue
        line = _COLOUR.sub("", raw)
        at, match = f"{where}, line {number}", form.pattern.search(line)
        if match is None:
            raise DataError(
                f"{at}: a line about {form.what} of an unknown form: got {line[:200]!r}; "
                "known are those of vLLM 0.32.0 and 0.33.0"
            )
        logged, core = _LOGGED_AT.search(line), _CORE.search(line)
        try:
            found = form.make(match)
        except ValueError as problem:
            raise DataError(f"{at}: {problem}") from None
        for row in found:
            if core and row.get("rank", 0) is None:  # written by the engine itself, which does not number its lines
                row["rank"] = int(core[1])
            rows.append({"locator": f"line {number}", "logged_at": logged[1] if logged else None} | row)
    names = ("locator", "logged_at", *form.columns)
    return pl.DataFrame(rows, schema={name: column(name).dtype for name in names}, orient="row")


def _finite(text: str, what: str) -> float:
    value = float(text)
    if not math.isfinite(value) or value < 0:
        raise ValueError(f"{what}: got {text}, allowed: a number ≥ 0")
    return value
