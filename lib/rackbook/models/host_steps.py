"""The published steps that tell of host work, as accounts."""

from __future__ import annotations

import polars as pl

from rackbook.errors import DataError
from rackbook.models.step_account import Removal, StepGrowth

KV_READS, SYNC, BURSTS, ADMISSION = 61121, 61767, 61725, 59908
"""The pull requests that stand for the four fixes in table ``cpu_overhead``."""


def before_and_after(points: pl.DataFrame, pr: int, metric: str) -> tuple[float | None, float | None]:
    """The published value of a metric before and after one fix; null where the source does not give it.

    Args:
        points: table ``cpu_overhead``.
        pr: the pull request that stands for the fix.
        metric: a value column of the table.

    Raises:
        DataError: the fix has no row before or after, or several.
    """
    before, after = (
        points.filter((pl.col("pr") == pr) & (pl.col("stage") == stage))[metric] for stage in ("before", "after")
    )
    if (before.len(), after.len()) != (1, 1):
        raise DataError(
            f"cpu_overhead: #{pr} has {before.len()} rows before and {after.len()} after, expected one each"
        )
    return before.item(), after.item()


def sync_removal(points: pl.DataFrame) -> Removal:
    """The fall of the DP sync beside the fall of the step, by the recursive-doubling all-reduce.

    Args:
        points: table ``cpu_overhead``.
    """
    return Removal(*before_and_after(points, SYNC, "dp_sync_ms"), *before_and_after(points, SYNC, "step_ms"))


def dep_growth(steps: pl.DataFrame, gpu: pl.DataFrame) -> StepGrowth:
    """The two un-optimised engine steps and how much less the wider one runs on the GPU.

    Args:
        steps: table ``engine_gap``.
        gpu: table ``engine_gap_gpu``, one row.

    Raises:
        DataError: the second table compares sizes that the first does not have.
    """
    row = gpu.row(0, named=True)
    step = dict(steps.select("ep_size", "step_ms").iter_rows())
    if missing := {row["ep_size"], row["baseline_ep_size"]} - step.keys():
        raise DataError(f"engine_gap: no step for expert-parallel size {min(missing)}, got {sorted(step)}")
    return StepGrowth(step[row["baseline_ep_size"]], step[row["ep_size"]], row["gpu_saving_ms"])
