"""Charts over the batch size: two engines' throughput ratio, and one engine's measured step."""

from __future__ import annotations

import math

import altair as alt
import polars as pl

from rackbook.charts import layers, theme
from rackbook.tables import require


def throughput_ratio_by_batch(
    envelope: pl.DataFrame, curve: pl.DataFrame, *, subtitle: str | list[str]
) -> alt.LayerChart:
    """The envelope of a throughput ratio over the batch size, with a measured curve if there is one.

    The envelope is a band, not a curve: the claim prints no point.

    Args:
        envelope: min_batch_size, max_batch_size, throughput_ratio_low, throughput_ratio_high, reading, origin, source;
            the first row is drawn.
        curve: batch_size, throughput_ratio, throughput_difference_percent, origin, source; may be empty.
        subtitle: hardware, model and sample.
    """
    band_columns = ("min_batch_size", "max_batch_size", "throughput_ratio_low", "throughput_ratio_high", "reading")
    require(envelope, (*band_columns, "origin", "source"), "throughput_ratio_by_batch envelope")
    names = ("batch_size", "throughput_ratio", "throughput_difference_percent", "origin", "source")
    require(curve, names, "throughput_ratio_by_batch curve")
    band = envelope.head(1).with_columns(
        pl.col("min_batch_size").alias("batch_size"), pl.lit(1.0).alias("throughput_ratio")
    )
    row = band.row(0, named=True)
    low, high = row["throughput_ratio_low"], row["throughput_ratio_high"]
    sizes = [row["min_batch_size"], row["max_batch_size"], *curve["batch_size"]]
    first, last = (math.floor(math.log2(min(sizes))), math.ceil(math.log2(max(sizes))))
    ratios = [low, high, *curve["throughput_ratio"]]
    x = theme.x(
        "batch_size",
        scale=alt.Scale(type="log", base=2, domain=[2**first / 1.2, 2**last * 1.2], nice=False),
        axis=alt.Axis(values=[2**n for n in range(first, last + 1)], format="d"),
    )
    margin = 0.15 * (max(ratios) - min(ratios))
    # nice bounds would take the room that the words above everything need
    scale = alt.Scale(domain=[max(0, min(ratios) - margin), max(ratios) + margin], nice=False)
    y = theme.y("throughput_ratio", scale=scale)
    area = (
        alt.Chart(band.with_columns(pl.col("throughput_ratio_low").alias("throughput_ratio")))
        .mark_rect(color=theme.BLUE, opacity=0.18)
        .encode(
            x=x,
            x2="max_batch_size:Q",
            y=y,  # in every layer, else the axis would start at 0 for the band
            y2="throughput_ratio_high:Q",
            tooltip=theme.tooltip(*band_columns),
        )
    )
    parity = alt.Chart(band).mark_rule(color=theme.INK, strokeDash=[2, 2]).encode(y=y)
    words = (
        alt.Chart(band)
        .transform_calculate(
            label="'band: ' + format(datum.throughput_ratio_low, '.2f') + ' to '"
            " + format(datum.throughput_ratio_high, '.2f') + ', ' + datum.origin + '; no point is printed'"
        )
        .mark_text(align="left", baseline="top", color=theme.BLUE)
        .encode(x=alt.value(8), y=alt.value(8), text="label:N")
    )
    layers = [area, parity, words]
    finding = f"Envelope: {_percent(low)} to {_percent(high)} at batch {sizes[0]} to {sizes[1]}"
    if curve.height:
        layers.append(_measured(curve, x, y))
        claimed = curve.filter(pl.col("batch_size").is_between(sizes[0], sizes[1]))
        if claimed.height:
            worst = claimed.sort(pl.col("throughput_difference_percent").abs(), maintain_order=True).row(-1, named=True)
            finding += f"; measured: at worst {_percent(worst['throughput_ratio'])}, at batch {worst['batch_size']}"
    return alt.layer(*layers).properties(name="throughput_ratio_by_batch", title=theme.headline(finding, subtitle))


def step_time_by_batch(steps: pl.DataFrame, *, subtitle: str) -> alt.LayerChart:
    """The measured step over the batch size, both axes logarithmic.

    Args:
        steps: batch_size, step_ms, sample_spread_percent, least_output_tok_per_s_per_gpu,
            most_output_tok_per_s_per_gpu, stable.
        subtitle: hardware, model and sample.
    """
    names = (
        "batch_size", "step_ms", "least_output_tok_per_s_per_gpu", "most_output_tok_per_s_per_gpu",
        "sample_spread_percent", "stable",
    )  # fmt: skip
    require(steps, (*names, "origin", "source"), "step_time_by_batch")
    ordered = steps.sort("batch_size")
    x = theme.x(
        "batch_size",
        scale=alt.Scale(type="log", base=2, nice=False, padding=24),
        axis=alt.Axis(values=ordered["batch_size"].to_list(), format="d"),
    )
    least, most = ordered["step_ms"].min(), ordered["step_ms"].max()
    y = theme.y("step_ms", scale=alt.Scale(type="log", domain=[least / 1.5, most * 1.5], nice=False))
    base = alt.Chart(ordered).encode(x=x, y=y)
    line = base.mark_line(color=theme.ENTITY_COLORS["vLLM"], strokeWidth=1, opacity=0.6)
    dots = base.mark_point(color=theme.ENTITY_COLORS["vLLM"], filled=True, size=80).encode(
        shape=theme.origin_shape(ordered["origin"]),
        opacity=theme.stable_opacity(),
        tooltip=theme.tooltip(*names),
    )
    numbers = layers.numbers(ordered, x, y, "step_ms", ".1f", dy=-12)
    first, last = ordered.row(0, named=True), ordered.row(-1, named=True)
    return alt.layer(
        line,
        dots,
        numbers,
        name="step_time_by_batch",
        title=theme.headline(
            f"From batch {first['batch_size']} to {last['batch_size']} the step goes from {first['step_ms']:.1f} to "
            f"{last['step_ms']:.1f} ms",
            subtitle,
        ),
    )


def _measured(curve: pl.DataFrame, x: alt.X, y: alt.Y) -> alt.LayerChart:
    line = alt.Chart(curve).mark_line(color=theme.VERMILLION, strokeWidth=1, opacity=0.6).encode(x=x, y=y)
    shown = ("batch_size", "throughput_ratio", "throughput_difference_percent")
    return line + layers.points(curve, x, y, shown, color=theme.VERMILLION, size=80)


def _percent(ratio: float) -> str:
    return f"{100 * (ratio - 1):+.2g} %".replace("-", "−")
