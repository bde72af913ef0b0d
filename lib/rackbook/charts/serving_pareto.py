"""Charts of serving points: throughput against interactivity, the GPUs behind it, and what a rate counts."""

from __future__ import annotations

import math

import altair as alt
import polars as pl

from rackbook.charts import layers, theme
from rackbook.tables import require, title

_THOUSANDS = "datum.value >= 1e6 ? format(datum.value / 1e6, ',~g') + 'M' : format(datum.value / 1e3, ',~g') + 'K'"


def throughput_by_interactivity(points: pl.DataFrame, *, subtitle: str | list[str]) -> alt.LayerChart:
    """Throughput per GPU against interactivity: all points, and a frontier through the unbeaten ones of each curve.

    Args:
        points: interactivity_p90_tok_per_s, total_tok_per_s_per_gpu, engine, setting, stage, curve, on_frontier,
            hardware, workload, tokens_counted, acceptance_kind, origin, source. Rows without a value are not drawn.
        subtitle: hardware, sample and what the points of a curve share; a list for several lines.
    """
    names = ("interactivity_p90_tok_per_s", "total_tok_per_s_per_gpu", "engine", "setting", "stage", "curve")
    require(points, (*names, "on_frontier", "origin", "source"), "throughput_by_interactivity")
    drawn = points.drop_nulls(["interactivity_p90_tok_per_s", "total_tok_per_s_per_gpu"])
    x = theme.x("interactivity_p90_tok_per_s", scale=alt.Scale(domainMin=0, nice=True))
    lowest, highest = drawn["total_tok_per_s_per_gpu"].min(), drawn["total_tok_per_s_per_gpu"].max()
    decades = range(math.floor(math.log10(lowest)) - 1, math.ceil(math.log10(highest)) + 1)
    y = theme.y(
        "total_tok_per_s_per_gpu",
        scale=alt.Scale(type="log", domain=[lowest / 1.6, highest * 1.4], nice=False),
        axis=alt.Axis(labelExpr=_THOUSANDS, values=[digit * 10.0**power for power in decades for digit in (1, 2, 5)]),
    )
    color = _engine_color(drawn)
    frontier = (
        alt.Chart(drawn.filter("on_frontier"))
        .mark_line(interpolate="step-before", strokeWidth=1.5, opacity=0.6)
        .encode(x=x, y=y, color=color, detail="curve:N", order="interactivity_p90_tok_per_s:Q")
    )
    pairs = (
        alt.Chart(drawn.drop_nulls("stage"))
        .mark_line(color=theme.MUTED, strokeWidth=1, opacity=0.6)
        .encode(x=x, y=y, detail=["source:N", "setting:N"], order=alt.Order("stage:N", sort="descending"))
    )
    dots = (
        alt.Chart(drawn)
        .mark_point(filled=True, size=90)
        .encode(
            x=x,
            y=y,
            color=color,
            shape=theme.origin_shape(drawn["origin"]),
            opacity=alt.condition("datum.on_frontier", alt.value(1), alt.value(0.35)),
            tooltip=theme.tooltip(
                "setting", "stage", "curve", "on_frontier", "total_tok_per_s_per_gpu", "interactivity_p90_tok_per_s",
                "engine", "hardware", "workload", "concurrency", "tokens_counted", "interactivity_definition",
                "acceptance_kind",
            ),
        )
    )  # fmt: skip
    return alt.layer(
        pairs,
        frontier,
        dots,
        _curve_labels(drawn, x, y),
        name="throughput_by_interactivity",
        width=520,
        height=340,
        title=theme.headline("Throughput per GPU against the speed of a user: up and to the right is better", subtitle),
    )


def gpus_by_deployment(deployments: pl.DataFrame, gpus: pl.DataFrame) -> alt.HConcatChart:
    """The GPUs of each P/D deployment by phase, and how many of its clients can decode at once.

    Args:
        deployments: deployment, concurrency, num_gpus, num_decode_seats, seats_per_client_percent, origin, source.
        gpus: the same deployments in long form: deployment, phase, num_gpus, origin, source.
    """
    require(gpus, ("deployment", "phase", "num_gpus", "origin", "source"), "gpus_by_deployment gpus")
    require(
        deployments,
        ("deployment", "concurrency", "num_gpus", "num_decode_seats", "seats_per_client_percent", "origin", "source"),
        "gpus_by_deployment deployments",
    )
    y = alt.Y("deployment:N", sort=deployments["deployment"].to_list(), title="Prefill engines → decode engine")
    bars = (
        alt.Chart(gpus)
        .mark_bar()
        .encode(
            x=theme.x(
                "num_gpus", scale=alt.Scale(domain=[0, 72], nice=False), axis=alt.Axis(values=[0, 16, 32, 48, 64, 72])
            ),
            y=y,
            color=theme.entity_color("phase", ["prefill", "decode"]),
            order=alt.Order("phase:N", sort="descending"),
            tooltip=theme.tooltip("deployment", "phase", "num_gpus", "formula"),
        )
    )
    totals = (
        alt.Chart(deployments)
        .mark_text(align="left", dx=5, color=theme.INK)
        .encode(x=theme.x("num_gpus"), y=y, text="num_gpus:Q")
    )
    seats = (
        alt.Chart(deployments.with_columns(_seats().alias("label")))
        .mark_bar(color=theme.ENTITY_COLORS["decode"])
        .encode(
            x=theme.x("seats_per_client_percent", scale=alt.Scale(domain=[0, 100])),
            y=alt.Y("deployment:N", sort=deployments["deployment"].to_list(), axis=None),
            tooltip=theme.tooltip("deployment", "concurrency", "num_decode_seats", "seats_per_client_percent"),
        )
    )
    numbers = seats.mark_text(align="left", dx=5, color=theme.INK).encode(text="label:N")
    right = alt.layer(seats, numbers, width=260, height=alt.Step(34))
    left = alt.layer(bars, totals, width=260, height=alt.Step(34))
    return alt.hconcat(left, right).properties(
        name="gpus_by_deployment",
        title=theme.headline(
            "One rack of 72 GPUs: what each deployment uses, and the clients that can decode at once",
            f"{_one(deployments, 'hardware')}, {_one(deployments, 'model')}, AgentX; "
            "derived from the engine counts and limits of the vLLM recipe",
        ),
    )


def two_rates_per_user(rates: pl.DataFrame, *, subtitle: str) -> alt.LayerChart:
    """The two quantities that are both called tokens/s per user, point by point.

    Args:
        rates: setting, stage, definition, user_tok_per_s, concurrency, num_gpus, engine, formula, origin, source.
        subtitle: hardware, model and sample.
    """
    names = ("setting", "stage", "definition", "user_tok_per_s", "concurrency", "num_gpus", "engine")
    require(rates, (*names, "formula", "origin", "source"), "two_rates_per_user")
    drawn = rates.with_columns(
        pl.concat_str("engine", "setting", "stage", separator=", ", ignore_nulls=True).alias("label")
    )
    y = alt.Y(
        "label:N", sort=drawn["label"].unique(maintain_order=True).to_list(), title=None, axis=alt.Axis(labelLimit=320)
    )
    x = theme.x(
        "user_tok_per_s",
        scale=alt.Scale(type="log", domain=[10, 10_000]),
        axis=alt.Axis(format=",", values=[10, 100, 1_000, 10_000]),
    )
    ends = alt.Chart(drawn).mark_line(color=theme.GRID, strokeWidth=3).encode(x=x, y=y, detail="label:N")
    color = alt.Color(
        "definition:N",
        title=title("definition"),
        sort=drawn["definition"].unique(maintain_order=True).to_list(),
        scale=alt.Scale(range=[theme.INK, theme.PURPLE]),
    )
    dots = layers.points(drawn, x, y, (*names, "formula"), color=color)
    numbers = layers.numbers(drawn, x, y, "user_tok_per_s", ",.0f", dy=-12)
    return alt.layer(
        ends,
        dots,
        numbers,
        name="two_rates_per_user",
        width=420,
        height=alt.Step(38),
        title=theme.headline("Two quantities, one name: tokens/s per user", subtitle),
    )


def readings_of_tokens(readings: pl.DataFrame, *, subtitle: str) -> alt.LayerChart:
    """The printed rate beside the rates that other figures allow for each reading of "tokens".

    Args:
        readings: reading, tok_per_s_per_gpu, formula, origin, source; drawn in row order.
        subtitle: hardware, model and sample.
    """
    require(readings, ("reading", "tok_per_s_per_gpu", "formula", "origin", "source"), "readings_of_tokens")
    printed, *others = readings["tok_per_s_per_gpu"].sort(descending=True)
    x = theme.x(
        "tok_per_s_per_gpu",
        scale=alt.Scale(type="log", domain=[5_000, 2_000_000]),
        axis=alt.Axis(labelExpr=_THOUSANDS, values=[1e4, 1e5, 1e6]),
    )
    y = alt.Y("reading:N", sort=readings["reading"].to_list(), title=None, axis=alt.Axis(labelLimit=320))
    dots = layers.points(readings, x, y, ("reading", "tok_per_s_per_gpu", "formula"), color=theme.BLUE, size=100)
    numbers = layers.numbers(readings, x, y, "tok_per_s_per_gpu", ",.0f", dx=9)
    return alt.layer(
        dots,
        numbers,
        name="readings_of_tokens",
        width=420,
        height=alt.Step(32),
        title=theme.headline(
            f"The printed rate is {printed / max(others):.1f} times the most that new or generated tokens allow",
            subtitle,
        ),
    )


def _curve_labels(drawn: pl.DataFrame, x: alt.X, y: alt.Y) -> alt.LayerChart:
    """One label per curve, at its fastest point; above and below in turn, so that neighbours do not collide."""
    name = (
        pl.when(pl.col("setting").n_unique().over("curve") == 1)
        .then(pl.format("{}, {}", "engine", "setting"))
        .when(pl.col("engine").n_unique().over("curve") == 1)
        .then(pl.format("{}, {} points", "engine", pl.len().over("curve")))
        .otherwise(pl.format("{} points, pooled", pl.len().over("curve")))
    )
    fastest = (
        drawn.with_columns(name.alias("label"))
        .sort("interactivity_p90_tok_per_s", "total_tok_per_s_per_gpu", descending=[True, False])
        .unique("curve", keep="first", maintain_order=True)
        .with_row_index("turn")
    )
    late = pl.col("interactivity_p90_tok_per_s") > 0.6 * drawn["interactivity_p90_tok_per_s"].max()
    return alt.layer(
        *(
            alt.Chart(fastest.filter((pl.col("turn") % 2 == turn) & (late if align == "right" else ~late)))
            .mark_text(align=align, dy=dy, dx=dx, color=theme.INK, fontSize=10, **outline)
            .encode(x=x, y=y, text="label:N")
            for turn, dy in ((0, -14), (1, 16))
            for align, dx in (("left", -6), ("right", 6))
            for outline in layers.OUTLINED
        )
    )


def _engine_color(points: pl.DataFrame) -> alt.Color:
    engines = points["engine"].unique(maintain_order=True).to_list()
    return alt.Color(
        "engine:N",
        title=title("engine"),
        legend=alt.Legend(symbolOpacity=1),
        scale=alt.Scale(domain=engines, range=[theme.ENTITY_COLORS.get(e, theme.PURPLE) for e in engines]),
    )


def _one(frame: pl.DataFrame, name: str) -> str:
    return ", ".join(frame[name].unique(maintain_order=True).to_list())


def _seats() -> pl.Expr:
    words = pl.struct("num_decode_seats", "concurrency")
    return words.map_elements(lambda row: f"{row['num_decode_seats']:,} of {row['concurrency']:,}", pl.String)
