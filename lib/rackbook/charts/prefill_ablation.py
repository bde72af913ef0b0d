"""Charts of the prefill fixes and of how their gains combine."""

from __future__ import annotations

import altair as alt
import polars as pl

from rackbook.charts import layers, theme
from rackbook.tables import require, title

_K_LABEL = "format(datum.value / 1024, '~g') + 'K'"
_COMPOSITIONS = ["multiplied", "added"]


def gain_by_new_tokens(
    points: pl.DataFrame, totals: pl.DataFrame, total_points: pl.DataFrame, *, subtitle: str
) -> alt.HConcatChart:
    """The printed gains over the number of new tokens; beside them, those whose size is not printed.

    Nothing is drawn between the points: no gain is known there.

    Args:
        points: fix, pr, new_tokens (null where no size is printed), gain_percent.
        totals: fix, min_new_tokens, max_new_tokens, min_gain_percent, max_gain_percent: the printed range of all.
        total_points: fix, new_tokens, gain_percent of all fixes.
        subtitle: hardware, model and sample.
    """
    columns = ("fix", "new_tokens", "gain_percent", "origin", "source")
    require(points, (*columns, "pr"), "gain_by_new_tokens points")
    require(total_points, columns, "gain_by_new_tokens total_points")
    require(
        totals,
        ("fix", "min_new_tokens", "max_new_tokens", "min_gain_percent", "max_gain_percent", "origin", "source"),
        "gain_by_new_tokens totals",
    )
    fixes = [*points["fix"].unique(maintain_order=True), *totals["fix"]]
    color = theme.entity_color("fix", fixes)
    shape = theme.origin_shape([*points["origin"], *total_points["origin"]])
    highest = max(points["gain_percent"].max(), totals["max_gain_percent"].max(), total_points["gain_percent"].max())
    scale = alt.Scale(domain=[0, float(highest) + 4], nice=False)
    placed = pl.concat([points.select(columns), total_points.select(columns)]).drop_nulls("new_tokens")
    band = (
        alt.Chart(totals)
        .mark_rect(opacity=0.25, color=theme.ENTITY_COLORS[totals["fix"].item()])
        .encode(
            x=alt.X("min_new_tokens:Q"),
            x2="max_new_tokens:Q",
            y=alt.Y("min_gain_percent:Q"),
            y2="max_gain_percent:Q",
            tooltip=theme.tooltip("fix", "min_new_tokens", "max_new_tokens", "min_gain_percent", "max_gain_percent"),
        )
    )

    def marked(frame: pl.DataFrame, x: alt.X, y: alt.Y) -> alt.LayerChart:
        dots = layers.points(frame, x, y, ("fix", "new_tokens", "gain_percent"), color=color, shape=shape)
        return dots + layers.numbers(frame, x, y, "gain_percent", ".1f", dy=-12)

    y = theme.y("gain_percent", scale=scale)
    sized = alt.layer(band, marked(placed, _new_tokens_axis(placed), y), width=400)
    unsized = marked(
        points.select(columns).filter(pl.col("new_tokens").is_null()),
        alt.X("fix:N", title="number of new tokens not printed", sort=fixes, axis=alt.Axis(labels=False, ticks=False)),
        alt.Y("gain_percent:Q", title=None, scale=scale),
    ).properties(width=130)
    by_size = placed.filter(pl.col("fix") == points["fix"][0]).sort("new_tokens")["gain_percent"]
    return (
        alt.hconcat(sized, unsized, spacing=10)
        .resolve_scale(y="shared")
        .properties(
            name="gain_by_new_tokens",
            title=theme.headline(
                f"The one fix with printed sizes gains {by_size[0]:g} to {by_size[-1]:g} %, all three "
                f"{totals['min_gain_percent'][0]:g} to {totals['max_gain_percent'][0]:g} %",
                subtitle,
            ),
        )
    )


def gain_by_switch(gains: pl.DataFrame, *, subtitle: str) -> alt.LayerChart:
    """What each switch gained over the number of new tokens, in a run.

    Args:
        gains: fix, new_tokens, gain_percent, switched_on_ms, switched_off_ms, stable.
        subtitle: hardware, model and sample.
    """
    names = ("fix", "new_tokens", "gain_percent", "switched_on_ms", "switched_off_ms", "stable")
    require(gains, (*names, "origin", "source"), "gain_by_switch")
    fixes = gains["fix"].unique(maintain_order=True).to_list()
    x, y, color = _new_tokens_axis(gains), theme.y("gain_percent"), theme.entity_color("fix", fixes)
    base = alt.Chart(gains).encode(x=x, y=y, color=color)
    dots = base.mark_point(filled=True, size=90).encode(
        shape=theme.origin_shape(gains["origin"]),
        opacity=theme.stable_opacity(),
        tooltip=theme.tooltip(*names),
    )
    numbers = layers.numbers(gains, x, y, "gain_percent", "+.1f", dy=-12, color=color)
    largest = gains.sort("gain_percent", maintain_order=True).row(-1, named=True)
    return alt.layer(
        base.mark_line(strokeWidth=1, opacity=0.6),
        dots,
        numbers,
        name="gain_by_switch",
        title=theme.headline(
            f"Largest gain of a switch: {largest['gain_percent']:+.1f} %, {largest['fix']}, "
            f"at {largest['new_tokens']:,} new tokens",
            subtitle,
        ),
    )


def fixes_one_after_the_other(ladder: pl.DataFrame, total: pl.DataFrame, *, subtitle: str) -> alt.LayerChart:
    """The gain as one fix is added to the other, multiplied, against that of all together.

    Args:
        ladder: fix, gain_percent, multiplied_gain_percent, added_gain_percent, in the order of switching on.
        total: min_total_gain_percent, max_total_gain_percent at the size, one row.
        subtitle: hardware, model and sample.
    """
    require(
        ladder,
        ("fix", "gain_percent", "multiplied_gain_percent", "added_gain_percent", "origin", "source"),
        "fixes_one_after_the_other",
    )
    limits = ("min_total_gain_percent", "max_total_gain_percent")
    require(total, (*limits, "origin", "source"), "fixes_one_after_the_other total")
    fixes = ladder["fix"].to_list()
    bars_from = ladder.with_columns(pl.col("multiplied_gain_percent").shift(1).fill_null(0.0).alias("before_percent"))
    y = alt.Y("fix:N", title=None, sort=fixes, axis=alt.Axis(labelLimit=280))
    shown = theme.tooltip("fix", "gain_percent", "multiplied_gain_percent", "added_gain_percent", "formula")
    x = theme.x("multiplied_gain_percent", scale=alt.Scale(domainMin=0))
    color = theme.entity_color("fix", fixes).legend(None)
    steps = (
        alt.Chart(bars_from).mark_bar(opacity=0.85).encode(x=x, x2="before_percent:Q", y=y, color=color, tooltip=shown)
    )
    shape = theme.origin_shape([*ladder["origin"], *total["origin"]])
    dots = layers.origin_marks(bars_from, x, y, size=60, shape=shape)
    numbers = layers.numbers(bars_from, x, y, "multiplied_gain_percent", ".1f", dx=8)
    band = (
        alt.Chart(total)
        .mark_rect(opacity=0.25, color=theme.VERMILLION)
        .encode(x=f"{limits[0]}:Q", x2=f"{limits[1]}:Q", tooltip=theme.tooltip(*limits))
    )
    product = ladder["multiplied_gain_percent"][-1]
    least, most = total.select(limits).row(0)
    where = "inside" if least <= product <= most else "outside"
    return alt.layer(
        band,
        steps,
        dots,
        numbers,
        name="fixes_one_after_the_other",
        height=alt.Step(44),
        title=theme.headline(
            f"Multiplied, the three make {product:.1f} %: {where} the {_span(least, most)} of all together (band)",
            subtitle,
        ),
    )


def combined_gains(compositions: pl.DataFrame, totals: pl.DataFrame, *, subtitle: str) -> alt.LayerChart:
    """Single gains combined in both ways, beside the gain of all together, per size.

    Args:
        compositions: gains_of, composition, gain_percent, min_gain_percent, max_gain_percent, inside_total.
        totals: gains_of, min_total_gain_percent, max_total_gain_percent.
        subtitle: hardware, model and sample.
    """
    require(
        compositions,
        (
            "gains_of", "composition", "gain_percent", "min_gain_percent", "max_gain_percent", "inside_total",
            "min_residual_points", "max_residual_points", "origin", "source",
        ),
        "combined_gains",
    )  # fmt: skip
    limits = ("min_total_gain_percent", "max_total_gain_percent")
    require(totals, ("gains_of", *limits, "origin", "source"), "combined_gains totals")
    groups = compositions["gains_of"].unique(maintain_order=True).to_list()
    y = alt.Y("gains_of:N", title=title("gains_of"), sort=groups)
    x = theme.x("gain_percent", scale=alt.Scale(zero=False, padding=20))
    offset = alt.YOffset("composition:N", sort=_COMPOSITIONS)
    span = (
        alt.Chart(totals)
        .mark_bar(opacity=0.3, color=theme.VERMILLION, minBandSize=3)
        .encode(
            x=alt.X(f"{limits[0]}:Q", title=_not_from_0("gain_percent")),
            x2=f"{limits[1]}:Q",
            y=y,
            tooltip=theme.tooltip(*limits),
        )
    )
    edges = (
        alt.Chart(totals)
        .transform_fold([*limits], as_=["edge", "edge_percent"])
        .mark_point(filled=True, color=theme.VERMILLION, size=50, opacity=1)
        .encode(
            x="edge_percent:Q",
            y=y,
            shape=theme.origin_shape([*compositions["origin"], *totals["origin"]]),
            tooltip=theme.tooltip("gains_of", *limits),
        )
    )
    base = alt.Chart(compositions).encode(x=x, y=y, yOffset=offset)
    color = theme.entity_color("composition", _COMPOSITIONS)
    errors = base.mark_rule(strokeWidth=3).encode(x="min_gain_percent:Q", x2="max_gain_percent:Q", color=color)
    dots = base.mark_point(filled=True, size=90, opacity=1).encode(
        color=color,
        shape=theme.origin_shape([*compositions["origin"], *totals["origin"]]),
        tooltip=theme.tooltip(
            "gains_of", "composition", "gain_percent", "min_gain_percent", "max_gain_percent",
            "min_residual_points", "max_residual_points", "inside_total", "formula",
        ),
    )  # fmt: skip
    ends = alt.X("max_gain_percent:Q", title=_not_from_0("gain_percent"))
    numbers = layers.numbers(compositions, ends, y, "gain_percent", ".1f", dx=8).encode(yOffset=offset)
    met = {
        way: compositions.filter((pl.col("composition") == way) & pl.col("inside_total"))["gains_of"]
        .str.replace(" new tokens", "")
        .to_list()
        for way in _COMPOSITIONS
    }
    multiplied, added = (", ".join(met[way]) or "no size" for way in _COMPOSITIONS)
    return alt.layer(
        span,
        edges,
        errors,
        dots,
        numbers,
        name="combined_gains",
        height=alt.Step(40, **{"for": "position"}),
        title=theme.headline(f"Multiplied, the gains meet the total at: {multiplied}; added, at: {added}", subtitle),
    )


def gain_left_for_the_others(others: pl.DataFrame, *, subtitle: str) -> alt.LayerChart:
    """What the total leaves for the two fixes without a printed size, beside their printed gains combined.

    Args:
        others: gains_of, composition, min_other_gain_percent, max_other_gain_percent, other_gain_percent. The title
            speaks of the multiplied gains at the first and the last size.
        subtitle: hardware, model and sample.
    """
    columns = ("gains_of", "composition", "min_other_gain_percent", "max_other_gain_percent", "other_gain_percent")
    require(others, (*columns, "origin", "source"), "gain_left_for_the_others")
    groups = others["gains_of"].unique(maintain_order=True).to_list()
    y = alt.Y("gains_of:N", title=title("gains_of"), sort=groups)
    color = theme.entity_color("composition", _COMPOSITIONS)
    shape = theme.origin_shape(others["origin"])
    scale = alt.Scale(zero=False, padding=20)
    x_title = _not_from_0("other_gain_percent")
    base = alt.Chart(others).encode(y=y, yOffset=alt.YOffset("composition:N", sort=_COMPOSITIONS), color=color)
    spans = base.mark_rule(strokeWidth=6, opacity=0.6).encode(
        x=alt.X("min_other_gain_percent:Q", title=x_title, scale=scale), x2="max_other_gain_percent:Q"
    )
    ends = (
        base.transform_fold(["min_other_gain_percent", "max_other_gain_percent"], as_=["edge", "edge_percent"])
        .mark_point(filled=True, size=60, opacity=1)
        .encode(x=alt.X("edge_percent:Q", title=x_title), shape=shape, tooltip=theme.tooltip(*columns, "formula"))
    )
    printed = (
        alt.Chart(others.unique(["composition", "other_gain_percent"], maintain_order=True))
        .mark_rule(strokeWidth=2, strokeDash=theme.ORIGIN_DASHES["derived"])
        .encode(
            x=alt.X("other_gain_percent:Q", title=x_title),
            color=color,
            tooltip=theme.tooltip("composition", "other_gain_percent"),
        )
    )
    labels = [
        alt.Chart(others.filter(pl.col("composition") == way).head(1))
        .mark_text(dx=side * 5, align="left" if side > 0 else "right", baseline="bottom")
        .encode(
            x=alt.X("other_gain_percent:Q", title=x_title),
            y=alt.value(-2),
            color=color,
            text=alt.Text("other_gain_percent:Q", format=".1f"),
        )
        for way, side in zip(_COMPOSITIONS, (1, -1), strict=True)
    ]
    multiplied = others.filter(pl.col("composition") == "multiplied")
    first, last = multiplied.row(0, named=True), multiplied.row(-1, named=True)

    def said(row: dict[str, object]) -> str:
        return f"{_span(row['min_other_gain_percent'], row['max_other_gain_percent'])} at {row['gains_of']}"

    return alt.layer(printed, spans, ends, *labels).properties(
        name="gain_left_for_the_others",
        height=alt.Step(34, **{"for": "position"}),
        title=theme.headline(f"Left for the two others: {said(first)}, {said(last)}", subtitle),
    )


def time_per_token(times: pl.DataFrame, *, subtitle: str) -> alt.LayerChart:
    """The prefill time of a new token before the fixes, split by what takes it away, for both orders of the fixes.

    Args:
        times: reading (the order), time_of, us_per_token; the first row of an order is what is left.
        subtitle: hardware, model and sample.
    """
    require(times, ("reading", "time_of", "us_per_token", "origin", "source", "formula"), "time_per_token")
    parts = times["time_of"].unique(maintain_order=True).to_list()
    orders = times["reading"].unique(maintain_order=True).to_list()
    placed = times.with_columns(
        layers.place("time_of", parts).alias("drawing_order"),
        layers.middle("us_per_token", over="reading").alias("middle_us"),
    )
    y = alt.Y("reading:N", title=title("reading"), sort=orders)
    bars = layers.stacked_bars(
        placed,
        theme.x("us_per_token", stack="zero"),
        y,
        "drawing_order",
        ("reading", "time_of", "us_per_token", "formula"),
        color=alt.Color(
            "time_of:N",
            title=title("time_of"),
            scale=alt.Scale(domain=parts, range=[theme.GREY, theme.BLUE, theme.GREEN]),
        ),
        opacity=0.85,
    )
    dots = layers.origin_marks(placed, "middle_us:Q", y, y_offset=-8)
    numbers = layers.numbers(placed, "middle_us:Q", y, "us_per_token", ".2f", dy=9)
    saved = times.filter((pl.col("reading") == orders[0]) & (pl.col("time_of") != parts[0]))["us_per_token"].sum()
    one = times.filter(pl.col("time_of") == parts[1])["us_per_token"]
    return alt.layer(
        bars,
        dots,
        numbers,
        name="time_per_token",
        height=alt.Step(52),
        title=theme.headline(
            f"Of {saved:.2f} µs saved per token, {one.min():.2f} to {one.max():.2f} are {parts[1]}", subtitle
        ),
    )


def _new_tokens_axis(frame: pl.DataFrame) -> alt.X:
    return theme.x(
        "new_tokens",
        scale=alt.Scale(type="log", base=2, nice=False, padding=24),
        axis=alt.Axis(values=frame["new_tokens"].unique().sort().to_list(), labelExpr=_K_LABEL),
    )


def _not_from_0(name: str) -> str:
    """The title that ``theme.x`` gives; every layer must give the same, or Vega-Lite joins them."""
    return f"{title(name)}, axis does not start at 0"


def _span(least: float, most: float) -> str:
    first, last = f"{least:.1f}", f"{most:.1f}"
    return f"{first} %" if first == last else f"{first} to {last} %"
