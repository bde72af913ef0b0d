"""Charts of what the engine adds to the forward pass."""

from __future__ import annotations

import altair as alt
import polars as pl

from rackbook.charts import layers, theme
from rackbook.tables import require, title

_PARTS = ["GPU", "gap"]
_ENDS = {"forward_ms": "forward pass", "engine_ms": "engine step"}


def step_parts(parts: pl.DataFrame, *, subtitle: str) -> alt.LayerChart:
    """Engine steps as GPU time and gap, stacked, each part labelled with how it is known.

    Args:
        parts: ep_size, step_part, part_ms, bound.
        subtitle: hardware, model and sample.
    """
    require(parts, ("ep_size", "step_part", "part_ms", "bound", "origin", "source", "formula"), "step_parts")
    sign = {"exactly": "", "at most": "≤ ", "at least": "≥ "}
    labels = [f"{sign[bound]}{value:.2f}" for bound, value in parts.select("bound", "part_ms").iter_rows()]
    ordered = (
        parts.with_columns(
            layers.place("step_part", _PARTS).alias("part_order"),
            pl.Series("part_label", labels),
        )
        .sort("ep_size", "part_order")
        .with_columns(layers.middle("part_ms", over="ep_size").alias("middle"))
    )
    y = alt.Y("ep_size:O", title=title("ep_size"))
    bars = layers.stacked_bars(
        ordered,
        theme.x("part_ms", stack="zero"),
        y,
        "part_order",
        ("ep_size", "step_part", "part_ms", "bound", "formula"),
        color=theme.entity_color("step_part", _PARTS),
    )
    present = ordered.filter(pl.col("part_ms") > 0)
    shape = theme.origin_shape(parts["origin"])
    dots = layers.origin_marks(present, "middle:Q", y, y_offset=-8, shape=shape)
    numbers = alt.Chart(present).mark_text(color="white", dy=8).encode(x="middle:Q", y=y, text="part_label:N")
    wide = ordered.filter(pl.col("step_part") == "gap").row(-1, named=True)
    least = "" if wide["bound"] == "exactly" else "at least "
    return alt.layer(
        bars,
        dots,
        numbers,
        name="step_parts",
        height=alt.Step(56),
        title=theme.headline(
            f"At DEP{wide['ep_size']}, {least}{wide['part_ms']:.2f} ms of the step are not GPU time", subtitle
        ),
    )


def gap_growth_candidates(candidates: pl.DataFrame, *, subtitle: str) -> alt.LayerChart:
    """What the gap grew by, beside what a growing synchronisation could have added.

    Args:
        candidates: quantity, growth_ms, assumption; the first row is the growth to be explained.
        subtitle: hardware, model and sample.
    """
    require(candidates, ("quantity", "growth_ms", "assumption", "origin", "source", "formula"), "gap_growth_candidates")
    grown = candidates.row(0, named=True)
    color = alt.condition(alt.datum.quantity == grown["quantity"], alt.value(theme.VERMILLION), alt.value(theme.MUTED))
    base = alt.Chart(candidates).encode(
        x=theme.x("growth_ms", scale=alt.Scale(domainMin=0)),
        y=alt.Y("quantity:N", title=None, sort=candidates["quantity"].to_list(), axis=alt.Axis(labelLimit=340)),
        color=color,
    )
    mark = alt.Chart(candidates.head(1)).mark_rule(color=theme.VERMILLION, opacity=0.5).encode(x="growth_ms:Q")
    stems = base.mark_rule(strokeWidth=3, opacity=0.5).encode(x2=alt.datum(0))
    dots = base.mark_point(filled=True, size=90, opacity=1, strokeWidth=2).encode(
        stroke=color,
        shape=theme.origin_shape(candidates["origin"]),
        tooltip=theme.tooltip("quantity", "growth_ms", "assumption", "formula"),
    )
    numbers = base.mark_text(align="left", dx=10).encode(
        text=alt.Text("growth_ms:Q", format=".2f"), color=alt.value(theme.INK)
    )
    return alt.layer(
        mark,
        stems,
        dots,
        numbers,
        name="gap_growth_candidates",
        height=alt.Step(30),
        title=theme.headline(
            f"The gap grew by {grown['growth_ms']:.2f} ms, beside what a growing synchronisation could add", subtitle
        ),
    )


def gap_by_setting(gaps: pl.DataFrame, *, subtitle: str) -> alt.LayerChart:
    """Measured pairs: the forward pass, the engine step, and the gap between them, by setting.

    Args:
        gaps: setting, forward_ms, engine_ms, gap_ms, gap_share_percent and the bounds on the host work, one row per
            setting; settings of one name on other hardware or with another model share a line.
        subtitle: hardware, model and sample.
    """
    bounds = ("hidden_cpu_low_ms", "hidden_cpu_high_ms", "total_cpu_low_ms", "total_cpu_high_ms", "not_cpu_ms")
    needed = ("setting", "forward_ms", "engine_ms", "gap_ms", "gap_share_percent", *bounds, "source")
    require(gaps, needed, "gap_by_setting")
    ends = gaps.unpivot(on=list(_ENDS), index=["setting", "source"], variable_name="quantity", value_name="part_ms")
    ends = ends.with_columns(pl.col("quantity").replace_strict(_ENDS), pl.lit("measured").alias("origin"))
    y = alt.Y("setting:N", title=title("setting"), sort=gaps["setting"].to_list())
    spans = (
        alt.Chart(gaps)
        .mark_rule(strokeWidth=6, opacity=0.35, color=theme.ENTITY_COLORS["gap"])
        .encode(
            x=alt.X("forward_ms:Q", title=title("part_ms"), scale=alt.Scale(domainMin=0)),
            x2="engine_ms:Q",
            y=y,
            tooltip=theme.tooltip("setting", "gap_ms", "gap_share_percent", *bounds),
        )
    )
    x = theme.x("part_ms", scale=alt.Scale(domainMin=0))
    color = theme.entity_color("quantity", list(_ENDS.values()))
    dots = layers.points(ends, x, y, ("setting", "quantity", "part_ms"), color=color)
    labels = layers.numbers(gaps, "engine_ms:Q", y, "gap_ms", "+.2f", dy=-14)
    largest = gaps.sort("gap_share_percent").row(-1, named=True)
    return alt.layer(
        spans,
        dots,
        labels,
        name="gap_by_setting",
        height=alt.Step(44),
        title=theme.headline(
            f"The engine adds {largest['gap_ms']:.2f} ms at {largest['setting']}, "
            f"{largest['gap_share_percent']:.0f} % of the step, the largest share",
            subtitle,
        ),
    )
