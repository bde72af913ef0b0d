"""Charts of one decode step: the time that a rate implies, and the weights that it reads."""

from __future__ import annotations

import altair as alt
import polars as pl

from rackbook.charts import layers, theme
from rackbook.tables import require, title

PARTS = ("target experts", "draft experts", "attention, dense, routers", "LM head")


def step_time_by_acceptance(
    line: pl.DataFrame, steps: pl.DataFrame, references: pl.DataFrame, *, headline: str, subtitle: str
) -> alt.LayerChart:
    """Step time that a rate implies, against tokens per step, beside other step times.

    Args:
        line: acceptance_length, step_ms, origin, source: the curve.
        steps: the same, the points on the curve that are named; they share its origin.
        references: reading, step_ms, origin, source: horizontal lines.
        headline: the finding.
        subtitle: hardware, model and sample.
    """
    for frame, where in ((line, "line"), (steps, "steps")):
        require(frame, ("acceptance_length", "step_ms", "origin", "source"), f"step_time_by_acceptance {where}")
    require(references, ("reading", "step_ms", "origin", "source"), "step_time_by_acceptance references")
    last = line["acceptance_length"].max()
    origin = line["origin"].unique().item()
    dash = theme.origin_dash({*line["origin"], *references["origin"]}).legend(symbolStrokeColor=theme.INK)
    x = theme.x("acceptance_length", scale=alt.Scale(domain=[0, last + 0.2], nice=False), axis=alt.Axis(tickMinStep=1))
    highest = max(line["step_ms"].max(), references["step_ms"].max())
    y = theme.y("step_ms", scale=alt.Scale(domain=[0, 1.1 * highest]))
    curve = alt.Chart(line).mark_line(color=theme.BLUE, opacity=0.7).encode(x=x, y=y, strokeDash=dash)
    dots = (
        alt.Chart(steps)
        .mark_point(color=theme.BLUE, filled=True, size=80, opacity=1, shape=theme.ORIGIN_SHAPES[origin])
        .encode(
            x=x,
            y=y,
            tooltip=theme.tooltip("acceptance_length", "step_ms", "formula"),
        )
    )
    numbers = layers.numbers(steps, x, y, "step_ms", ".3~g", dx=-8, dy=-7)
    rules = layers.rules(references, y, ("reading", "step_ms"), color=theme.VERMILLION, width=1.5, dash=dash)
    words = [
        alt.Chart(references.with_columns(pl.lit(last).alias("acceptance_length")))
        .transform_calculate(label="datum.reading + ', ' + format(datum.step_ms, '.3~g') + ' ms'")
        .mark_text(align="right", dy=-7, color=theme.VERMILLION, fontSize=10, **outline)
        .encode(x=x, y=y, text="label:N")
        for outline in layers.OUTLINED
    ]
    return alt.layer(rules, curve, *words, dots, numbers).properties(
        name="step_time_by_acceptance", title=theme.headline(headline, subtitle)
    )


def floor_by_checked_tokens(reads: pl.DataFrame, floors: pl.DataFrame, *, subtitle: str) -> alt.LayerChart:
    """Least time to read the weights of a step, by the tokens that it checks and by part of the model.

    Args:
        reads: component, checked_tokens, expert_overlap, read_gb_per_step, distinct_experts_per_layer, hbm_floor_ms,
            formula, origin, source; the bars are the steps whose tokens choose experts independently.
        floors: checked_tokens, expert_overlap, hbm_floor_ms, origin, source; the ticks are the steps whose tokens all
            choose the same experts.
        subtitle: hardware, model and sample.
    """
    names = ("checked_tokens", "expert_overlap", "read_gb_per_step", "hbm_floor_ms", "origin", "source")
    require(reads, ("component", "distinct_experts_per_layer", "formula", *names), "floor_by_checked_tokens reads")
    require(floors, names, "floor_by_checked_tokens floors")
    x = alt.X("checked_tokens:O", title=title("checked_tokens"), axis=alt.Axis(labelAngle=0))
    y = theme.y("hbm_floor_ms")
    independent = pl.col("expert_overlap") == "independent"
    bars = layers.stacked_bars(
        reads.filter(independent).with_columns(layers.place("component", PARTS).alias("place")),
        x,
        y,
        "place",
        ("component", "checked_tokens", "distinct_experts_per_layer", "read_gb_per_step", "hbm_floor_ms", "formula"),
        color=theme.entity_color("component", PARTS),
    )
    totals = layers.numbers(floors.filter(independent), x, y, "hbm_floor_ms", ".2f", dy=-8)
    ticks = (
        alt.Chart(floors.filter(~independent))
        .mark_tick(color=theme.INK, thickness=2, width=44)
        .encode(x=x, y=y, tooltip=theme.tooltip("expert_overlap", "read_gb_per_step", "hbm_floor_ms"))
    )
    return alt.layer(
        bars,
        ticks,
        totals,
        name="floor_by_checked_tokens",
        width=alt.Step(60),
        title=theme.headline(
            "Least time to read the weights of one step, modelled",
            [subtitle, "Bars: the tokens of a step choose experts independently; dark line: all choose the same"],
        ),
    )


def user_rate_by_server(measured: pl.DataFrame, published: pl.DataFrame, *, subtitle: str) -> alt.LayerChart:
    """One user's measured rate on each server, with the interval over runs, and the published rate as a rule.

    Args:
        measured: bench_stage, user_tok_per_s with bounds (null with one run), acceptance_length; table
            ``single_user_measured``.
        published: table ``single_user``, one row.
        subtitle: hardware, model and sample.
    """
    names = ("bench_stage", "user_tok_per_s", "user_low_tok_per_s", "user_high_tok_per_s", "acceptance_length")
    require(measured, (*names, "origin", "source"), "user_rate_by_server measured")
    require(published, ("interactivity_p90_tok_per_s", "origin", "source"), "user_rate_by_server published")
    servers = measured["bench_stage"].to_list()
    y = alt.Y("bench_stage:N", title=title("bench_stage"), sort=servers)
    x = theme.x("user_tok_per_s", scale=alt.Scale(domainMin=0))
    color = theme.entity_color("bench_stage", servers).legend(None)
    shape = theme.origin_shape([*measured["origin"], *published["origin"]])
    dots = layers.points(measured, x, y, names, color=color, size=100, shape=shape)
    bars = (
        alt.Chart(measured)
        .transform_filter("isValid(datum.user_low_tok_per_s)")
        .mark_rule(strokeWidth=2)
        .encode(x="user_low_tok_per_s:Q", x2="user_high_tok_per_s:Q", y=y, color=color)
    )
    numbers = layers.numbers(measured, "user_tok_per_s:Q", y, "user_tok_per_s", ".0f", dy=-14)
    printed = (
        alt.Chart(published)
        .mark_rule(color=theme.INK, strokeDash=[4, 3])
        .encode(x="interactivity_p90_tok_per_s:Q", tooltip=theme.tooltip("interactivity_p90_tok_per_s"))
    )
    best = measured.drop_nulls("user_tok_per_s").sort("user_tok_per_s", maintain_order=True)
    finding = "No server gave a rate in every run"
    if best.height:
        row = best.row(-1, named=True)
        finding = (
            f"Fastest: {row['user_tok_per_s']:.0f} tokens/s ({row['bench_stage']}); published, dashed: "
            f"P90 {published['interactivity_p90_tok_per_s'][0]:.0f}"
        )
    return alt.layer(
        bars,
        dots,
        numbers,
        printed,
        name="user_rate_by_server",
        height=alt.Step(52),
        title=theme.headline(finding, subtitle),
    )
