"""Charts of the parts of a decode step."""

from __future__ import annotations

import altair as alt
import polars as pl

from rackbook.charts import layers, theme
from rackbook.tables import require, title

_PARTS = ("moe", "attention_indexer", "rest", "unassigned")


def step_shares(shares: pl.DataFrame, *, subtitle: str) -> alt.LayerChart:
    """The parts of the step as one bar per run.

    Args:
        shares: run, component (a published part or ``unassigned``), step_share_percent. The title speaks of the first
            run's largest part.
        subtitle: hardware, model and sample.
    """
    require(shares, ("run", "component", "step_share_percent", "origin", "source"), "step_shares")
    runs = shares["run"].unique(maintain_order=True).to_list()
    parts = theme.drawn(shares["component"], _PARTS)
    # what is written on stacked bars must follow the order in which they are stacked
    ordered = (
        shares.with_columns(layers.place("component", parts).alias("drawing_order"))
        .sort("run", "drawing_order", maintain_order=True)
        .with_columns(layers.middle("step_share_percent", over="run").alias("middle_percent"))
    )
    y = alt.Y("run:N", title=title("run"), sort=runs)
    bars = layers.stacked_bars(
        ordered,
        theme.x("step_share_percent", stack="zero", scale=alt.Scale(domain=[0, 100])),
        y,
        "drawing_order",
        ("run", "component", "step_share_percent"),
        color=theme.entity_color("component", parts),
        opacity=0.85,
    )
    # a sliver has no room for its mark and number; its tooltip and the table have them
    wide = ordered.filter(pl.col("step_share_percent") >= 4)
    shape = theme.origin_shape(shares["origin"])
    dots = layers.origin_marks(wide, "middle_percent:Q", y, y_offset=-8, shape=shape)
    numbers = layers.numbers(wide, "middle_percent:Q", y, "step_share_percent", ".3~g", dy=9)
    largest = shares.filter(pl.col("run") == runs[0]).sort("step_share_percent", maintain_order=True)
    part, share = largest.select("component", "step_share_percent").row(-1)
    return alt.layer(
        bars,
        dots,
        numbers,
        name="step_shares",
        height=alt.Step(52),
        title=theme.headline(f"{_words(part)} takes {share:.3g} % of the step ({runs[0]})", subtitle),
    )


def step_speedup_by_part(speedups: pl.DataFrame, limits: pl.DataFrame, *, subtitle: str) -> alt.LayerChart:
    """What the whole step gains over the speed-up of one part, the others unchanged.

    Args:
        speedups: component, part_speedup, step_speedup: the curves.
        limits: component, part_speedup, step_speedup, step_speedup_limit: the points to mark. The title speaks of the
            first.
        subtitle: hardware, model and sample.
    """
    require(
        speedups, ("component", "part_speedup", "step_speedup", "origin", "source"), "step_speedup_by_part speedups"
    )
    require(
        limits,
        ("component", "part_speedup", "step_speedup", "step_speedup_limit", "origin", "source"),
        "step_speedup_by_part limits",
    )
    parts = limits["component"].to_list()
    x = theme.x(
        "part_speedup", scale=alt.Scale(type="log", base=2, nice=False), axis=alt.Axis(format="~g", tickCount=6)
    )
    y = theme.y("step_speedup", scale=alt.Scale(zero=False))
    color = theme.entity_color("component", parts)
    lines = layers.lines(speedups, x, y, ("component", "part_speedup", "step_speedup"), color=color)
    marks = (
        alt.Chart(limits)
        .mark_point(filled=False, size=300, strokeWidth=4, opacity=1)
        .encode(
            x=x,
            y=y,
            color=color,
            shape=theme.origin_shape(limits["origin"]),
            tooltip=theme.tooltip("component", "part_speedup", "step_speedup", "step_speedup_limit"),
        )
    )
    labels = layers.numbers(limits, x, y, "step_speedup", ".3f", dx=-10, dy=-8)
    part, factor, step, limit = limits.select("component", "part_speedup", "step_speedup", "step_speedup_limit").row(0)
    return alt.layer(
        lines,
        marks,
        labels,
        name="step_speedup_by_part",
        title=theme.headline(
            f"{_words(part)} {factor:.3g}× as fast makes the step {step:.3g}× as fast, never more than {limit:.3g}×",
            subtitle,
        ),
    )


def moe_share_by_ep_size(
    curve: pl.DataFrame, points: pl.DataFrame, printed: pl.DataFrame, *, implied_ep_size: float, subtitle: str
) -> alt.LayerChart:
    """MoE's share of MoE and everything else over the expert-parallel size, beside the share that is printed.

    Args:
        curve: ep_size, step_share_percent.
        points: the same at the sizes with printed times.
        printed: component, step_share_percent, missing_reason: table ``step_breakdown``; its size is not printed, so
            it is a level.
        implied_ep_size: size at which the curve meets the printed share.
        subtitle: hardware, model and sample.
    """
    for frame, name in ((curve, "curve"), (points, "points")):
        require(frame, ("ep_size", "step_share_percent", "origin", "source"), f"moe_share_by_ep_size {name}")
    require(
        printed,
        ("component", "step_share_percent", "missing_reason", "origin", "source"),
        "moe_share_by_ep_size printed",
    )
    moe = printed.filter(pl.col("component") == "moe")
    x = theme.x("ep_size", scale=alt.Scale(type="log", base=2, nice=False), axis=alt.Axis(values=[2, 4, 8, 16, 32, 64]))
    y = theme.y("step_share_percent", scale=alt.Scale(domainMin=0, domainMax=80))
    origins = [*moe["origin"], *curve["origin"].unique()]
    dash, color = theme.origin_dash(origins), alt.value(theme.BLUE)
    shown = ("ep_size", "step_share_percent", "formula")
    line = layers.lines(curve, x, y, shown, color=color, dash=dash)
    level = layers.rules(moe, y, ("component", "step_share_percent", "missing_reason"), color=color, width=2, dash=dash)
    share = moe["step_share_percent"].item()
    written = (
        alt.Chart(moe)
        .mark_text(dx=-4, dy=-9, align="right", color=theme.INK, text=f"{share:g} % printed, for a size that is not")
        .encode(x=alt.value("width"), y=y)
    )
    dots = layers.points(points, x, y, shown, color=color)
    labels = layers.numbers(points, x, y, "step_share_percent", ".1f", dx=7, dy=-9)
    smallest = points["ep_size"].min()
    return alt.layer(
        line,
        level,
        written,
        dots,
        labels,
        name="moe_share_by_ep_size",
        title=theme.headline(
            f"The printed times would make {share:g} % at {implied_ep_size:.1f} GPUs"
            f"{', fewer than any printed size' if implied_ep_size < smallest else ''}",
            subtitle,
        ),
    )


def component_times(components: pl.DataFrame, *, subtitle: str) -> alt.FacetChart:
    """The time of each component of a profile, one panel per run, coloured by the published part it counts to.

    Where a run's times per forward pass are not known, the bars of all runs are shares.

    Args:
        components: run, component, part_of_step, kernel_us, step_share_percent, num_kernels.
        subtitle: hardware, model and sample.
    """
    require(
        components,
        ("run", "component", "part_of_step", "kernel_us", "step_share_percent", "num_kernels", "origin", "source"),
        "component_times",
    )
    names = components["component"].unique(maintain_order=True).to_list()
    parts = theme.drawn(components["part_of_step"], _PARTS)
    written = components.drop("missing_reason", strict=False).with_columns(
        pl.format("{} %", pl.col("step_share_percent").round(1)).alias("share_text"),
        pl.col("step_share_percent").alias("recording_share_percent"),
    )
    known = components["kernel_us"].null_count() == 0
    axis = alt.Axis(tickCount=3, format=",.4~r")
    base = alt.Chart(written).encode(
        x=theme.x("kernel_us" if known else "recording_share_percent", scale=alt.Scale(domainMin=0), axis=axis),
        y=alt.Y("component:N", title=title("component"), sort=names),
    )
    bars = base.mark_bar(opacity=0.85).encode(
        color=theme.entity_color("part_of_step", parts),
        tooltip=theme.tooltip("run", "component", "part_of_step", "kernel_us", "step_share_percent", "num_kernels"),
    )
    dots = base.mark_point(filled=True, color=theme.INK, size=40, opacity=1).encode(
        shape=theme.origin_shape(components["origin"])
    )
    numbers = base.mark_text(dx=8, align="left", color=theme.INK, fontSize=10).encode(text="share_text:N")
    left_over = components.filter(pl.col("component") == "unassigned")
    said = ", ".join(f"{share:.1f} %" for share in left_over["step_share_percent"])
    runs = components["run"].unique(maintain_order=True).to_list()
    return (
        alt.layer(bars, dots, numbers, data=written)
        .properties(width=300, height=alt.Step(20))
        .facet(column=alt.Column("run:N", title=None, sort=runs))
        .properties(
            name="component_times",
            title=theme.headline(
                f"{'Kernel time' if known else 'Share of the kernel time'} by component; unassigned: {said} of it",
                subtitle,
            ),
        )
    )


def component_differences(comparison: pl.DataFrame, *, subtitle: str) -> alt.LayerChart:
    """What each component takes more or less in the second of two runs.

    Args:
        comparison: component, before_us, after_us, difference_us, before_share_percent, after_share_percent.
        subtitle: hardware, model and sample.
    """
    columns = (
        "component", "before_us", "after_us", "difference_us", "before_share_percent", "after_share_percent",
    )  # fmt: skip
    require(comparison, (*columns, "origin", "source"), "component_differences")
    base = alt.Chart(comparison).encode(
        x=theme.x("difference_us", scale=alt.Scale(padding=70), axis=alt.Axis(tickCount=4, format=",.4~r")),
        y=alt.Y("component:N", title=title("component"), sort=None),
    )
    bars = base.mark_bar(color=theme.BLUE, opacity=0.85).encode(tooltip=theme.tooltip(*columns))
    dots = base.mark_point(filled=True, color=theme.INK, size=40, opacity=1).encode(
        shape=theme.origin_shape(comparison["origin"])
    )
    text = alt.Text("difference_us:Q", format="+,.4~r")
    more = base.transform_filter("datum.difference_us >= 0").mark_text(dx=8, align="left").encode(text=text)
    less = base.transform_filter("datum.difference_us < 0").mark_text(dx=-8, align="right").encode(text=text)
    total = comparison["difference_us"].sum()
    largest = comparison.sort(pl.col("difference_us").abs(), maintain_order=True).row(-1, named=True)
    return alt.layer(
        bars,
        dots,
        more,
        less,
        name="component_differences",
        height=alt.Step(20),
        title=theme.headline(
            f"After − before: {_signed(total)} µs of kernel time, "
            f"{_signed(largest['difference_us'])} µs in {largest['component']}",
            subtitle,
        ),
    )


def _signed(number: float) -> str:
    """With four significant digits, and never as a power of ten."""
    return f"{float(f'{number:.4g}'):+,f}".rstrip("0").rstrip(".").replace("-", "−")


def _words(part: str) -> str:
    return {"moe": "MoE", "attention_indexer": "attention and indexer"}.get(part, part)
