"""Charts of expert balancing replayed: over the steps, over each setting, and in time."""

from __future__ import annotations

import altair as alt
import polars as pl

from rackbook.charts import layers, theme
from rackbook.charts.balancedness import PARTS, VALUE, cut_axis
from rackbook.tables import require

_SWEPT = ("part", "before", "after", "uniform_balancedness", "origin", "source")
_PRINTED = ("part", "balance_of", VALUE, "origin", "source")
_WITHOUT, _WITH = "as routed, without EPLB", "as routed, with EPLB"


def balancedness_over_steps(
    course: pl.DataFrame, moves: pl.DataFrame, states: pl.DataFrame, *, subtitle: str
) -> alt.HConcatChart:
    """Balancedness without and with EPLB over the steps, a panel per part, with the printed figures as lines.

    Args:
        course: part, balance_of, step, balancedness_per_layer_step, window_steps, origin, source.
        moves: part, step (of a rearrangement), window_steps, num_experts_moved, origin, source.
        states: part, balance_of, balancedness_per_layer_step, origin, source; the printed rows are drawn.
        subtitle: model, router and setting.
    """
    require(course, ("step", "window_steps", *_PRINTED), "balancedness_over_steps course")
    require(
        moves,
        ("part", "step", "window_steps", "num_experts_moved", "origin", "source"),
        "balancedness_over_steps moves",
    )
    require(states, _PRINTED, "balancedness_over_steps states")
    printed = states.filter(pl.col("balance_of").is_in([_WITHOUT, _WITH]) & (pl.col("origin") == "published"))
    parts = theme.drawn(course["part"], PARTS)
    color = theme.entity_color("balance_of", [_WITHOUT, _WITH])
    x = theme.x("step", scale=alt.Scale(domainMin=0, nice=False), axis=alt.Axis(tickCount=6, grid=False))
    y = theme.y(VALUE, scale=alt.Scale(domain=[0, 1]))
    panels = []
    for part in parts:
        rows = course.filter(pl.col("part") == part)
        lines = (
            alt.Chart(rows)
            .mark_line(point=alt.OverlayMarkDef(size=14), strokeWidth=1.5)
            .encode(
                x=x,
                y=y,
                color=color,
                strokeDash=theme.origin_dash(["published", "simulated"]),
                tooltip=theme.tooltip("part", "balance_of", "step", VALUE, "window_steps"),
            )
        )
        rules = (
            alt.Chart(printed.filter(pl.col("part") == part))
            .mark_rule(strokeWidth=1, opacity=0.7)
            .encode(
                y=y,
                color=color,
                strokeDash=theme.origin_dash(["published", "simulated"]),
                tooltip=theme.tooltip("part", "balance_of", VALUE),
            )
        )
        marks = (
            alt.Chart(moves.filter(pl.col("part") == part))
            .mark_tick(orient="vertical", size=12, thickness=2, color=theme.INK)
            .encode(x=x, y=alt.datum(0.03), tooltip=theme.tooltip("part", "step", "window_steps", "num_experts_moved"))
        )
        panels.append(alt.layer(lines, rules, marks, width=300, height=280, title=part))
    found = {
        part: course.filter((pl.col("part") == part) & (pl.col("balance_of") == _WITH))
        .drop_nulls("window_steps")[VALUE]
        .mean()
        for part in parts
    }
    told = ", ".join(f"{value:.2f} ({part})" for part, value in found.items())
    return alt.hconcat(*panels, spacing=24).properties(
        name="balancedness_over_steps",
        title=theme.headline(f"The replay is {told} balanced after its first rearrangement", subtitle),
    )


def balancedness_by_memory(points: pl.DataFrame, states: pl.DataFrame, *, subtitle: str) -> alt.LayerChart:
    """Balancedness with EPLB over how long the router's preferences last, with the printed figures as lines.

    Args:
        points: part, memory_steps, before, after, uniform_balancedness, origin, source.
        states: part, balance_of, balancedness_per_layer_step, origin, source.
        subtitle: model, router and setting.
    """
    require(points, ("memory_steps", *_SWEPT), "balancedness_by_memory points")
    require(states, _PRINTED, "balancedness_by_memory states")
    x = theme.x("memory_steps", scale=alt.Scale(type="log"), axis=alt.Axis(format="~s", grid=False, tickCount=4))
    y = cut_axis()
    parts = theme.drawn(points["part"], PARTS)
    color = theme.entity_color("part", parts)
    rows = points.with_columns(pl.col("after").alias(VALUE)).sort("memory_steps")
    printed = states.filter((pl.col("balance_of") == _WITH) & pl.col("part").is_in(parts))
    dash = theme.origin_dash(["published", "simulated"])
    lines = alt.Chart(rows).mark_line(strokeWidth=1.5).encode(x=x, y=y, color=color, strokeDash=dash)
    shown = ("part", "memory_steps", "before", "after", "uniform_balancedness")
    dots = layers.points(rows, x, y, shown, color=color, size=60, shape=theme.origin_shape(["simulated"]))
    rules = layers.rules(printed, y, ("part", "balance_of", VALUE), color=color, width=1, dash=dash)
    needed = []
    for part in parts:
        value = printed.filter(pl.col("part") == part)[VALUE].item()
        reached = rows.filter((pl.col("part") == part) & (pl.col("after") >= value - 0.005))
        least = f"{reached['memory_steps'].min():,.0f} steps" if reached.height else "not reached here"
        needed.append(f"{least} ({part})")
    return alt.layer(
        lines,
        rules,
        dots,
        name="balancedness_by_memory",
        title=theme.headline(f"Least memory that comes to the printed figures: {', '.join(needed)}", subtitle),
    )


def balancedness_by_redundancy(points: pl.DataFrame, *, subtitle: str) -> alt.LayerChart:
    """Balancedness with EPLB over the redundant experts on each rank, below the bound that no placement exceeds.

    Args:
        points: part, redundant_per_rank, before, after, uniform_balancedness, balancedness_bound, origin, source.
        subtitle: model, router and setting.
    """
    require(points, ("redundant_per_rank", "balancedness_bound", *_SWEPT), "balancedness_by_redundancy")
    x = theme.x("redundant_per_rank", scale=alt.Scale(nice=False, padding=12), axis=alt.Axis(tickMinStep=1, grid=False))
    parts = theme.drawn(points["part"], PARTS)
    rows = points.with_columns(pl.col("after").alias(VALUE)).sort("redundant_per_rank")
    none = rows.filter(pl.col("redundant_per_rank") == rows["redundant_per_rank"].min())
    told = ", ".join(
        f"{row['balancedness_bound']:.2f} ({part})"
        for part in parts
        for row in none.filter(pl.col("part") == part).to_dicts()
    )
    least = int(none["redundant_per_rank"][0])
    return _against(
        rows, x, "redundant_per_rank", {"balancedness_bound": "no placement exceeds", "uniform_balancedness": "uniform"}
    ).properties(
        name="balancedness_by_redundancy",
        title=theme.headline(f"With {least} redundant experts per rank no placement exceeds {told}", subtitle),
    )


def balancedness_by_ep_size(points: pl.DataFrame, *, subtitle: str) -> alt.LayerChart:
    """Balancedness without and with EPLB over the expert-parallel size, beside uniform routing.

    Args:
        points: part, num_ranks, before, after, uniform_balancedness, origin, source.
        subtitle: model, router and setting.
    """
    require(points, ("num_ranks", *_SWEPT), "balancedness_by_ep_size")
    sizes = sorted(points["num_ranks"].unique())
    x = theme.x(
        "num_ranks",
        scale=alt.Scale(type="log", base=2, nice=False, padding=12),
        axis=alt.Axis(values=sizes, format="d", grid=False),
    )
    rows = points.with_columns(pl.col("after").alias(VALUE)).sort("num_ranks")
    last = rows.filter(pl.col("num_ranks") == sizes[-1])
    gains = ", ".join(f"{row['before']:.2f} → {row['after']:.2f} ({row['part']})" for row in last.to_dicts())
    return _against(rows, x, "num_ranks", {"before": "without EPLB", "uniform_balancedness": "uniform"}).properties(
        name="balancedness_by_ep_size",
        title=theme.headline(f"Balancedness on {sizes[-1]} ranks, without → with EPLB: {gains}", subtitle),
    )


def balancedness_by_window(points: pl.DataFrame, *, subtitle: str) -> alt.LayerChart:
    """Balancedness with EPLB over the rearrangement interval, a line per window.

    Args:
        points: part, window_steps, interval_steps, after, rearrangements_per_1000_steps, origin, source; one part.
        subtitle: model, router and setting.
    """
    names = ("part", "window_steps", "interval_steps", "after", "rearrangements_per_1000_steps", "origin", "source")
    require(points, names, "balancedness_by_window")
    rows = points.with_columns(pl.col("after").alias(VALUE)).sort("window_steps", "interval_steps")
    intervals = sorted(rows["interval_steps"].unique())
    x = theme.x(
        "interval_steps",
        scale=alt.Scale(type="log", nice=False, domain=[intervals[0] / 2.5, intervals[-1] * 1.3]),
        axis=alt.Axis(values=intervals, format=",d", grid=False),
    )
    y = cut_axis()
    color = theme.entity_color("part", theme.drawn(points["part"], PARTS))
    lines = (
        alt.Chart(rows)
        .mark_line(strokeWidth=1.5)
        .encode(x=x, y=y, color=color, detail="window_steps:N", strokeDash=theme.origin_dash(["simulated"]))
    )
    shape = theme.origin_shape(["simulated"])
    dots = layers.points(rows, x, y, names[:5], color=color, size=50, shape=shape)
    first = rows.filter(pl.col("interval_steps") == intervals[0])
    words = (
        alt.Chart(first.with_columns(window=pl.format("window {}", "window_steps")))
        .mark_text(align="right", dx=-8, fontSize=10)
        .encode(x=x, y=y, color=color, text="window:N")
    )
    best, worst = rows.sort("after", descending=True).row(0, named=True), rows.sort("after").row(0, named=True)
    return alt.layer(
        lines,
        dots,
        words,
        name="balancedness_by_window",
        title=theme.headline(
            f"{best['after']:.3f} with a window of {best['window_steps']:,} every {best['interval_steps']:,} steps, "
            f"{worst['after']:.3f} with {worst['window_steps']:,} every {worst['interval_steps']:,}",
            subtitle,
        ),
    )


def cost_by_balancedness(cost: pl.DataFrame, states: pl.DataFrame, *, subtitle: str) -> alt.LayerChart:
    """MoE time that a balancedness costs, in two readings, with the printed balancedness figures marked.

    Args:
        cost: balancedness_per_layer_step, cost_reading, extra_ms, extra_percent, origin, source.
        states: part, balance_of, balancedness_per_layer_step, origin, source; the target's printed rows are marked.
        subtitle: hardware, model and load of the printed times.
    """
    require(cost, (VALUE, "cost_reading", "extra_ms", "extra_percent", "origin", "source"), "cost_by_balancedness cost")
    require(states, _PRINTED, "cost_by_balancedness states")
    readings = cost["cost_reading"].unique(maintain_order=True).to_list()
    color = theme.entity_color("cost_reading", readings)
    x = theme.x(VALUE, scale=alt.Scale(domain=[cost[VALUE].min(), 1], nice=False))
    y = theme.y("extra_ms")
    dash = theme.origin_dash(["published", "modelled"])
    lines = alt.Chart(cost.sort(VALUE)).mark_line(strokeWidth=2).encode(x=x, y=y, color=color, strokeDash=dash)
    printed = states.filter((pl.col("part") == "target") & pl.col("balance_of").is_in([_WITHOUT, _WITH]))
    marked = cost.join(printed.select(VALUE, "balance_of"), on=VALUE).sort(VALUE)
    rules = layers.rules(printed, x, ("part", "balance_of", VALUE), color=theme.MUTED, width=1, dash=dash)
    shown = ("balance_of", "cost_reading", VALUE, "extra_ms", "extra_percent")
    dots = layers.points(marked, x, y, shown, color=color, size=80, shape=theme.origin_shape(["modelled"]))
    words = (
        alt.Chart(marked.filter(pl.col(VALUE) == marked[VALUE].min()))
        .mark_text(align="right", dx=-8, dy=4, fontSize=10)
        .encode(x=x, y=y, text=alt.Text("extra_ms:Q", format=".1f"))
    )
    worst = marked.filter(pl.col(VALUE) == marked[VALUE].min())["extra_ms"]
    return alt.layer(
        rules,
        lines,
        dots,
        words,
        name="cost_by_balancedness",
        title=theme.headline(
            f"A balancedness of {marked[VALUE].min():g} costs {worst.max():.1f} ms if all of the MoE time waits, "
            f"{worst.min():.1f} ms if part of it",
            subtitle,
        ),
    )


def expert_loads_by_place(places: pl.DataFrame, *, subtitle: str) -> alt.LayerChart:
    """The experts of each layer from the busiest to the idlest, relative to the mean expert.

    Args:
        places: layer, expert_place, expert_load_to_mean, origin, source.
        subtitle: model, machine and requests.
    """
    require(places, ("layer", "expert_place", "expert_load_to_mean", "origin", "source"), "expert_loads_by_place")
    x = theme.x("expert_place", scale=alt.Scale(domainMin=0, nice=False, padding=8), axis=alt.Axis(tickMinStep=1))
    base = alt.Chart(places.sort("layer", "expert_place")).encode(
        x=x, y=theme.y("expert_load_to_mean"), detail="layer:N"
    )
    lines = base.mark_line(strokeWidth=1, color=theme.BLUE, opacity=0.5)
    dots = base.mark_point(filled=True, size=35, opacity=1, color=theme.BLUE).encode(
        shape=theme.origin_shape(places["origin"]),
        tooltip=theme.tooltip("layer", "expert_place", "expert_load_to_mean"),
    )
    busiest = places.filter(pl.col("expert_place") == 1)["expert_load_to_mean"]
    said = "No routed experts were recorded"
    if places.height:
        said = f"The busiest expert of a layer has {busiest.min():.1f} to {busiest.max():.1f} times the mean"
    return alt.layer(lines, dots, name="expert_loads_by_place", title=theme.headline(said, subtitle))


def _against(rows: pl.DataFrame, x: alt.X, by: str, references: dict[str, str]) -> alt.LayerChart:
    """Simulated points over one setting, with thin lines of what they are compared with."""
    parts = theme.drawn(rows["part"], PARTS)
    color = theme.entity_color("part", parts)
    y = theme.y(VALUE, scale=alt.Scale(domain=[0, 1]))
    dash = theme.origin_dash(["modelled", "simulated"])
    compared = []
    for name, word in references.items():
        drawn = rows.with_columns(pl.col(name).alias(VALUE))
        modelled = drawn.with_columns(pl.lit("modelled").alias("origin")) if name == "uniform_balancedness" else drawn
        compared.append(layers.lines(modelled, x, y, ("part", by, name), color=color, dash=dash, width=1, opacity=0.8))
        first = modelled.filter(pl.col(by) == modelled[by].min())
        compared.append(
            alt.Chart(first.head(1))
            .mark_text(align="left", dx=10, dy=22 if name == "uniform_balancedness" else -5, fontSize=10)
            .encode(x=x, y=y, color=color, text=alt.value(word))
        )
    shown = ("part", by, "before", "after", "uniform_balancedness")
    dots = layers.points(rows, x, y, shown, color=color, size=60, shape=theme.origin_shape(["simulated"]))
    return alt.layer(*compared, dots)
