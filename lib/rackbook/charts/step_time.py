"""Charts of step time over context."""

from __future__ import annotations

import math

import altair as alt
import polars as pl

from rackbook.charts import layers, theme
from rackbook.tables import require

_TOKENS = (
    "datum.value >= 1048576 ? format(datum.value / 1048576, '.3~g') + 'M' : format(datum.value / 1024, '.3~g') + 'K'"
)


def step_time_by_context(points: pl.DataFrame, curve: pl.DataFrame, *, subtitle: str) -> alt.LayerChart:
    """Step time against context: points, the modelled line and its confidence band.

    Args:
        points: context_tokens, step_ms, hardware, model, origin, source.
        curve: the same for the line, with step_low_ms and step_high_ms.
        subtitle: hardware, model and sample.
    """
    require(
        points, ("context_tokens", "step_ms", "hardware", "model", "origin", "source"), "step_time_by_context points"
    )
    require(curve, ("context_tokens", "step_ms", "step_low_ms", "step_high_ms", "origin"), "step_time_by_context curve")
    longest = int(curve["context_tokens"].max())
    ticks = [t for t in (0, 131072, 262144, 524288, 786432, 1048576, 2097152) if t <= longest]
    x = theme.x("context_tokens", axis=alt.Axis(values=ticks, labelExpr=_TOKENS))
    y = theme.y("step_ms", scale=alt.Scale(domainMin=0))
    band = (
        alt.Chart(curve)
        .mark_area(opacity=0.15, color=theme.BLUE, clip=True)
        .encode(x=x, y="step_low_ms:Q", y2="step_high_ms:Q")
    )
    line = (
        alt.Chart(curve)
        .mark_line(color=theme.BLUE, clip=True)
        .encode(
            x=x, y=y, strokeDash=theme.origin_dash(["modelled"]), tooltip=theme.tooltip("context_tokens", "step_ms")
        )
    )
    dots = layers.points(points, x, y, ("context_tokens", "step_ms", "hardware", "model"), color=theme.BLUE)
    labels = layers.numbers(points, x, y, "step_ms", ".2f", dy=-14)
    ends = points.sort("context_tokens")["step_ms"]
    return alt.layer(
        band,
        line,
        dots,
        labels,
        name="step_time_by_context",
        title=theme.headline(f"Over the whole sweep the decode step grows by {ends[-1] - ends[0]:.2f} ms", subtitle),
    )


def measured_step_by_context(measured: pl.DataFrame, *, subtitle: str) -> alt.LayerChart:
    """Step times of one run over context, with their intervals over repeats; the context on a log scale.

    Args:
        measured: table ``context_sweep_measured``, one run.
        subtitle: hardware, model and sample.
    """
    require(
        measured,
        ("context_tokens", "step_ms", "step_low_ms", "step_high_ms", "hardware", "model", "origin", "source"),
        "measured_step_by_context",
    )
    ordered = measured.sort("context_tokens")
    contexts = ordered["context_tokens"].to_list()
    x = theme.x(
        "context_tokens",
        scale=alt.Scale(type="log", base=2, domain=[contexts[0] / 1.5, contexts[-1] * 1.5], nice=False),
        axis=alt.Axis(values=contexts, labelExpr=_TOKENS, grid=False),
    )
    y = theme.y("step_ms", scale=alt.Scale(domainMin=0))
    spread = (
        alt.Chart(ordered)
        .mark_rule(color=theme.BLUE, strokeWidth=2, opacity=0.6, clip=True)
        .encode(x=x, y="step_low_ms:Q", y2="step_high_ms:Q")
    )
    shown = ("context_tokens", "step_ms", "step_low_ms", "step_high_ms", "repeats", "num_steps", "hardware", "model")
    dots = layers.points(ordered, x, y, shown, color=theme.BLUE, size=80)
    labels = layers.numbers(ordered, x, y, "step_ms", ".1f", dx=8, dy=-10)
    first, last = ordered.row(0, named=True), ordered.row(-1, named=True)
    text = (
        f"From {_in_k(first['context_tokens'])} to {_in_k(last['context_tokens'])} tokens the measured step goes from "
        f"{first['step_ms']:.1f} to {last['step_ms']:.1f} ms"
        if len(contexts) > 1
        else f"At {_in_k(first['context_tokens'])} tokens the measured step takes {first['step_ms']:.1f} ms"
    )
    return alt.layer(
        spread, dots, labels, name="measured_step_by_context", title=theme.headline(text, subtitle), width=460
    )


def _in_k(tokens: int) -> str:
    return f"{tokens / 1024:.4g}K" if tokens >= 1024 else f"{tokens}"


def engine_steps_by_context(steps: pl.DataFrame, *, subtitle: str, bin_tokens: int = 512) -> alt.LayerChart:
    """Measured decode steps over context, one colour per batch size: median and quartiles per bin.

    A bin with fewer than ten steps is left out: a stalled step would stand for it.

    Args:
        steps: table ``engine_steps``, decode-only steps.
        subtitle: hardware, model and sample.
        bin_tokens: width of a context bin.
    """
    require(
        steps, ("mean_context_tokens", "num_decode_requests", "step_ms", "origin", "source"), "engine_steps_by_context"
    )
    context = (pl.col("mean_context_tokens") / bin_tokens).floor() * bin_tokens + bin_tokens / 2
    bins = (
        steps.with_columns(context.alias("mean_context_tokens"))
        .group_by("num_decode_requests", "mean_context_tokens", "origin", "source")
        .agg(
            pl.col("step_ms").quantile(0.25, interpolation="linear").alias("step_low_ms"),
            pl.col("step_ms").quantile(0.75, interpolation="linear").alias("step_high_ms"),
            pl.col("step_ms").median(),
            pl.len().alias("num_steps"),
        )
        .filter(pl.col("num_steps") >= 10)
        .sort("num_decode_requests", "mean_context_tokens")
    )
    deepest = float(bins["mean_context_tokens"].max() or bin_tokens)
    stride = 1024 * 2 ** max(0, math.ceil(math.log2(deepest / 1024 / 8)))
    ticks = list(range(0, int(deepest) + stride, stride))
    x = theme.x("mean_context_tokens", axis=alt.Axis(values=ticks, labelExpr=_TOKENS))
    y = theme.y("step_ms", scale=alt.Scale(domainMin=0))
    color = alt.Color(
        "num_decode_requests:O", title="Decoding requests", scale=alt.Scale(scheme="viridis"), sort="ascending"
    )
    spread = (
        alt.Chart(bins)
        .mark_rule(opacity=0.6, strokeWidth=2)
        .encode(x=x, y="step_low_ms:Q", y2="step_high_ms:Q", color=color)
    )
    medians = (
        alt.Chart(bins)
        .mark_point(filled=True, size=45, opacity=0.9)
        .encode(
            x=x,
            y=y,
            color=color,
            shape=theme.origin_shape(steps["origin"]),
            tooltip=theme.tooltip(
                "num_decode_requests", "mean_context_tokens", "step_ms", "step_low_ms", "step_high_ms"
            ),
        )
    )
    return alt.layer(
        spread,
        medians,
        name="engine_steps_by_context",
        title=theme.headline("Measured decode steps of a running engine, by batch size and context", subtitle),
    )
