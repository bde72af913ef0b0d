"""How does the decode step grow with context?

Three published step times of one batch at 64K, 128K and 855K tokens of context, a line through them with the
error bar that three points allow, the source's growth claim in both of its readings, a measured sweep, and, where the
user has them, the step records of a running engine.
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
from rackbook.experiments import live
from rackbook.experiments.context_sweep_steps import read_decode_steps, step_slopes
from rackbook.models.line import Line, fit_line
from rackbook.runs import Run
from rackbook.tables import schema

CHECKS = Checks("context_sweep")
doubts = live.doubts
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
    source: str = Field(default=live.PUBLISHED, description=live.SOURCE)
    cluster: str = Field(default="gb300-nvl72", description=live.CLUSTER)
    measured_contexts: list[int] = Field(
        default=[64 * K, 128 * K, 855 * K], min_length=1, description="context lengths to measure"
    )
    measured_requests_per_rank: int = Field(default=16, ge=1, description="requests per rank to measure with")
    measured_ranks: int | None = Field(default=None, ge=1, description="ranks to measure with; the source's if none")
    measured_draft_tokens: int = Field(default=5, ge=0, description="drafts per request and step to measure with")


LAB = {
    "cluster": "cpu-lab",
    "measured_contexts": [1 * K, 16 * K, 64 * K, 128 * K],
    "measured_requests_per_rank": 4,
    "measured_draft_tokens": 0,
}
"""Parameters with which the CPU lab measures: a sweep that two cores manage in minutes."""


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
        run: the run that ``source`` names; else the recorded run of the CPU lab; None where there is neither.
        measured: table ``context_sweep_measured``: the points of that run; empty without one.
        measured_growth: table ``context_growth``: every pair of those points, origin "derived".
    """

    points: pl.DataFrame
    line: Line
    curve: pl.DataFrame
    prediction: pl.DataFrame
    growth: pl.DataFrame
    steps: pl.DataFrame
    step_slopes: pl.DataFrame
    run: Run | None
    measured: pl.DataFrame
    measured_growth: pl.DataFrame


def collect(params: Params) -> Evidence:
    """Gather the published points, the fit, the user's steps, and a run; measures one now if ``source`` says so.

    Raises:
        DataError: the user's file, or the stored run, is not what it should be.
        ParameterError: ``source`` is no word, run or folder that is allowed.
        RackbookError: the measurement cannot start, or failed.
    """
    run = live.run_of(CHECKS.topic, params.source, lambda: measure(params)) or live.recorded(CHECKS.topic)
    measured = live.points_of(run, "context_sweep_measured")
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
        run=run,
        measured=measured,
        measured_growth=growth(measured),
    )


def measure(params: Params) -> Run:
    """Measure the sweep on ``cluster`` and keep it as a run.

    Raises:
        RackbookError: the cluster cannot do it, or it failed on the way.
    """
    from rackbook.measurements import context_sweep  # what talks to vLLM is imported when it is needed

    return context_sweep.measure(params)


def measured_subtitle(evidence: Evidence) -> str:
    """Hardware, model and sample of the measured sweep, for its chart."""
    row = evidence.measured.row(0, named=True)
    ranks = f"{row['ep_size']} rank{'s' if row['ep_size'] > 1 else ''}"
    return (
        f"{row['hardware']} ({live.description(evidence.run)}), {row['model']}, {ranks}, "
        f"{row['requests_per_rank']} requests per rank; {row['repeats']} repeats, "
        f"{evidence.run.params.get('confidence', 0.95):.0%} intervals"
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
        points: table ``context_sweep`` or ``context_sweep_measured``, one setting.

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


_ALONE = Finding(None, note="one printed time; the other points of the sweep do not determine it")
_CLAIMED = {
    "hardware": "GB300", "model": "deepseek-v4.1-flash", "ep_size": 32, "requests_per_rank": 16, "draft_tokens": 5,
    "timing_scope": "target_only",
}  # fmt: skip
"""Setting of the claims, all of them about one sweep."""


def _step_check(context_k: int) -> Callable[[Evidence], Finding]:
    def check(evidence: Evidence) -> Finding:
        at = _CLAIMED | {"context_tokens": context_k * K}
        return live.finding(evidence.run, evidence.measured, "step_ms", at) or _ALONE

    return check


for _k in (64, 128, 855):
    CHECKS(f"step_{_k}k_ms")(_step_check(_k))


@CHECKS("draft_tokens")
def _draft_tokens(_: Evidence) -> Finding:
    block = catalog.model("deepseek-v4.1-flash").draft.block_tokens
    return Finding(block.known, "derived", f"block of the drafter, {block.source}")


def _growth_check(from_k: int, column: str, *, measured: bool) -> Callable[[Evidence], Finding]:
    """Growth from a context to 855K: measured where a run has both ends, else by the printed times."""

    def pair(growth: pl.DataFrame) -> pl.DataFrame:
        return growth.filter((pl.col("from_context_tokens") == from_k * K) & (pl.col("to_context_tokens") == 855 * K))

    def check(evidence: Evidence) -> Finding:
        row = pair(evidence.growth).row(0, named=True)
        printed = Finding(row[column], "derived", row["formula"])
        if column == "context_ratio":
            low, high = row["from_context_tokens"] / K, row["to_context_tokens"] / K
            return Finding(row[column], "derived", f"{high:g}K ÷ {low:g}K tokens of context")
        if not measured:
            return printed
        ends = [
            live.finding(evidence.run, evidence.measured, "step_ms", _CLAIMED | {"context_tokens": k * K})
            for k in (from_k, 855)
        ]
        if any(end is None or end.found is None for end in ends):
            return printed
        row = pair(evidence.measured_growth).row(0, named=True)
        return Finding(row[column], "measured", f"{row['formula']}, run {evidence.run.id}")

    return check


for _suffix, _from_k in (("", 128), ("_over_sweep", 64)):
    for _name, _derived, _column in (
        ("context_growth{}", "context_growth{}_derived", "context_ratio"),
        ("latency_growth{}_ms", "latency_growth{}_derived_ms", "step_increase_ms"),
        ("latency_growth{}_percent", "latency_growth{}_derived_percent", "step_increase_percent"),
    ):
        CHECKS(_name.format(_suffix))(_growth_check(_from_k, _column, measured=_column != "context_ratio"))
        CHECKS(_derived.format(_suffix))(_growth_check(_from_k, _column, measured=False))
