"""Recorded decode steps of a user's engine beside the context sweep, and what context costs in them."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import polars as pl

from rackbook.errors import DataError
from rackbook.importers.engine_steps import read_engine_steps
from rackbook.tables import schema

K = 1024


class Wanted(Protocol):
    """The parameters of notebook 01 that concern recorded steps."""

    steps_path: str
    steps_hardware: str
    steps_model: str
    min_steps: int
    confidence: float


def read_decode_steps(params: Wanted) -> pl.DataFrame:
    """The user's decode-only steps, of batch sizes that occur often enough; empty without a path.

    Raises:
        DataError: the file cannot be read, or no batch size has ``min_steps`` steps.
    """
    if not params.steps_path:
        return schema("engine_steps").frame([])
    steps = read_engine_steps(params.steps_path, hardware=params.steps_hardware, model=params.steps_model)
    decode = steps.filter((pl.col("num_prefill_tokens") == 0) & (pl.col("num_decode_requests") > 0))
    often = decode.filter(pl.len().over("num_decode_requests") >= params.min_steps)
    if often.is_empty():
        raise DataError(
            f"{params.steps_path}: no batch size has {params.min_steps} decode-only steps "
            f"(got {decode.height} decode-only steps in all); lower min_steps"
        )
    return often


def step_slopes(steps: pl.DataFrame, params: Wanted) -> pl.DataFrame:
    """Slope of the step time over context for each batch size, by Theil and Sen's median of pairwise slopes.

    The estimator ignores the few steps that stall on compilation or on another process. At most 400 steps per batch
    size, evenly spaced, enter it.

    Args:
        steps: table ``engine_steps``.
        params: gives the confidence.

    Returns:
        num_decode_requests, num_steps, num_stalled (above three times the median), context_low_tokens,
        context_high_tokens, step_ms (median), slope_us_per_1k_tokens with its interval slope_low_us_per_1k_tokens
        and slope_high_us_per_1k_tokens.
    """
    if steps.is_empty():
        return pl.DataFrame()
    from scipy import stats  # costs as much to import as all else here, and only recorded steps need it

    rows = []
    for (batch,), group in steps.sort("num_decode_requests", "step").group_by(
        "num_decode_requests", maintain_order=True
    ):
        chosen = group.gather_every(max(1, group.height // 400))
        median = group["step_ms"].median()
        context, step = chosen["mean_context_tokens"].to_numpy(), chosen["step_ms"].to_numpy()
        if np.ptp(context) == 0:
            continue
        fit = stats.theilslopes(step, context, params.confidence)
        rows.append(
            {
                "num_decode_requests": batch,
                "num_steps": group.height,
                "num_stalled": group.filter(pl.col("step_ms") > 3 * median).height,
                "context_low_tokens": context.min(),
                "context_high_tokens": context.max(),
                "step_ms": median,
                "slope_us_per_1k_tokens": fit.slope * K * 1e3,
                "slope_low_us_per_1k_tokens": fit.low_slope * K * 1e3,
                "slope_high_us_per_1k_tokens": fit.high_slope * K * 1e3,
            }
        )
    return pl.DataFrame(rows)
