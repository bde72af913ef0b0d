"""Result files of ``vllm bench serve``: read, checked, and with a reason for whatever they do not say."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rackbook.errors import DataError, one_of
from rackbook.locations import shown

LATENCIES = ("ttft", "tpot", "itl", "e2el")
"""Latencies by the names in the file: time to first token, per output token, between tokens, of the whole request."""

LISTS = (
    "input_lens", "output_lens", "start_times", "ttfts", "itls", "latencies", "queue_times", "generated_texts",
    "errors",
)  # fmt: skip
"""Keys that hold one value per request, failed ones included."""

_SPECULATION = ("acceptance_length", "acceptance_rate", "num_drafts", "draft_tokens", "accepted_tokens")


@dataclass(frozen=True)
class BenchResult:
    """One run of the benchmark client.

    Attributes:
        where: file and place in it.
        model: as the client was told.
        concurrency: largest number of requests under way at once; None without a limit.
        request_rate: requests per second; None for all at once.
        num_prompts: requests that were to be sent.
        completed: requests that succeeded.
        failed: requests that did not.
        duration_s: length of the run.
        input_tokens: of all completed requests.
        output_tokens: of all completed requests.
        output_tok_per_s: output tokens ÷ duration.
        total_tok_per_s: input and output tokens ÷ duration.
        latencies_ms: by name as in :data:`LATENCIES`, then by statistic ("mean", "median", "std", "p90" …); None where
            the file says null.
        speculation: acceptance_length, acceptance_rate (%), num_drafts, draft_tokens, accepted_tokens; empty without.
        errors: number of failed requests by the last line of their message, which in a traceback names the error; empty
            where the file keeps none.
        labels: keys that the user added with ``--metadata``, and others that this reader does not know.
        missing: why a value is None, by attribute, latency ("ttft") or statistic of one ("p90_ttft").
    """

    where: str
    model: str
    concurrency: int | None
    request_rate: float | None
    num_prompts: int
    completed: int | None
    failed: int | None
    duration_s: float | None
    input_tokens: int | None
    output_tokens: int | None
    output_tok_per_s: float | None
    total_tok_per_s: float | None
    latencies_ms: Mapping[str, Mapping[str, float | None]]
    speculation: Mapping[str, float]
    errors: Mapping[str, int]
    labels: Mapping[str, Any]
    missing: Mapping[str, str]

    def latency_ms(self, name: str, statistic: str) -> float | None:
        """One latency; None where ``missing`` says why.

        Raises:
            DataError: a statistic that the file does not have; lists those it has.
        """
        if name not in LATENCIES:
            raise DataError(one_of(name, LATENCIES, "latency"))
        if name in self.missing:
            return None
        if statistic not in self.latencies_ms[name]:
            what = f"statistic of {name} in {self.where}"
            raise DataError(f"{one_of(statistic, self.latencies_ms[name], what)} Set --metric-percentiles for others")
        return self.latencies_ms[name][statistic]


def read_results(path: Path) -> list[BenchResult]:
    """Read a result file; ``--append-result`` writes several results into one.

    Raises:
        DataError: no such file, truncated, another tool's or benchmark's file, or a value that cannot be.
    """
    found = [read_result(content, where) for where, content in _objects(path)]
    if not found:
        raise DataError(f"{shown(path)}: the file is empty")
    return found


def read_result(content: Mapping[str, Any], where: str) -> BenchResult:
    """Check one result.

    Args:
        content: the parsed object.
        where: what to call it in messages.

    Raises:
        DataError: not a result of ``bench serve``, or a value that cannot be: NaN, infinite, negative, a latency of 0,
            more completed requests than were sent.
    """
    reader = _Reader(content, where)
    num_prompts = reader.count("num_prompts", needed=True)
    completed = reader.count("completed")
    failed = reader.count("failed")
    if failed is None and completed is not None:
        failed = num_prompts - completed  # results before the key existed
        reader.missing.pop("failed")
    if completed is not None and completed + failed != num_prompts:
        raise DataError(
            f"{where}: {completed} completed and {failed} failed requests, but {num_prompts} prompts; "
            "is the result edited, or from a run that was stopped?"
        )
    duration = reader.number("duration", positive=True, name="duration_s")
    input_tokens = reader.count("total_input_tokens", name="input_tokens")
    output_tokens = reader.count("total_output_tokens", name="output_tokens")
    latencies = {}
    for name in LATENCIES:
        reason = _no_latency(name, content, completed, output_tokens)
        if reason:
            reader.missing[name] = reason
        else:
            latencies[name] = reader.statistics(name)
    errors = content.get("errors")
    return BenchResult(
        where=where,
        model=str(content.get("model_id", "")),
        concurrency=None if content.get("max_concurrency") is None else reader.count("max_concurrency"),
        request_rate=reader.rate(),
        num_prompts=num_prompts,
        completed=completed,
        failed=failed,
        duration_s=duration,
        input_tokens=input_tokens,
        output_tokens=output_tokens,
        output_tok_per_s=reader.number("output_throughput", name="output_tok_per_s"),
        total_tok_per_s=reader.number("total_token_throughput", name="total_tok_per_s"),
        latencies_ms=latencies,
        speculation=reader.speculation(),
        errors=_error_counts(errors) if isinstance(errors, list) else {},
        labels={key: value for key, value in content.items() if not _known(key)},
        missing=reader.missing,
    )


def slim(content: Mapping[str, Any]) -> dict[str, Any]:
    """A result without its values per request, the errors counted: small enough to keep with a run."""
    errors = content.get("errors")
    counted = {"error_counts": _error_counts(errors)} if isinstance(errors, list) else {}
    return {key: value for key, value in content.items() if key not in LISTS} | counted


def load(path: Path) -> dict[str, Any]:
    """The only result of a file, unchecked.

    Raises:
        DataError: as :func:`read_results`, or several results.
    """
    found = _objects(path)
    if len(found) != 1:
        raise DataError(f"{shown(path)}: got {len(found)} results, expected one")
    return found[0][1]


def _objects(path: Path) -> list[tuple[str, dict[str, Any]]]:
    name = shown(path)
    try:
        text = path.read_text("utf-8")
    except FileNotFoundError:
        raise DataError(f"{name}: no such file; the benchmark client writes it at its end") from None
    except (OSError, UnicodeDecodeError) as problem:
        raise DataError(f"{name}: not a readable text: {problem}") from None
    decoder, position, found = json.JSONDecoder(), 0, []
    while (position := _next(text, position)) < len(text):
        try:
            content, position = decoder.raw_decode(text, position)
        except ValueError as problem:
            raise DataError(f"{name}: result {len(found) + 1} is not whole JSON ({problem}); truncated?") from None
        where = name if not found else f"{name}, result {len(found) + 1}"
        if isinstance(content, list):
            raise DataError(f"{where}: holds a list; the summary of a sweep repeats its run files: read those instead")
        if not isinstance(content, dict):
            raise DataError(f"{where}: got {type(content).__name__}, expected a result of `vllm bench serve`")
        found.append((where, content))
    return found


def _next(text: str, position: int) -> int:
    while position < len(text) and text[position].isspace():
        position += 1
    return position


class _Reader:
    """Reads the values of one result and notes why one is missing."""

    def __init__(self, content: Mapping[str, Any], where: str) -> None:
        self.content, self.where = content, where
        self.missing: dict[str, str] = {}
        latencies = [f"mean_{name}_ms" for name in LATENCIES]
        if "num_prompts" not in content or not any(key in content for key in latencies):
            hint = "a result of `vllm bench latency` or `throughput`" if _other(content) else "another tool's file"
            raise DataError(
                f"{where}: not a result of `vllm bench serve`: it needs num_prompts and one of {', '.join(latencies)}; "
                f"this looks like {hint}, with the keys {', '.join(sorted(content)[:8]) or '(none)'}"
            )

    def number(self, key: str, *, positive: bool = False, name: str = "") -> float | None:
        value = self.content.get(key)
        if value is None:
            self.missing[name or key] = f"the file {'says null for' if key in self.content else 'has no'} {key}"
            return None
        numeric = isinstance(value, int | float) and not isinstance(value, bool)
        if not (numeric and math.isfinite(value) and (value > 0 if positive else value >= 0)):
            raise DataError(f"{self.where}, {key}: got {value!r}, allowed: a number {'>' if positive else '≥'} 0")
        return float(value)

    def count(self, key: str, *, needed: bool = False, name: str = "") -> int | None:
        value = self.number(key, name=name)
        if value is None:
            if needed:
                raise DataError(f"{self.where}, {key}: got nothing, expected a count")
            return None
        if value != int(value):
            raise DataError(f"{self.where}, {key}: got {value!r}, allowed: a whole number")
        return int(value)

    def rate(self) -> float | None:
        value = self.content.get("request_rate", "inf")
        if value == "inf" or value == math.inf:
            return None
        return self.number("request_rate", positive=True)

    def statistics(self, name: str) -> dict[str, float | None]:
        suffix = f"_{name}_ms"
        found = [key.removesuffix(suffix) for key in self.content if key.endswith(suffix)]
        return {each: self.number(f"{each}{suffix}", positive=each != "std", name=f"{each}_{name}") for each in found}

    def speculation(self) -> dict[str, float]:
        found = {name: self.number(f"spec_decode_{name}") for name in _SPECULATION}
        for name in _SPECULATION:
            self.missing.pop(f"spec_decode_{name}", None)
        return {name: value for name, value in found.items() if value is not None}


def _no_latency(name: str, content: Mapping[str, Any], completed: int | None, output_tokens: int | None) -> str:
    """Why a latency is not there; empty if it is."""
    if f"mean_{name}_ms" not in content:
        return f"the file has no {name}; ask for it with --percentile-metrics"
    if completed == 0:
        return "no request completed; the file says 0"
    if name in ("tpot", "itl") and completed is not None and output_tokens is not None and output_tokens <= completed:
        return "answers of one token have no time per further token; the file says 0"
    return ""


def _error_counts(errors: list[Any]) -> dict[str, int]:
    last_lines = [str(e).strip().splitlines()[-1][:200] for e in errors if e and str(e).strip()]
    return dict(Counter(last_lines).most_common())


def _other(content: Mapping[str, Any]) -> bool:
    return "avg_latency" in content or "requests_per_second" in content


_KNOWN = {
    "date", "endpoint_type", "backend", "label", "model_id", "tokenizer_id", "best_of", "num_prompts", "request_rate",
    "burstiness", "max_concurrency", "duration", "completed", "failed", "total_input_tokens", "total_output_tokens",
    "request_throughput", "request_goodput", "request_goodput:", "output_throughput", "total_token_throughput",
    "max_output_tokens_per_s", "max_concurrent_requests", "rtfx", "error_counts", *LISTS,
}  # fmt: skip
_KNOWN_PARTS = ("spec_decode_", "probe_", "diffusion_", "ramp_up_", "rps_change_")


def _known(key: str) -> bool:
    measured = key.endswith("_ms") and any(f"_{name}_ms" in key for name in (*LATENCIES, "client_queue_time"))
    return key in _KNOWN or key.startswith(_KNOWN_PARTS) or measured or key.endswith("_including_client_queue_ms")
