"""Recorded decode steps of a user's engine beside the context sweep, and what context costs in them."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Protocol

import numpy as np
import polars as pl

from rackbook.errors import DataError
from rackbook.importers.engine_steps import read_engine_steps
from rackbook.tables import schema

if TYPE_CHECKING:
    from numpy.typing import NDArray

K = 1024
_POINTS = 400
"""Most steps per batch size that enter a slope: it takes every pair of them."""

_FEWEST_IN_QUARTER = 0.025
"""Least share of the steps in each quarter of the span of the contexts: with fewer, two clusters make the slope."""

_BLOCK, _FEWEST_BLOCKS = 50, 10
"""Consecutive steps in a block of the bootstrap, and the fewest blocks that carry an interval."""

_RESAMPLES, _SEED = 200, 1


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
    size, evenly spaced, enter it. Contexts whose middle 90 % spans fewer than 1,024 tokens carry no slope; neither do
    clustered ones: each quarter of that span must hold 2.5 % of the steps.

    Consecutive steps are no independent samples: they share requests and the state of the machine. So the interval
    comes from a moving-block bootstrap over blocks of 50 consecutive steps of the batch size, with a fixed seed: the
    slope ± Student's t, with one degree of freedom fewer than there are blocks, times the deviation of the slopes of
    200 resamples.

    Args:
        steps: table ``engine_steps``.
        params: gives the confidence.

    Returns:
        num_decode_requests, num_steps, num_stalled (above three times the median), context_low_tokens and
        context_high_tokens (5th and 95th percentile), step_ms (median), slope_us_per_1k_tokens with its interval
        slope_low_us_per_1k_tokens and slope_high_us_per_1k_tokens, missing_reason of a slope or interval that is null.

    Source:
        "The jackknife and the bootstrap for general stationary observations", Annals of Statistics 17 (1989).
    """
    if steps.is_empty():
        return pl.DataFrame()
    rows = []
    for (batch,), group in steps.sort("num_decode_requests", "step").group_by(
        "num_decode_requests", maintain_order=True
    ):
        median = group["step_ms"].median()
        low, high = np.quantile(group["mean_context_tokens"].to_numpy(), [0.05, 0.95])
        slope, bounds, reason = _slope(group, params.confidence)
        rows.append(
            {
                "num_decode_requests": batch,
                "num_steps": group.height,
                "num_stalled": group.filter(pl.col("step_ms") > 3 * median).height,
                "context_low_tokens": low,
                "context_high_tokens": high,
                "step_ms": median,
                "slope_us_per_1k_tokens": slope,
                "slope_low_us_per_1k_tokens": bounds[0],
                "slope_high_us_per_1k_tokens": bounds[1],
                "missing_reason": reason,
            }
        )
    nullable = ("slope_us_per_1k_tokens", "slope_low_us_per_1k_tokens", "slope_high_us_per_1k_tokens")
    return pl.DataFrame(rows, schema_overrides=dict.fromkeys(nullable, pl.Float64) | {"missing_reason": pl.String})


def _slope(
    group: pl.DataFrame, confidence: float
) -> tuple[float | None, tuple[float | None, float | None], str | None]:
    """Slope of one batch size in µs per 1,024 tokens, its bounds, and why one of them is missing."""
    context = group["mean_context_tokens"].to_numpy()
    low, high = np.quantile(context, [0.05, 0.95])
    if high - low < K:
        reason = f"no slope: the middle 90 % of the contexts spans {high - low:,.0f} tokens, fewer than {K:,}"
        return None, (None, None), reason
    quarters = np.histogram(context, np.linspace(low, high, 5))[0] / context.size
    if quarters.min() < _FEWEST_IN_QUARTER:
        held = ", ".join(f"{share:.1%}" for share in quarters)
        reason = (
            f"no slope: the contexts are clustered, the quarters of {low:,.0f} to {high:,.0f} tokens hold {held} "
            f"of the steps, one of them less than {_FEWEST_IN_QUARTER:.1%}"
        )
        return None, (None, None), reason
    stride = math.ceil(group.height / _POINTS)
    x, y = context[::stride] / K, group["step_ms"].to_numpy()[::stride] * 1e3
    slope, blocks = _theil_sen(x, y), group.height // _BLOCK
    if blocks < _FEWEST_BLOCKS:
        reason = f"no interval: {group.height} steps are fewer than {_FEWEST_BLOCKS} blocks of {_BLOCK}"
        return slope, (None, None), reason
    from scipy import special  # only recorded steps need it

    deviation = _block_deviation(x, y, max(1, round(_BLOCK / stride)))
    half = float(special.stdtrit(blocks - 1, 0.5 + confidence / 2)) * deviation
    return slope, (slope - half, slope + half), None


def _block_deviation(x: NDArray[np.float64], y: NDArray[np.float64], block: int) -> float:
    """Standard deviation of the slope over resamples of blocks of consecutive points."""
    random = np.random.default_rng(_SEED)
    slopes = []
    for _ in range(_RESAMPLES):
        starts = random.integers(0, x.size - block + 1, math.ceil(x.size / block))
        chosen = (starts[:, None] + np.arange(block)).ravel()[: x.size]
        slopes.append(_theil_sen(x[chosen], y[chosen]))
    return float(np.std(slopes, ddof=1))


def _theil_sen(x: NDArray[np.float64], y: NDArray[np.float64]) -> float:
    """Median of the slopes of all pairs of points with different x."""
    one, other = np.triu_indices(x.size, 1)
    run = x[other] - x[one]
    differ = run != 0
    return float(np.median((y[other] - y[one])[differ] / run[differ]))
