"""What the servers of a measurement logged about themselves: throughput and queue, and what became of drafts."""

from __future__ import annotations

import polars as pl

from rackbook.engine import logs
from rackbook.engine.plan import Plan
from rackbook.errors import DataError
from rackbook.runs import Recorder

FULL_PERCENT = 95.0
"""Use of the KV cache from which a request that waits does so for want of room."""

_TABLES = {"throughput": logs.throughputs, "speculation": logs.speculation}


def keep(plan: Plan, run: Recorder) -> None:
    """Keep the servers' own averages beside what the clients saw, and flag a load that did not fit.

    The run gets the tables throughput and speculation: bench_stage and the columns of
    :func:`rackbook.engine.logs.throughputs` and :func:`rackbook.engine.logs.speculation`, the file in the locator. A
    table of which no server logged a line is not there, as where vLLM starts more than one API server, its default for
    several ranks; a line of an unknown form is flagged, so that no measurement is
    lost for it.

    Args:
        plan: what ran.
        run: holds the servers' logs, as :func:`rackbook.measurements.serving.follow` keeps them.
    """
    files = [
        (stage.name, path)
        for stage in plan.stages
        if stage.services
        for path in sorted(run.folder.glob(f"{stage.name}.*.log"))
    ]
    for name, read in _TABLES.items():
        frames = []
        for stage, path in files:
            try:
                found = read(path.read_text("utf-8", errors="replace"), path.name)
            except DataError as problem:
                run.flag(str(problem))
                continue
            frames.append(
                found.select(pl.lit(stage).alias("bench_stage"), pl.all()).with_columns(
                    pl.format("{}, {}", pl.lit(path.name), "locator").alias("locator")
                )
            )
        lines = pl.concat(frames) if frames else pl.DataFrame()
        if lines.is_empty():
            continue
        run.write_points(lines, name)
        if name == "throughput":
            for doubt in doubts(lines):
                run.flag(doubt)


def doubts(throughput: pl.DataFrame) -> list[str]:
    """Stages in which requests waited because the KV cache was full, so that fewer ran than the clients kept under way.

    Args:
        throughput: bench_stage, num_queued and kv_use_percent, one row per line.
    """
    waited = throughput.filter((pl.col("num_queued") > 0) & (pl.col("kv_use_percent") >= FULL_PERCENT))
    worst = waited.sort("num_queued", descending=True).unique("bench_stage", keep="first", maintain_order=True)
    return [
        f"{row['bench_stage']}: {row['num_queued']} requests waited while the KV cache was "
        f"{row['kv_use_percent']:.0f} % full, so fewer ran at once than the clients kept under way"
        for row in worst.iter_rows(named=True)
    ]
