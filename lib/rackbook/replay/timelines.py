"""What each rank does over time in simulated replays: computing, waiting for the slowest, or without a request."""

from __future__ import annotations

from typing import TYPE_CHECKING

import polars as pl

from rackbook.errors import DataError
from rackbook.replay import imbalance

if TYPE_CHECKING:
    from rackbook.replay.lockstep import Run


def until(runs: dict[str, Run], until_s: float, *, max_steps: int, source: str) -> pl.DataFrame:
    """What each rank does in the steps that start before a time.

    Args:
        runs: a run per schedule.
        until_s: the time, in s from the start.
        max_steps: of these, at most.
        source: of the runs.

    Returns:
        schedule, rank, step, activity, from_s, to_s, num_prefill_tokens, mean_depth_tokens, origin "simulated", source.
    """
    return pl.concat(
        [
            timeline(run, schedule, slice(0, min(int((run.start_ns < 1e9 * until_s).sum()), max_steps)), source)
            for schedule, run in runs.items()
        ]
    )


def close_up(runs: dict[str, Run], *, num_steps: int, source: str) -> pl.DataFrame:
    """What each rank does in a few steps in the middle of the common window; see :func:`until`.

    Returns:
        As :func:`until`; empty if the ranks of a run never work together.
    """
    parts = []
    for schedule, run in runs.items():
        try:
            window = imbalance.common_window(run.tokens)
        except DataError:
            return timeline(run, schedule, slice(0, 0), source)
        begin = (window.start + window.stop) // 2
        parts.append(timeline(run, schedule, slice(begin, min(begin + num_steps, window.stop)), source))
    return pl.concat(parts)


def waiting_percent(spans: pl.DataFrame) -> float:
    """Share of the ranks' time in a lag replay that is waiting for the slowest, in %.

    Args:
        spans: activities as in :func:`until`.
    """
    lagged = spans.filter((pl.col("schedule") == "lag") & (pl.col("activity") != "no request"))
    spent = lagged.select("activity", (pl.col("to_s") - pl.col("from_s")).alias("s"))
    return 100 * spent.filter(pl.col("activity") == "waiting")["s"].sum() / spent["s"].sum()


def timeline(run: Run, schedule: str, steps: slice, source: str) -> pl.DataFrame:
    """Each rank's part of each step: computing, then waiting for the slowest; or no request.

    Returns:
        See :func:`until`; at most two rows per rank and step.
    """
    own, rows = run.own_ns, []
    for step in range(steps.start, steps.stop):
        start, end = int(run.start_ns[step]), int(run.end_ns[step])
        for rank in range(run.tokens.shape[1]):
            tokens, attended = int(run.tokens[step, rank]), int(run.attended_tokens[step, rank])
            done = min(start + round(own[step, rank]), end)
            spans = [("computing", start, done), ("waiting", done, end)] if tokens else [("no request", start, end)]
            rows += [
                {
                    "schedule": schedule,
                    "rank": rank,
                    "step": step,
                    "activity": activity,
                    "from_s": from_ns * 1e-9,
                    "to_s": to_ns * 1e-9,
                    "num_prefill_tokens": tokens,
                    "mean_depth_tokens": attended / tokens if tokens else None,
                }
                for activity, from_ns, to_ns in spans
                if to_ns > from_ns
            ]
    spans = pl.DataFrame(rows, infer_schema_length=None, schema_overrides={"mean_depth_tokens": pl.Float64})
    return spans.with_columns(pl.lit("simulated").alias("origin"), pl.lit(source).alias("source"))
