"""Charts of a decode step over the expert-parallel size: its time, its throughput, and what bounds it."""

from __future__ import annotations

from typing import Any

import altair as alt
import polars as pl

from rackbook.charts import layers, theme
from rackbook.tables import require, title

COMPONENTS = ("target MoE", "whole step")
WEIGHT_PARTS = (
    "experts", "scales", "attention, dense, routers", "embedding, LM head", "rest of the sum", "all weights",
)  # fmt: skip


def _size_axis(sizes: pl.Series) -> alt.X:
    smallest, largest = sizes.min(), sizes.max()
    return theme.x(
        "ep_size",
        scale=alt.Scale(type="log", base=2, domain=[smallest / 1.15, largest * 1.15], nice=False),
        axis=alt.Axis(values=sizes.unique().sort().to_list(), format="d"),
    )


def _ends(sizes: pl.DataFrame) -> tuple[dict[str, Any], dict[str, Any]]:
    """The smallest size, and the largest that is not modelled, or the largest where all others are."""
    ordered = sizes.sort("ep_size")
    known = ordered[1:].filter(pl.col("origin") != "modelled")
    return ordered.row(0, named=True), (ordered if known.is_empty() else known).row(-1, named=True)


def step_time_by_ep_size(curve: pl.DataFrame, points: pl.DataFrame, *, subtitle: str) -> alt.LayerChart:
    """Time of the MoE part and of the whole step against the expert-parallel size.

    Args:
        curve: ep_size, component ("target MoE" or "whole step"), step_ms, origin, source: the lines.
        points: the same, at the sizes that are named.
        subtitle: hardware, model and sample.
    """
    for frame, where in ((curve, "curve"), (points, "points")):
        require(frame, ("ep_size", "component", "step_ms", "origin", "source"), f"step_time_by_ep_size {where}")
    x = _size_axis(points["ep_size"])
    y = theme.y("step_ms", scale=alt.Scale(domainMin=0))
    color = theme.entity_color("component", COMPONENTS)
    lines = (
        alt.Chart(curve)
        .mark_line(opacity=0.6)
        .encode(
            x=x,
            y=y,
            color=color,
            strokeDash=theme.origin_dash(curve["origin"]).legend(symbolStrokeColor=theme.INK),
        )
    )
    dots = layers.points(points, x, y, ("component", "ep_size", "step_ms"), color=color)
    above = points.filter(pl.col("origin") != "measured")
    numbers = layers.numbers(above, x, y, "step_ms", ".1f", dy=-13).encode(detail="component:N")
    measured = points.filter(pl.col("origin") == "measured")
    if measured.height:
        numbers += layers.numbers(measured, x, y, "step_ms", ".1f", dy=16).encode(detail="component:N")
    smallest, largest = _ends(points.filter(pl.col("component") == "whole step"))
    return alt.layer(
        lines,
        dots,
        numbers,
        name="step_time_by_ep_size",
        title=theme.headline(
            f"From DEP{smallest['ep_size']} to DEP{largest['ep_size']} the step goes "
            f"from {smallest['step_ms']:.1f} to {largest['step_ms']:.1f} ms",
            subtitle,
        ),
    )


def throughput_by_ep_size(
    curve: pl.DataFrame, sizes: pl.DataFrame, greatest_ratio: float, *, subtitle: str
) -> alt.LayerChart:
    """Throughput per GPU against the expert-parallel size, below what endlessly many GPUs would give.

    Args:
        curve: ep_size, throughput_per_gpu_ratio, origin, source: the line.
        sizes: the same with step_ms and output_tok_per_s_per_gpu, at the sizes that are named.
        greatest_ratio: the ratio that the curve approaches.
        subtitle: hardware, model and sample.
    """
    names = ("ep_size", "throughput_per_gpu_ratio", "origin", "source")
    require(curve, names, "throughput_by_ep_size curve")
    require(sizes, (*names, "step_ms", "output_tok_per_s_per_gpu"), "throughput_by_ep_size sizes")
    x = _size_axis(sizes["ep_size"])
    y = theme.y("throughput_per_gpu_ratio", scale=alt.Scale(domain=[0, 1.1 * greatest_ratio], nice=False))
    line = (
        alt.Chart(curve.filter(pl.col("ep_size") <= sizes["ep_size"].max()))
        .mark_line(color=theme.PURPLE, opacity=0.6)
        .encode(x=x, y=y, strokeDash=theme.origin_dash(curve["origin"]))
    )
    shown = ("ep_size", "throughput_per_gpu_ratio", "step_ms", "output_tok_per_s_per_gpu")
    dots = layers.points(sizes, x, y, shown, color=theme.PURPLE)
    numbers = layers.numbers(sizes, x, y, "throughput_per_gpu_ratio", ".2f", dy=18)
    limit = pl.DataFrame({"throughput_per_gpu_ratio": [greatest_ratio], "ep_size": [sizes["ep_size"].min()]})
    rule = alt.Chart(limit).mark_rule(color=theme.MUTED, strokeDash=theme.ORIGIN_DASHES["modelled"]).encode(y=y)
    words = (
        alt.Chart(limit)
        .mark_text(
            align="left", dy=-8, color=theme.MUTED, text=f"limit for endlessly many GPUs: {greatest_ratio:.2f} ×"
        )
        .encode(x=x, y=y)
    )
    smallest, largest = _ends(sizes)
    return alt.layer(
        rule,
        words,
        line,
        dots,
        numbers,
        name="throughput_by_ep_size",
        title=theme.headline(
            f"DEP{largest['ep_size']} gives {largest['throughput_per_gpu_ratio']:.2f} times the throughput per GPU "
            f"of DEP{smallest['ep_size']}",
            subtitle,
        ),
    )


def gain_per_doubling(doublings: pl.DataFrame, threshold_percent: float, *, subtitle: str) -> alt.LayerChart:
    """What each doubling of the expert-parallel size gains per GPU; those below a threshold are marked.

    Args:
        doublings: doubling, baseline_ep_size, ep_size, gain_per_doubling_percent, below_threshold, gpu_saving_ms,
            origin, source.
        threshold_percent: the threshold.
        subtitle: hardware, model and sample.
    """
    require(
        doublings,
        (
            "doubling", "baseline_ep_size", "ep_size", "gain_per_doubling_percent", "below_threshold", "gpu_saving_ms",
            "origin", "source",
        ),
        "gain_per_doubling",
    )  # fmt: skip
    x = alt.X("doubling:N", title=title("doubling"), sort=doublings["doubling"].to_list(), axis=alt.Axis(labelAngle=0))
    y = theme.y("gain_per_doubling_percent")
    bars = (
        alt.Chart(doublings)
        .mark_bar(stroke=theme.INK, strokeDash=theme.ORIGIN_DASHES["modelled"])
        .encode(
            x=x,
            y=y,
            color=alt.Color(
                "below_threshold:N",
                title=title("below_threshold"),
                scale=alt.Scale(domain=[False, True], range=[theme.PURPLE, theme.GREY]),
                legend=alt.Legend(labelExpr="datum.label == 'true' ? 'yes' : 'no'"),
            ),
            tooltip=theme.tooltip("doubling", "gain_per_doubling_percent", "gpu_saving_ms"),
        )
    )
    numbers = layers.numbers(doublings, x, y, "gain_per_doubling_percent", ".1f", dy=-8)
    rule = (
        alt.Chart(pl.DataFrame({"gain_per_doubling_percent": [threshold_percent]}))
        .mark_rule(color=theme.VERMILLION, strokeWidth=1.5)
        .encode(y=y)
    )
    below = doublings.filter(pl.col("below_threshold")).sort("ep_size")
    if below.is_empty():
        finding = f"No doubling gains less than {threshold_percent:g} % per GPU"
    else:
        first = below.row(0, named=True)
        finding = (
            f"DEP{first['baseline_ep_size']} to DEP{first['ep_size']} is the first to gain less than "
            f"{threshold_percent:g} % per GPU and doubling"
        )
    return alt.layer(
        bars, rule, numbers, name="gain_per_doubling", width=alt.Step(90), title=theme.headline(finding, subtitle)
    )


def moe_time_over_reading(roofline: pl.DataFrame, *, subtitle: str) -> alt.LayerChart:
    """MoE time at each size as the least time to read the experts and what is left besides.

    Args:
        roofline: ep_size, hbm_floor_ms, moe_ms, beside_read_ms, hbm_use_percent, moe_origin, origin, source, formula.
            The points are the MoE times, so they show moe_origin. Where the reading takes longer than the whole, its
            bar stands out above the point, and the title says so.
        subtitle: hardware, model, bandwidth and sample.
    """
    require(
        roofline,
        (
            "ep_size", "hbm_floor_ms", "moe_ms", "beside_read_ms", "hbm_use_percent", "moe_origin", "origin", "source",
            "formula",
        ),
        "moe_time_over_reading",
    )  # fmt: skip
    times = roofline.with_columns(pl.col("moe_origin").alias("origin"))
    x = alt.X("ep_size:O", title=title("ep_size"), axis=alt.Axis(labelAngle=0))
    shown = ("ep_size", "moe_ms", "hbm_floor_ms", "beside_read_ms", "hbm_use_percent", "formula")
    parts = pl.concat(
        [
            roofline.with_columns(pl.lit("reading the experts").alias("moe_part"), pl.lit(0.0).alias("bottom")),
            roofline.filter(pl.col("beside_read_ms") > 0).with_columns(
                pl.lit("everything else").alias("moe_part"), pl.col("hbm_floor_ms").alias("bottom")
            ),
        ]
    ).with_columns(
        pl.when(pl.col("moe_part") == "reading the experts").then("hbm_floor_ms").otherwise("moe_ms").alias("top")
    )
    bars = (
        alt.Chart(parts)
        .mark_bar()
        .encode(
            x=x,
            y=alt.Y("bottom:Q", title=title("moe_ms")),
            y2="top:Q",
            color=theme.entity_color("moe_part", ("reading the experts", "everything else")),
            tooltip=theme.tooltip(*shown),
        )
    )
    y = theme.y("moe_ms")
    totals = layers.points(times, x, y, shown, color=theme.INK)
    besides = (
        alt.Chart(roofline.with_columns(pl.max_horizontal("moe_ms", "hbm_floor_ms").alias("top")))
        .mark_text(dy=-14, color=theme.INK)
        .transform_calculate(label="format(datum.beside_read_ms, '.2f') + ' ms'")
        .encode(x=x, y=alt.Y("top:Q", title=title("moe_ms")), text="label:N")
    )
    return alt.layer(
        bars,
        totals,
        besides,
        name="moe_time_over_reading",
        width=alt.Step(64),
        title=theme.headline(
            _beside_reading(times),
            [
                subtitle,
                "Reading: modelled, every touched expert once per step; figures above the bars: what is left besides",
            ],
        ),
    )


def _beside_reading(times: pl.DataFrame) -> str:
    """The finding of :func:`moe_time_over_reading`: which way the rest goes, or where there is none."""
    over = times.filter(pl.col("beside_read_ms") < 0).sort("ep_size")
    if over.height:
        printed = over.filter(pl.col("origin") == "published")
        shown, word = (over, "modelled") if printed.is_empty() else (printed, "printed")
        sizes = ", ".join(f"DEP{size}" for size in shown["ep_size"])
        return f"The memory floor is above the {word} MoE time at {sizes}"
    first, last = _ends(times)
    moved = "grows" if last["beside_read_ms"] > first["beside_read_ms"] else "shrinks"
    return (
        f"Beside the reading, the MoE time {moved} from {first['beside_read_ms']:.2f} ms at DEP{first['ep_size']} "
        f"to {last['beside_read_ms']:.2f} ms at DEP{last['ep_size']}"
    )


def experts_read_by_load(coverage: pl.DataFrame, chosen: pl.DataFrame, *, subtitle: str) -> alt.LayerChart:
    """Share of the routed experts that a step reads, against the load, one line per expert-parallel size.

    Args:
        coverage: ep_size, requests_per_rank, checked_tokens, experts_touched_percent, popularity_percent, origin,
            source: the lines.
        chosen: the same at one load: the points.
        subtitle: model and assumptions.
    """
    names = (
        "ep_size", "requests_per_rank", "checked_tokens", "experts_touched_percent", "popularity_percent", "origin",
        "source",
    )  # fmt: skip
    for frame, where in ((coverage, "coverage"), (chosen, "chosen")):
        require(frame, names, f"experts_read_by_load {where}")
    loads = [
        load for load in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024) if load <= coverage["requests_per_rank"].max()
    ]
    x = theme.x(
        "requests_per_rank", scale=alt.Scale(type="log", base=2, nice=False), axis=alt.Axis(values=loads, format="d")
    )
    y = theme.y("experts_touched_percent", scale=alt.Scale(domain=[0, 105], nice=False))
    color = alt.Color("ep_size:O", title=title("ep_size"), scale=alt.Scale(scheme="viridis"), sort="ascending")
    dash = theme.origin_dash(coverage["origin"]).legend(symbolStrokeColor=theme.INK)
    lines = layers.lines(coverage, x, y, names[:5], color=color, dash=dash, opacity=0.9)
    dots = (
        alt.Chart(chosen)
        .mark_point(filled=True, size=80, opacity=1, shape=theme.ORIGIN_SHAPES["modelled"])
        .encode(
            x=x,
            y=y,
            color=color,
            tooltip=theme.tooltip(*names[:5]),
        )
    )
    rule = alt.Chart(chosen.head(1)).mark_rule(color=theme.MUTED).encode(x=x)
    least = chosen.sort("experts_touched_percent").row(0, named=True)
    share = least["experts_touched_percent"]
    words = "every expert" if share > 99.995 else f"{share:.1f} % of the experts"
    return alt.layer(
        rule,
        lines,
        dots,
        name="experts_read_by_load",
        title=theme.headline(
            f"At {least['requests_per_rank']} requests per GPU a step of DEP{least['ep_size']} reads {words}", subtitle
        ),
    )


def weights_per_gpu(memory: pl.DataFrame, *, subtitle: str) -> alt.LayerChart:
    """Weights on each GPU by where the figure comes from, in parts.

    Args:
        memory: reading, weight_part, gib_per_gpu, origin, source, formula; a reading has one origin.
        subtitle: model and parallel size.
    """
    require(memory, ("reading", "weight_part", "gib_per_gpu", "origin", "source", "formula"), "weights_per_gpu")
    order = memory["reading"].unique(maintain_order=True).to_list()
    y = alt.Y("reading:N", title=None, sort=order, axis=alt.Axis(labelLimit=340))
    bars = layers.stacked_bars(
        memory.with_columns(layers.place("weight_part", WEIGHT_PARTS).alias("place")),
        theme.x("gib_per_gpu", stack="zero"),
        y,
        "place",
        ("reading", "weight_part", "gib_per_gpu", "formula"),
        color=theme.entity_color("weight_part", theme.drawn(memory["weight_part"], WEIGHT_PARTS)),
    )
    sums = memory.group_by("reading", "origin", maintain_order=True).agg(pl.col("gib_per_gpu").sum())
    x = theme.x("gib_per_gpu")
    marks = layers.origin_marks(sums, x, y, size=70)
    numbers = layers.numbers(sums, x, y, "gib_per_gpu", ".2f", dx=9)
    totals = dict(sums.select("reading", "gib_per_gpu").iter_rows())
    return alt.layer(
        bars,
        marks,
        numbers,
        name="weights_per_gpu",
        height=alt.Step(38),
        title=theme.headline(
            f"{order[0].capitalize()} {totals[order[0]]:g} GiB of weights per GPU, "
            f"{totals[order[1]]:.2f} GiB from the {order[1]}",
            subtitle,
        ),
    )
