"""Runs of the benchmark client over a grid of loads, each with a seed of its own, and what they say together."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import polars as pl

from rackbook.engine import bench, bench_results, metrics
from rackbook.engine.bench import Load, TraceLoad
from rackbook.engine.bench_client import run_client
from rackbook.engine.bench_results import BenchResult
from rackbook.errors import DataError, RackbookError
from rackbook.intervals import mean_interval
from rackbook.runs import Recorder
from rackbook.tables import column

BUSY_CLIENT_PERCENT = 90.0
"""Share of one core above which the client, a single Python process, may itself be what is slow."""

HIT_MARGIN_PERCENT = 1.0
"""Prefix-cache hits beyond those that a load makes itself that are not yet a doubt: the cache works in whole blocks."""

RUN_COLUMNS = (
    "concurrency", "input_tokens", "output_tokens", "repeat", "seed", "num_prompts", "num_completed", "num_failed",
    "duration_s", "output_tok_per_s", "total_tok_per_s", "ttft_p50_s", "ttft_p90_s", "tpot_ms", "tpot_p90_ms",
    "itl_ms", "e2el_s", "prefix_hit_percent", "acceptance_length", "client_cpu_percent", "missing_reason",
)  # fmt: skip
"""Columns of :func:`follow`."""


def follow(
    base_url: str,
    planned: Sequence[Sequence[str]],
    run: Recorder,
    *,
    environment: Mapping[str, str] | None = None,
    timeout_s: float = 3600.0,
    progress: Callable[[str], object] = lambda _: None,
    seen: Callable[[Mapping[str, Any]], object] = lambda _: None,
    engine_urls: Sequence[str] = (),
) -> pl.DataFrame:
    """Run the client once per command line, and read what it found.

    No two may share a seed, or prompts would be sent twice. The hits of the prefix cache, from the server's counters
    before and after each run, show whether they were.

    Args:
        base_url: of the running server.
        planned: command lines of :func:`rackbook.engine.bench.arguments`, whose results go to the run's folder.
        run: where results go and doubts are flagged.
        environment: of every client, on top of this process's; the seed of a trace's prompts comes on top of both.
        timeout_s: longest time of one run.
        progress: takes a line before each run.
        seen: takes the row of each run right after it.
        engine_urls: where the engines behind a router tell their counters; ``base_url`` if empty.

    Returns:
        One row per run, columns :data:`RUN_COLUMNS`; ``itl_ms``, ``tpot_ms`` and ``e2el_s`` are means over requests.

    Raises:
        DataError: no command line, or two with one seed.
        RackbookError: the server or the client failed; what was measured until then lies in the run's folder.
    """
    seeds = [bench.asked(command).seed for command in planned]
    if not planned or len(set(seeds)) < len(seeds):
        raise DataError(f"client runs: got the seeds {seeds}, allowed: at least one run, no two with one seed")
    variables = {**os.environ, **(environment or {})}
    urls = list(engine_urls) or [base_url]
    rows, done = [], Counter[Load | TraceLoad]()
    for number, command in enumerate(planned, start=1):
        wanted = bench.asked(command)
        load, path = wanted.load, run.raw(wanted.result.name)
        done[load] += 1
        what = f"{load.named()}, repeat {done[load]}"
        progress(f"client run {number} of {len(planned)}: {what}")
        own = variables | (bench.trace_variables(wanted.seed) if isinstance(load, TraceLoad) else {})
        run.process(command, own, role="client")
        log = run.raw(f"{path.stem}.log")
        try:
            before = [metrics.fetch(url) for url in urls]
            share = run_client(command, log, environment=own, timeout_s=timeout_s)
            content = bench_results.load(path)
            result = bench_results.read_result(content, path.name)
            path.write_text(json.dumps(bench_results.slim(content), indent=1, ensure_ascii=False) + "\n", "utf-8")
            grown = [metrics.growth(first, metrics.fetch(url)) for first, url in zip(before, urls, strict=True)]
        except RackbookError as problem:
            raise RackbookError(f"{what}: {problem}") from None
        rows.append(run_row(load, result, done[load], wanted.seed, metrics.prefix_hit_percent(*grown), share))
        for doubt in doubts(load, result, rows[-1]):
            run.flag(f"{what}: {doubt}")
        log.unlink()
        seen(rows[-1])
    return pl.DataFrame(rows, schema={name: column(name).dtype for name in RUN_COLUMNS}, orient="row")


def run_row(
    load: Load | TraceLoad,
    result: BenchResult,
    repeat: int,
    seed: int,
    hit_percent: float | None,
    client_cpu_percent: float | None,
) -> dict[str, Any]:
    """One run as a row of :func:`follow`."""

    def latency(name: str, statistic: str, unit: float = 1.0) -> float | None:
        value = result.latency_ms(name, statistic)
        return None if value is None else value / unit

    reasons = dict(result.missing)
    if hit_percent is None:
        reasons["prefix_hit_percent"] = "the server looked nothing up: prefix caching is off"
    if not result.speculation:
        reasons["acceptance_length"] = "no speculative decoding"
    return {
        "concurrency": load.concurrency,
        "input_tokens": load.input_tokens,
        "output_tokens": load.output_tokens,
        "repeat": repeat,
        "seed": seed,
        "num_prompts": result.num_prompts,
        "num_completed": result.completed,
        "num_failed": result.failed,
        "duration_s": result.duration_s,
        "output_tok_per_s": result.output_tok_per_s,
        "total_tok_per_s": result.total_tok_per_s,
        "ttft_p50_s": latency("ttft", "median", 1e3),
        "ttft_p90_s": latency("ttft", "p90", 1e3),
        "tpot_ms": latency("tpot", "mean"),
        "tpot_p90_ms": latency("tpot", "p90"),
        "itl_ms": latency("itl", "mean"),
        "e2el_s": latency("e2el", "mean", 1e3),
        "prefix_hit_percent": hit_percent,
        "acceptance_length": result.speculation.get("acceptance_length"),
        "client_cpu_percent": client_cpu_percent,
        "missing_reason": "; ".join(f"{name}: {reason}" for name, reason in sorted(reasons.items())) or None,
    }


def doubts(load: Load | TraceLoad, result: BenchResult, row: Mapping[str, Any]) -> list[str]:
    """What makes a run unfit to settle anything."""
    found = []
    if result.failed:
        why = "; ".join(f"{count}× {message}" for message, count in result.errors.items())
        found.append(f"{result.failed} of {result.num_prompts} requests failed" + (f": {why}" if why else ""))
    if isinstance(load, Load) and result.completed and result.output_tokens is not None:
        expected = result.completed * load.output_tokens
        if result.output_tokens != expected:
            found.append(f"{result.output_tokens} output tokens, asked for were {expected}")
    hits = row["prefix_hit_percent"]
    # the warm-ups and the run's first request send one prompt; more hits than theirs mean that others repeat too
    if (
        isinstance(load, Load)
        and hits is not None
        and hits > 100 * load.num_warmups / (load.num_warmups + load.num_prompts) + HIT_MARGIN_PERCENT
    ):
        found.append(f"{hits:.0f} % of the prompt tokens came from the prefix cache")
    busy = row["client_cpu_percent"]
    if busy is not None and busy > BUSY_CLIENT_PERCENT:
        found.append(f"the client used {busy:.0f} % of a core and may itself have been slow")
    return found


def summary(rows: pl.DataFrame, confidence: float = 0.95) -> pl.DataFrame:
    """Each load over its repeats: means with Student's t intervals over runs.

    A run without a completed request counts among the failed requests and has no throughput or latency to average; a
    load in which a run has none has no mean either, with the reason.

    Args:
        rows: of :func:`follow`, of one run.
        confidence: coverage of the intervals.

    Returns:
        By load: concurrency, input_tokens, output_tokens, repeats, num_failed, then for output_tok_per_s,
        total_tok_per_s, ttft_p50_s and tpot_ms the mean and its bounds (null with fewer than two repeats),
        prefix_hit_percent and acceptance_length (means), missing_reason.
    """
    found = []
    keys = ("concurrency", "input_tokens", "output_tokens")
    for key, group in rows.sort(*keys, "repeat").group_by(*keys, maintain_order=True):
        row: dict[str, Any] = dict(zip(keys, key, strict=True)) | {
            "repeats": group.height,
            "num_failed": group["num_failed"].sum(),
            "prefix_hit_percent": group["prefix_hit_percent"].mean(),
            "acceptance_length": group["acceptance_length"].mean(),
        }
        reasons = sorted({reason for reason in group["missing_reason"] if reason})
        for name in ("output_tok_per_s", "total_tok_per_s", "ttft_p50_s", "tpot_ms"):
            low, high = _bounds(name)
            if group[name].null_count() or group["num_completed"].min() == 0:
                row |= {name: None, low: None, high: None}
                reasons.append(f"{name}: not measured in every repeat")
                continue
            interval = mean_interval(group[name].to_list(), confidence)
            row |= {name: interval.estimate, low: interval.low, high: interval.high}
        if group.height < 2:
            reasons.append("bounds: one repeat has none")
        found.append(row | {"missing_reason": "; ".join(reasons) or None})
    return pl.DataFrame(found, schema={name: column(name).dtype for name in found[0]}, orient="row")


def _bounds(name: str) -> tuple[str, str]:
    """Names of the bounds; the unit stays last: "ttft_p50_low_s" and "ttft_p50_high_s" for "ttft_p50_s"."""
    stem, unit = (name.removesuffix("_tok_per_s"), "tok_per_s") if name.endswith("_tok_per_s") else name.rsplit("_", 1)
    return f"{stem}_low_{unit}", f"{stem}_high_{unit}"
