"""How does the decode step grow with context?

Three published step times of one batch at 64K, 128K and 855K tokens of context, a line through them with the
error bar that three points allow, the source's growth claim in both of its readings, and, where the user has
them, the step records of a running engine.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import combinations

import numpy as np
import polars as pl
from numpy.typing import ArrayLike
from pydantic import BaseModel, ConfigDict, Field

from rackbook import catalog, published
from rackbook.claims import Checks, Finding
from rackbook.errors import DataError
from rackbook.importers.engine_steps import read_engine_steps
from rackbook.models.line import Line, fit_line
from rackbook.tables import schema

CHECKS = Checks("context_sweep")
K = 1024


class Params(BaseModel):
    """Parameters of notebook 01."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    predict_at_tokens: int = Field(default=1_048_576, gt=0, description="context length to predict the step for")
    confidence: float = Field(default=0.95, gt=0, lt=1, description="coverage of the intervals")
    steps_path: str = Field(default="", description="fpm_metrics_phase.csv of an engine, or its folder; empty for none")
    steps_hardware: str = Field(default="not recorded", description="what those steps ran on")
    steps_model: str = Field(default="not recorded", description="the model of those steps")
    min_steps: int = Field(default=100, ge=3, description="fewest steps of one batch size that are shown")


@dataclass(frozen=True)
class Evidence:
    """What the notebook shows.

    Attributes:
        points: table ``context_sweep``, published rows.
        line: least-squares line through the points; x in tokens, y in ms.
        curve: table ``context_sweep`` plus step_low_ms and step_high_ms: the line, origin "modelled".
        prediction: one row like ``curve``, at ``predict_at_tokens``.
        growth: table ``context_growth``: every pair of published points, origin "derived".
        steps: table ``engine_steps``: decode-only steps of the user's engine; empty without ``steps_path``.
        step_slopes: slope of the user's step time over context, per batch size; empty without ``steps_path``.
    """

    points: pl.DataFrame
    line: Line
    curve: pl.DataFrame
    prediction: pl.DataFrame
    growth: pl.DataFrame
    steps: pl.DataFrame
    step_slopes: pl.DataFrame


def collect(params: Params) -> Evidence:
    """Gather the published points, the fit and the user's steps.

    Raises:
        DataError: the user's file is not what it should be.
    """
    points = published.read("context_sweep").sort("context_tokens")
    line = fit_line(points["context_tokens"], points["step_ms"])
    grid = np.linspace(
        points["context_tokens"].min(), max(points["context_tokens"].max(), params.predict_at_tokens), 60
    )
    steps = read_decode_steps(params)
    return Evidence(
        points=points,
        line=line,
        curve=_modelled(points, line, grid, params.confidence),
        prediction=_modelled(points, line, [params.predict_at_tokens], params.confidence),
        growth=growth(points),
        steps=steps,
        step_slopes=step_slopes(steps, params),
    )


def fit_summary(evidence: Evidence, params: Params) -> pl.DataFrame:
    """What the line says, with intervals where it has any.

    The byte bound is slope · HBM bandwidth ÷ requests per rank: what one step could read per token of one request's
    context if reading it at full bandwidth were the only cost of context.

    Returns:
        quantity, value, low, high, unit, origin; low and high are null where there is no interval.
    """
    line, setting = evidence.line, evidence.points.row(0, named=True)
    slope_low, slope_high = line.slope_interval(params.confidence)
    to_bytes = hbm_bytes_per_ms(setting["hardware"]) / setting["requests_per_rank"]
    predicted = evidence.prediction.row(0, named=True)
    steps, contexts = evidence.points["step_ms"], evidence.points["context_tokens"]
    per_doubling = (steps.diff() / contexts.cast(pl.Float64).log(2).diff()).drop_nulls()
    rows = [
        (
            "step at no context (intercept)",
            line.intercept,
            *(float(b[0]) for b in line.band([0], params.confidence)),
            "ms",
        ),
        ("slope", line.slope * K * 1e3, slope_low * K * 1e3, slope_high * K * 1e3, "µs per 1,024 tokens"),
        ("largest distance of a point from the line", float(np.abs(line.residuals).max()), None, None, "ms"),
        (
            f"step at {params.predict_at_tokens:,} tokens",
            predicted["step_ms"],
            predicted["step_low_ms"],
            predicted["step_high_ms"],
            "ms",
        ),
        (
            "bytes read per context token, upper bound",
            *(s * to_bytes for s in (line.slope, slope_low, slope_high)),
            "B",
        ),
        ("increase per doubling, first pair of points", per_doubling[0], None, None, "ms"),
        ("increase per doubling, last pair of points", per_doubling[-1], None, None, "ms"),
    ]
    return pl.DataFrame(rows, schema=["quantity", "value", "low", "high", "unit"], orient="row").with_columns(
        pl.lit("modelled").alias("origin")
    )


def hbm_bytes_per_ms(hardware: str) -> float:
    """HBM bandwidth of one GPU in bytes per millisecond, from the hardware catalog."""
    return catalog.hardware(hardware.lower()).hbm_tb_per_s.known * 1e12 / 1e3


def _modelled(points: pl.DataFrame, line: Line, at: ArrayLike, confidence: float) -> pl.DataFrame:
    low, high = line.band(at, confidence)
    setting = points.select("hardware", "model", "ep_size", "requests_per_rank", "source").row(0, named=True)
    return pl.DataFrame(
        {
            "context_tokens": np.asarray(at).round().astype(np.int64),
            "step_ms": line.at(at),
            "step_low_ms": low,
            "step_high_ms": high,
        }
    ).with_columns(
        *(pl.lit(value).alias(name) for name, value in setting.items()),
        pl.lit("modelled").alias("origin"),
        pl.lit(f"{line.intercept:.4f} ms + {line.slope:.4g} ms/token").alias("formula"),
    )


def growth(points: pl.DataFrame) -> pl.DataFrame:
    """Growth of the step between every two context lengths.

    Args:
        points: table ``context_sweep``, one setting.

    Returns:
        Table ``context_growth``, origin "derived".
    """
    rows = points.sort("context_tokens").to_dicts()
    return schema("context_growth").frame(
        [
            {
                "hardware": low["hardware"],
                "model": low["model"],
                "from_context_tokens": low["context_tokens"],
                "to_context_tokens": high["context_tokens"],
                "context_ratio": high["context_tokens"] / low["context_tokens"],
                "step_increase_ms": high["step_ms"] - low["step_ms"],
                "step_increase_percent": 100 * (high["step_ms"] / low["step_ms"] - 1),
                "origin": "derived",
                "source": low["source"],
                "formula": f"{high['step_ms']:g} ms against {low['step_ms']:g} ms",
            }
            for low, high in combinations(rows, 2)
        ]
    )


def read_decode_steps(params: Params) -> pl.DataFrame:
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


def step_slopes(steps: pl.DataFrame, params: Params) -> pl.DataFrame:
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


_ALONE = Finding(None, note="one printed time; the other points of the sweep do not determine it")


@CHECKS("step_64k_ms", "step_128k_ms", "step_855k_ms")
def _step(_: Evidence) -> Finding:
    return _ALONE


@CHECKS("draft_tokens")
def _draft_tokens(_: Evidence) -> Finding:
    block = catalog.model("deepseek-v4.1-flash").draft.block_tokens
    return Finding(block.known, "derived", f"block of the drafter, {block.source}")


def _growth_check(from_k: int, column: str) -> Callable[[Evidence], Finding]:
    def check(evidence: Evidence) -> Finding:
        pair = evidence.growth.filter(
            (pl.col("from_context_tokens") == from_k * K) & (pl.col("to_context_tokens") == 855 * K)
        ).row(0, named=True)
        return Finding(pair[column], "derived", pair["formula"])

    return check


for _suffix, _from_k in (("", 128), ("_over_sweep", 64)):
    for _name, _derived, _column in (
        ("context_growth{}", "context_growth{}_derived", "context_ratio"),
        ("latency_growth{}_ms", "latency_growth{}_derived_ms", "step_increase_ms"),
        ("latency_growth{}_percent", "latency_growth{}_derived_percent", "step_increase_percent"),
    ):
        CHECKS(_name.format(_suffix), _derived.format(_suffix))(_growth_check(_from_k, _column))
