"""Charts of how evenly the experts' work falls on the ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import altair as alt
import polars as pl

from rackbook.charts import layers, theme
from rackbook.charts.balancedness import PARTS, VALUE, cut_axis
from rackbook.tables import column, require, title

if TYPE_CHECKING:
    from collections.abc import Sequence

_UNIFORM = ("part", VALUE, "balancedness_low", "balancedness_high", "num_draws", "origin", "source")


def balancedness_by_state(states: pl.DataFrame, *, subtitle: str) -> alt.LayerChart:
    """Balancedness of each part without and with EPLB, beside that of uniform routing.

    Args:
        states: part, balance_of, balancedness_per_layer_step, busiest_to_mean, origin, source; rows in drawing order.
        subtitle: hardware, model and sample.
    """
    require(
        states,
        ("part", "balance_of", VALUE, "busiest_to_mean", "origin", "source"),
        "balancedness_by_state",
    )
    parts = theme.drawn(states["part"], PARTS)
    y = alt.Y(
        "balance_of:N",
        title=title("balance_of"),
        sort=states["balance_of"].unique(maintain_order=True).to_list(),
        axis=alt.Axis(labelLimit=240),
    )
    offset = alt.YOffset("part:N", sort=parts)
    x = theme.x(VALUE, scale=alt.Scale(domain=[0, 1]))
    color = theme.entity_color("part", parts)
    base = alt.Chart(states).encode(y=y, yOffset=offset, color=color)
    stems = base.mark_rule(strokeWidth=3, opacity=0.35).encode(x=x, x2=alt.datum(0))
    dots = base.mark_point(filled=True, size=90, opacity=1).encode(
        x=x,
        shape=theme.origin_shape(states["origin"]),
        tooltip=theme.tooltip("part", "balance_of", VALUE, "busiest_to_mean"),
    )
    # the digits of a printed figure are its own; a drawn one is known to one more
    words = (
        base.transform_calculate(
            text="datum.origin == 'published' ? datum." + VALUE + " : format(datum." + VALUE + ", '.3f')"
        )
        .mark_text(align="right", dx=-9, dy=-8, fontSize=10)
        .encode(x=x, text="text:N")
    )
    least = states.sort(VALUE).row(0, named=True)
    return alt.layer(
        stems,
        dots,
        words,
        name="balancedness_by_state",
        height=alt.Step(22),
        title=theme.headline(
            f"The {least['part']} {least['balance_of']}: its busiest rank has on average at least "
            f"{least['busiest_to_mean']:.1f} times the mean load",
            subtitle,
        ),
    )


def balancedness_by_size(points: pl.DataFrame, by: str, *, subtitle: str) -> alt.LayerChart:
    """Balancedness of uniform routing over one size of the batch: drawn, with its interval, and approximated.

    Args:
        points: table ``uniform_balance``, one value per part, size and origin.
        by: the size, "num_ranks" or "requests_per_rank", drawn on a log axis.
        subtitle: what the other sizes are, and the draws.
    """
    require(points, (by, *_UNIFORM), f"balancedness_by_size {by}")
    ticks = [2**n for n in range(12) if points[by].min() <= 2**n <= points[by].max()]
    x = theme.x(
        by,
        scale=alt.Scale(type="log", base=2, nice=False, padding=12),
        axis=alt.Axis(values=ticks, format="d", grid=False),
    )
    part = theme.drawn(points["part"], PARTS)[0]
    curve = points.filter((pl.col("part") == part) & (pl.col("origin") == "simulated")).sort(by)
    first, last = curve.row(0, named=True), curve.row(-1, named=True)
    return _curves(points, by, x).properties(
        name=f"balancedness_by_{by}",
        title=theme.headline(
            f"By chance alone the {part} is {first[VALUE]:.3f} balanced with {first[by]}, {last[VALUE]:.3f} with "
            f"{last[by]} {column(by).label.lower()}",
            subtitle,
        ),
    )


def balancedness_by_tokens(points: pl.DataFrame, printed: pl.DataFrame, *, subtitle: str) -> alt.LayerChart:
    """Balancedness of uniform routing over tokens per request, with the printed figures as bands.

    Args:
        points: table ``uniform_balance``, one setting but for tokens_per_request.
        printed: part, balancedness_per_layer_step, balancedness_low, balancedness_high (what rounds to the printed
            figure), origin, source.
        subtitle: setting and draws.
    """
    require(points, ("tokens_per_request", *_UNIFORM), "balancedness_by_tokens points")
    require(
        printed,
        ("part", VALUE, "balancedness_low", "balancedness_high", "origin", "source"),
        "balancedness_by_tokens printed",
    )
    parts = theme.drawn(points["part"], PARTS)
    x = theme.x(
        "tokens_per_request",
        scale=alt.Scale(domainMin=0, nice=False, padding=12),
        axis=alt.Axis(tickMinStep=1, grid=False),
    )
    bands = (
        alt.Chart(printed)
        .mark_rect(opacity=0.18)
        .encode(y="balancedness_low:Q", y2="balancedness_high:Q", color=theme.entity_color("part", parts))
    )
    lines = layers.rules(
        printed,
        cut_axis(),
        ("part", VALUE, "balancedness_low", "balancedness_high"),
        color=theme.entity_color("part", parts),
        width=1,
        dash=theme.origin_dash(["published", "modelled"]),
    )
    inside = (
        points.filter(pl.col("origin") == "modelled")
        .join(printed.select("part", low="balancedness_low", high="balancedness_high"), on="part")
        .filter(pl.col(VALUE).is_between("low", "high"))
        .sort("tokens_per_request")
    )
    fits = [
        f"{_listed(inside.filter(pl.col('part') == part)['tokens_per_request'].to_list())} tokens of the {part}"
        for part in parts
    ]
    return alt.layer(
        bands,
        lines,
        _curves(points, "tokens_per_request", x),
        name="balancedness_by_tokens",
        title=theme.headline(f"The printed baselines fit {' and '.join(fits)}", subtitle),
    )


def balancedness_of_draws(draws: pl.DataFrame, means: pl.DataFrame, *, subtitle: str) -> alt.LayerChart:
    """How the balancedness of single layers and steps scatters under uniform routing.

    Args:
        draws: part, balancedness_low, balancedness_high (the bin), share_of_draws_percent, num_draws, origin, source.
        means: table ``uniform_balance``, the rows of the same draws.
        subtitle: setting and draws.
    """
    names = ("part", "balancedness_low", "balancedness_high", "share_of_draws_percent", "num_draws", "origin", "source")
    require(draws, names, "balancedness_of_draws draws")
    require(means, _UNIFORM, "balancedness_of_draws means")
    parts = theme.drawn(draws["part"], PARTS)
    color = theme.entity_color("part", parts)
    x = theme.x(VALUE, scale=alt.Scale(zero=False, nice=False, padding=8))
    bars = (
        alt.Chart(draws.with_columns(pl.col("balancedness_low").alias(VALUE)))
        .mark_bar(opacity=0.55, stroke="white", strokeWidth=0.3)
        .encode(
            x=x,
            x2="balancedness_high:Q",
            y=theme.y("share_of_draws_percent", stack=None),
            y2=alt.datum(0),
            color=color,
            tooltip=theme.tooltip(
                "part", "balancedness_low", "balancedness_high", "share_of_draws_percent", "num_draws"
            ),
        )
    )
    mean = means.filter(pl.col("origin") == "simulated")
    shown = ("part", VALUE, "balancedness_low", "balancedness_high", "num_draws")
    rules = layers.rules(mean, x, shown, color=color, width=2, dash=theme.origin_dash(["simulated"]))
    words = (
        alt.Chart(mean)
        .mark_text(align="left", dx=4, y=-4, fontSize=10)
        .encode(x=x, color=color, text=alt.Text(f"{VALUE}:Q", format=".3f"))
    )
    spans = [
        f"{bins['balancedness_low'].min():.2f} to {bins['balancedness_high'].max():.2f} ({part})"
        for part in parts
        for bins in [draws.filter(pl.col("part") == part)]
    ]
    return alt.layer(
        bars,
        rules,
        words,
        name="balancedness_of_draws",
        title=theme.headline(f"Single layers and steps lie anywhere from {', '.join(spans)}", subtitle),
    )


def load_by_place(order: pl.DataFrame, *, subtitle: str) -> alt.LayerChart:
    """The ranks of a draw from the busiest to the idlest, relative to the mean: mean and range over draws.

    Args:
        order: part, load_place, load_to_mean, load_to_mean_low, load_to_mean_high, num_draws, origin, source.
        subtitle: setting, draws, and what the range covers.
    """
    names = ("part", "load_place", "load_to_mean", "load_to_mean_low", "load_to_mean_high", "num_draws")
    require(order, (*names, "origin", "source"), "load_by_place")
    parts = theme.drawn(order["part"], PARTS)
    color = theme.entity_color("part", parts)
    x = theme.x("load_place", scale=alt.Scale(domainMin=0, nice=False, padding=8), axis=alt.Axis(tickMinStep=1))
    y = theme.y("load_to_mean", scale=alt.Scale(zero=False))
    band = (
        alt.Chart(order)
        .mark_area(opacity=0.15)
        .encode(x=x, y="load_to_mean_low:Q", y2="load_to_mean_high:Q", color=color)
    )
    dots = layers.points(order, x, y, names, color=color, size=40)
    busiest = order.filter(pl.col("load_place") == 1)
    excess = ", ".join(f"{100 * (row['load_to_mean'] - 1):.1f} % ({row['part']})" for row in busiest.to_dicts())
    return alt.layer(
        band,
        dots,
        name="load_by_place",
        title=theme.headline(f"The busiest of equal ranks has more than the mean by {excess}", subtitle),
    )


def _curves(points: pl.DataFrame, by: str, x: alt.X) -> alt.LayerChart:
    parts = theme.drawn(points["part"], PARTS)
    color = theme.entity_color("part", parts)
    drawn = points.filter(pl.col("origin") == "simulated").sort(by)
    formula = points.filter(pl.col("origin") == "modelled").sort(by)
    band = (
        alt.Chart(drawn)
        .mark_area(opacity=0.2)
        .encode(x=x, y="balancedness_low:Q", y2="balancedness_high:Q", color=color)
    )
    y = cut_axis()
    dash = theme.origin_dash(["published", "modelled"] if by == "tokens_per_request" else ["modelled"])
    line = layers.lines(formula, x, y, ("part", by, VALUE), color=color, dash=dash, width=1.5)
    shown = ("part", by, VALUE, "balancedness_low", "balancedness_high", "num_draws")
    dots = layers.points(drawn, x, y, shown, color=color, size=45, shape=theme.origin_shape(["simulated"]))
    return band + line + dots


def _listed(numbers: Sequence[int]) -> str:
    if not numbers:
        return "no number of"
    *others, last = map(str, numbers)
    return f"{', '.join(others)} or {last}" if others else last
