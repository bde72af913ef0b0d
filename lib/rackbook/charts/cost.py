"""Charts of revenue: the mixes of one revenue, what a mix earns, when the peak list applies, what pays for a GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import altair as alt
import polars as pl

from rackbook.charts import layers, theme
from rackbook.tables import require, title

if TYPE_CHECKING:
    from collections.abc import Callable

_DAYS = ["Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun"]


def mixes_of_one_revenue(line: pl.DataFrame, mix: pl.DataFrame, *, subtitle: str) -> alt.LayerChart:
    """The line of token mixes that earn the same, with its two ends, and one example mix.

    Args:
        line: cache_hit_share_percent, cache_miss_share_percent, output_share_percent, usd_per_gpu_hour, origin,
            source; ordered along the line.
        mix: the same columns, one row: the example.
        subtitle: throughput, price list and hardware.
    """
    shares = ("cache_hit_share_percent", "cache_miss_share_percent", "output_share_percent")
    for frame, where in ((line, "line"), (mix, "mix")):
        require(frame, (*shares, "usd_per_gpu_hour", "origin", "source"), f"mixes_of_one_revenue {where}")
    revenue = line["usd_per_gpu_hour"][0]
    x = _share_axis(theme.x, "cache_miss_share_percent", line, mix)
    y = _share_axis(theme.y, "output_share_percent", line, mix)
    shown = (*shares, "usd_per_gpu_hour")
    curve = layers.lines(line, x, y, shown, color=theme.BLUE)
    named = pl.concat([line.head(1), line.tail(1), mix], how="diagonal").select(*shown, "origin", "source")
    ends = [_share_words(row) for row in named.head(2).to_dicts()]
    example = f"example mix, {named['usd_per_gpu_hour'][2]:,.2f} USD"
    named = named.with_columns(pl.Series("label", [*ends, example]))
    dots = (
        alt.Chart(named)
        .mark_point(color=theme.BLUE, stroke=theme.BLUE, strokeWidth=2, filled=True, size=80, opacity=1)
        .encode(x=x, y=y, shape=theme.origin_shape(named["origin"]), tooltip=theme.tooltip(*shown))
    )
    words = [
        alt.Chart(rows)
        .mark_text(align=align, dx=dx, dy=-10, color=theme.INK, **outline)
        .encode(x=x, y=y, text="label:N")
        for rows, align, dx in ((named[[0, 2]], "left", 8), (named[[1]], "right", 20))
        for outline in layers.OUTLINED
    ]
    return alt.layer(curve, dots, *words).properties(
        name="mixes_of_one_revenue",
        title=theme.headline(f"Every mix on this line earns {revenue:,.2f} USD per GPU-hour", subtitle),
    )


def revenue_by_output_share(lines: pl.DataFrame, revenue: pl.DataFrame, *, subtitle: str) -> alt.LayerChart:
    """Revenue against the share of output, one line per hit rate of the input, with the published revenue marked.

    Args:
        lines: input_hit_rate_percent, output_share_percent, usd_per_gpu_hour, origin, source.
        revenue: usd_per_gpu_hour, origin, source: one row, a horizontal line.
        subtitle: throughput, price list and hardware.
    """
    require(
        lines,
        ("input_hit_rate_percent", "output_share_percent", "usd_per_gpu_hour", "origin", "source"),
        "revenue_by_output_share lines",
    )
    require(revenue, ("usd_per_gpu_hour", "origin", "source"), "revenue_by_output_share revenue")
    x = theme.x("output_share_percent", scale=alt.Scale(nice=False), axis=alt.Axis(tickCount=6))
    y = theme.y("usd_per_gpu_hour", scale=alt.Scale(domainMin=0))
    dash = theme.origin_dash([*lines["origin"], *revenue["origin"]])
    shown = ("input_hit_rate_percent", "output_share_percent", "usd_per_gpu_hour")
    curves = layers.lines(lines, x, y, shown, color=_hit_rate_color(), dash=dash)
    rule = layers.rules(revenue, y, ("usd_per_gpu_hour",), color=theme.VERMILLION, width=1.5, dash=dash)
    words = (
        alt.Chart(revenue.with_columns(pl.lit(lines["output_share_percent"].max()).alias("output_share_percent")))
        .mark_text(align="right", dy=-7, color=theme.VERMILLION, fontSize=11)
        .encode(x=x, y=y, text=alt.Text("usd_per_gpu_hour:Q", format=",.2f"))
    )
    return alt.layer(
        curves,
        rule,
        words,
        name="revenue_by_output_share",
        title=theme.headline("Revenue of a GPU-hour against the share of output, by hit rate of the input", subtitle),
    )


def price_week(week: pl.DataFrame, *, subtitle: str) -> alt.Chart:
    """When the peak list applies: one cell per hour of a week.

    Args:
        week: weekday, hour_of_day, price_period, origin, source.
        subtitle: the rule, the clock, the week and the holidays.
    """
    require(week, ("weekday", "hour_of_day", "price_period", "origin", "source"), "price_week")
    peak = int((week["price_period"] == "peak").sum())
    return (
        alt.Chart(week)
        .mark_rect(stroke="white", strokeWidth=1)
        .encode(
            x=alt.X("hour_of_day:O", title=title("hour_of_day"), axis=alt.Axis(labelAngle=0)),
            y=alt.Y("weekday:O", title=title("weekday"), sort=_DAYS),
            color=theme.entity_color("price_period", ["off-peak", "peak"]),
            tooltip=theme.tooltip("weekday", "hour_of_day", "price_period"),
        )
        .properties(
            name="price_week",
            width=alt.Step(22),
            height=alt.Step(22),
            title=theme.headline(
                f"{peak} of the week's {week.height} hours are peak ({peak / week.height:.1%})",
                subtitle,
            ),
        )
    )


def break_even_throughput(lines: pl.DataFrame, now: pl.DataFrame, *, subtitle: str) -> alt.LayerChart:
    """Throughput that pays for a GPU-hour, against what the hour costs, one line per hit rate of the input.

    Args:
        lines: input_hit_rate_percent, gpu_hour_cost_usd, total_tok_per_s_per_gpu, origin, source.
        now: gpu_hour_cost_usd, total_tok_per_s_per_gpu, origin, source: one row, the throughput at hand.
        subtitle: output share, price list and week.
    """
    names = ("gpu_hour_cost_usd", "total_tok_per_s_per_gpu", "origin", "source")
    require(lines, ("input_hit_rate_percent", *names), "break_even_throughput lines")
    require(now, names, "break_even_throughput now")
    x = theme.x("gpu_hour_cost_usd", scale=alt.Scale(domainMin=0))
    most = max(lines["total_tok_per_s_per_gpu"].max(), now["total_tok_per_s_per_gpu"].max())
    y = theme.y("total_tok_per_s_per_gpu", scale=alt.Scale(domain=[0, 1.1 * most]), axis=alt.Axis(format=",.0f"))
    shown = ("input_hit_rate_percent", "gpu_hour_cost_usd", "total_tok_per_s_per_gpu")
    curves = layers.lines(lines, x, y, shown, color=_hit_rate_color())
    dot = (
        alt.Chart(now)
        .mark_point(shape="stroke", stroke=theme.VERMILLION, strokeWidth=3, size=120, opacity=1)
        .encode(x=x, y=y, tooltip=theme.tooltip("gpu_hour_cost_usd", "total_tok_per_s_per_gpu"))
    )
    words = layers.numbers(now, x, y, "total_tok_per_s_per_gpu", ",.0f", dx=12, color=theme.VERMILLION, font_size=11)
    return alt.layer(
        curves,
        dot,
        words,
        name="break_even_throughput",
        title=theme.headline("Throughput at which a GPU-hour earns what it costs: below its line it loses", subtitle),
    )


def _share_axis(channel: Callable[..., Any], name: str, *frames: pl.DataFrame) -> Any:
    most = max(frame[name].max() for frame in frames)
    return channel(name, scale=alt.Scale(domain=[0, 1.15 * most], nice=False))


def _share_words(row: dict[str, float]) -> str:
    return f"{row['cache_miss_share_percent']:.2f} % misses, {row['output_share_percent']:.2f} % output"


def _hit_rate_color() -> alt.Color:
    return alt.Color(
        "input_hit_rate_percent:O",
        title=title("input_hit_rate_percent"),
        scale=alt.Scale(scheme="viridis"),
        sort="descending",
    )
