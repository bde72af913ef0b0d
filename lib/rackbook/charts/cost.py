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
            source; ordered along the line. One row without shares, and with a missing_reason, where there is no line:
            then the example stands alone.
        mix: the same columns, one row: the example.
        subtitle: throughput, price list and hardware.
    """
    shares = ("cache_hit_share_percent", "cache_miss_share_percent", "output_share_percent")
    for frame, where in ((line, "line"), (mix, "mix")):
        require(frame, (*shares, "usd_per_gpu_hour", "origin", "source"), f"mixes_of_one_revenue {where}")
    revenue, shown = line["usd_per_gpu_hour"][0], (*shares, "usd_per_gpu_hour")
    along = line.drop_nulls(shares).select(*shown, "origin", "source")
    example = mix.select(*shown, "origin", "source")
    x = _share_axis(theme.x, "cache_miss_share_percent", along, example)
    y = _share_axis(theme.y, "output_share_percent", along, example)
    named = pl.concat([along.head(1), along.tail(1), example])
    texts = [_share_words(row) for row in named.head(-1).to_dicts()]
    named = named.with_columns(pl.Series("label", [*texts, f"example mix, {example['usd_per_gpu_hour'][0]:,.2f} USD"]))
    dots = (
        alt.Chart(named)
        .mark_point(color=theme.BLUE, stroke=theme.BLUE, strokeWidth=2, filled=True, size=80, opacity=1)
        .encode(x=x, y=y, shape=theme.origin_shape(named["origin"]), tooltip=theme.tooltip(*shown))
    )
    # a name stands on the side where there is room for it
    right = pl.col("cache_miss_share_percent") > 0.5 * named["cache_miss_share_percent"].max()
    words = [
        alt.Chart(rows)
        .mark_text(align=align, dx=dx, dy=-10, color=theme.INK, **outline)
        .encode(x=x, y=y, text="label:N")
        for rows, align, dx in ((named.filter(~right), "left", 8), (named.filter(right), "right", 20))
        if not rows.is_empty()
        for outline in layers.OUTLINED
    ]
    curve = [] if along.is_empty() else [layers.lines(along, x, y, shown, color=theme.BLUE)]
    if along.is_empty():
        says = theme.headline(f"No line of mixes that earn {revenue:,.2f} USD per GPU-hour", subtitle)
        says.subtitle = [subtitle, line["missing_reason"][0]]
    else:
        says = theme.headline(f"Every mix on this line earns {revenue:,.2f} USD per GPU-hour", subtitle)
    return alt.layer(*curve, dots, *words).properties(name="mixes_of_one_revenue", title=says)


def revenue_by_output_share(lines: pl.DataFrame, revenue: pl.DataFrame, *, subtitle: str) -> alt.LayerChart:
    """Revenue against the share of output, one line per hit rate of the input, with the published revenue marked.

    Args:
        lines: input_hit_rate_percent, output_share_percent, usd_per_gpu_hour, origin, source.
        revenue: usd_per_gpu_hour, origin, source: one row, a horizontal line; far above all lines it is only written.
        subtitle: throughput, price list and hardware.
    """
    require(
        lines,
        ("input_hit_rate_percent", "output_share_percent", "usd_per_gpu_hour", "origin", "source"),
        "revenue_by_output_share lines",
    )
    require(revenue, ("usd_per_gpu_hour", "origin", "source"), "revenue_by_output_share revenue")
    x = theme.x("output_share_percent", scale=alt.Scale(nice=False), axis=alt.Axis(tickCount=6))
    top, inside = _top(lines["usd_per_gpu_hour"], revenue["usd_per_gpu_hour"][0])
    y = theme.y("usd_per_gpu_hour", scale=alt.Scale(domain=[0, top]))
    dash = theme.origin_dash([*lines["origin"], *(revenue["origin"] if inside else [])])
    shown = ("input_hit_rate_percent", "output_share_percent", "usd_per_gpu_hour")
    marks = [layers.lines(lines, x, y, shown, color=_hit_rate_color(), dash=dash)]
    if inside:
        marks.append(layers.rules(revenue, y, ("usd_per_gpu_hour",), color=theme.VERMILLION, width=1.5, dash=dash))
    at_end = revenue.with_columns(pl.lit(lines["output_share_percent"].max()).alias("output_share_percent"))
    words = _written(at_end, x, y, f"{revenue['usd_per_gpu_hour'][0]:,.2f}", inside, align="right", dy=-7)
    return alt.layer(
        *marks,
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
        lines: input_hit_rate_percent, gpu_hour_cost_usd, total_tok_per_s_per_gpu, origin, source; a line of nulls, as
            of tokens that earn nothing, is not drawn.
        now: gpu_hour_cost_usd, total_tok_per_s_per_gpu, origin, source: one row, the throughput at hand; far above all
            lines it is only written.
        subtitle: output share, price list and week.
    """
    names = ("gpu_hour_cost_usd", "total_tok_per_s_per_gpu", "origin", "source")
    require(lines, ("input_hit_rate_percent", *names), "break_even_throughput lines")
    require(now, names, "break_even_throughput now")
    x = theme.x("gpu_hour_cost_usd", scale=alt.Scale(domainMin=0))
    lines = lines.drop_nulls("total_tok_per_s_per_gpu").select("input_hit_rate_percent", *names)
    top, inside = _top(lines["total_tok_per_s_per_gpu"], now["total_tok_per_s_per_gpu"][0])
    y = theme.y("total_tok_per_s_per_gpu", scale=alt.Scale(domain=[0, top]), axis=alt.Axis(format=",.4~r"))
    shown = ("input_hit_rate_percent", "gpu_hour_cost_usd", "total_tok_per_s_per_gpu")
    marks = [] if lines.is_empty() else [layers.lines(lines, x, y, shown, color=_hit_rate_color())]
    if inside:
        marks.append(
            alt.Chart(now)
            .mark_point(shape="stroke", stroke=theme.VERMILLION, strokeWidth=3, size=120, opacity=1)
            .encode(x=x, y=y, tooltip=theme.tooltip("gpu_hour_cost_usd", "total_tok_per_s_per_gpu"))
        )
    words = _written(now, x, y, f"{now['total_tok_per_s_per_gpu'][0]:,.0f}", inside, align="left", dx=12)
    return alt.layer(
        *marks,
        words,
        name="break_even_throughput",
        title=theme.headline("Throughput at which a GPU-hour earns what it costs: below its line it loses", subtitle),
    )


def _top(lines: pl.Series, mark: float) -> tuple[float, bool]:
    """Upper end of an axis from 0, and whether the mark lies on it: one far above all lines would press them flat."""
    most = lines.max() or 0.0
    inside = most == 0 or mark <= 3 * most
    return 1.1 * (max(most, mark) if inside else most), inside


def _written(frame: pl.DataFrame, x: alt.X, y: alt.Y, number: str, inside: bool, **place: Any) -> alt.Chart:
    """The number of a mark, at the mark or, where the axis ends below it, over its upper end."""
    place |= {"text": number} if inside else {"text": f"{number} lies above", "dy": -7}
    return (
        alt.Chart(frame)
        .mark_text(color=theme.VERMILLION, fontSize=11, **place)
        .encode(x=x, y=y if inside else alt.value(0))
    )


def _share_axis(channel: Callable[..., Any], name: str, *frames: pl.DataFrame) -> Any:
    most = max(share for frame in frames for share in frame[name])
    return channel(name, scale=alt.Scale(domain=[0, 1.15 * most or 1.0], nice=False))


def _share_words(row: dict[str, float]) -> str:
    return f"{row['cache_miss_share_percent']:.2f} % misses, {row['output_share_percent']:.2f} % output"


def _hit_rate_color() -> alt.Color:
    return alt.Color(
        "input_hit_rate_percent:O",
        title=title("input_hit_rate_percent"),
        scale=alt.Scale(scheme="viridis"),
        sort="descending",
    )
