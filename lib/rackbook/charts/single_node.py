"""Charts of one node: throughput by engine, the time of a request, steps and CUDA graphs, bytes of the KV cache."""

from __future__ import annotations

import altair as alt
import polars as pl

from rackbook.charts import layers, theme
from rackbook.tables import require, title

ENGINES = ("vLLM", "DeepInfer")
REQUEST_PARTS = ("decoding", "waiting and prefill")


def measured_output_by_load(measured: pl.DataFrame, *, subtitle: str) -> alt.LayerChart:
    """Output throughput of one measured run, load by load, with intervals over the client's runs.

    Args:
        measured: table ``serving_measured``, one run.
        subtitle: hardware, model and sample.
    """
    names = (
        "bench_stage", "concurrency", "input_tokens", "output_tokens", "repeats", "num_failed", "output_tok_per_s",
        "output_low_tok_per_s", "output_high_tok_per_s",
    )  # fmt: skip
    require(measured, (*names, "origin", "source"), "measured_output_by_load")
    several = measured["bench_stage"].n_unique() > 1
    load = pl.format("{} → {}, {} at once", "input_tokens", "output_tokens", "concurrency")
    rows = measured.with_columns((pl.format("{}: {}", "bench_stage", load) if several else load).alias("workload"))
    y = alt.Y("workload:N", title=title("workload"), sort=rows["workload"].to_list(), axis=alt.Axis(labelLimit=260))
    x = theme.x("output_tok_per_s", scale=alt.Scale(domainMin=0))
    spread = (
        alt.Chart(rows)
        .mark_rule(color=theme.ENTITY_COLORS["vLLM"], strokeWidth=2, opacity=0.6, clip=True)
        .encode(x="output_low_tok_per_s:Q", x2="output_high_tok_per_s:Q", y=y)
    )
    dots = layers.points(rows, x, y, ("workload", *names[1:]), color=theme.ENTITY_COLORS["vLLM"], size=80)
    labels = layers.numbers(rows, x, y, "output_tok_per_s", ",.0f", dy=-12)
    measured_rows = rows.drop_nulls("output_tok_per_s").sort("output_tok_per_s")
    text = "No load was measured in every repeat"
    if not measured_rows.is_empty():
        best = measured_rows.row(-1, named=True)
        text = f"Most output tokens, {best['output_tok_per_s']:,.0f} per second, at {best['workload']}"
    return alt.layer(
        spread, dots, labels, name="measured_output_by_load", height=alt.Step(40), title=theme.headline(text, subtitle)
    )


def output_by_engine(runs: pl.DataFrame, *, subtitle: str) -> alt.LayerChart:
    """Output throughput of each engine at each pair of lengths; what is not printed is said in its place.

    Args:
        runs: engine, workload, output_tok_per_s (null where missing), tpot_ms, missing_reason, origin, source.
        subtitle: hardware, model and sample.
    """
    names = ("engine", "workload", "output_tok_per_s", "tpot_ms", "missing_reason")
    require(runs, (*names, "origin", "source"), "output_by_engine")
    order = runs["workload"].unique(maintain_order=True).to_list()
    x = alt.X(
        "workload:N", title=f"{title('workload')}, input → output tokens", sort=order, axis=alt.Axis(labelAngle=0)
    )
    offset = alt.XOffset("engine:N", sort=list(ENGINES))
    color = theme.entity_color("engine", ENGINES)
    present = runs.filter(pl.col("output_tok_per_s").is_not_null())
    absent = runs.filter(pl.col("output_tok_per_s").is_null()).with_columns(pl.lit(0.0).alias("output_tok_per_s"))
    y = theme.y("output_tok_per_s", axis=alt.Axis(format="~s"))
    bars = (
        alt.Chart(present)
        .mark_bar()
        .encode(
            x=x,
            y=y,
            xOffset=offset,
            color=color,
            tooltip=theme.tooltip("engine", "workload", "output_tok_per_s", "tpot_ms"),
        )
    )
    dots = layers.origin_marks(present, x, y).encode(xOffset=offset)
    numbers = layers.numbers(present, x, y, "output_tok_per_s", ",.0f", dy=-11).encode(xOffset=offset)
    gaps = (
        alt.Chart(absent)
        .mark_text(angle=270, align="left", dx=6, color=theme.MUTED, text="not printed")
        .encode(x=x, y=y, xOffset=offset, tooltip=theme.tooltip("engine", "workload", "missing_reason"))
    )
    pair = dict(present.group_by("workload").len().filter(pl.col("len") == len(ENGINES)).iter_rows())
    finding = "Output throughput on one node"
    if pair:
        both = present.filter(pl.col("workload") == next(iter(pair)))
        rate = dict(both.select("engine", "output_tok_per_s").iter_rows())
        finding = (
            f"At {next(iter(pair))} vLLM generates {rate['vLLM'] / rate['DeepInfer']:.2f} times as much as DeepInfer"
        )
    return alt.layer(
        bars, dots, numbers, gaps, name="output_by_engine", width=alt.Step(56), title=theme.headline(finding, subtitle)
    )


def request_time_by_part(parts: pl.DataFrame, loop: pl.DataFrame, *, subtitle: str) -> alt.LayerChart:
    """The time that a request takes, in decoding and the rest, with what its prefill alone would need.

    Args:
        parts: workload, request_part ("decoding" or "waiting and prefill"), request_s, origin, source, formula.
        loop: workload, request_s, decode_s, other_s, prefill_s, num_decoding, concurrency, origin, source.
        subtitle: hardware, model and sample.
    """
    require(
        parts, ("workload", "request_part", "request_s", "origin", "source", "formula"), "request_time_by_part parts"
    )
    names = ("workload", "request_s", "decode_s", "other_s", "prefill_s", "num_decoding", "concurrency")
    require(loop, (*names, "origin", "source"), "request_time_by_part loop")
    order = loop["workload"].to_list()
    y = alt.Y("workload:N", title=title("workload"), sort=order)
    x = theme.x("request_s", stack="zero")
    ordered = (
        parts.with_columns(layers.place("request_part", REQUEST_PARTS).alias("place"))
        .sort("place")
        .with_columns(layers.middle("request_s", over="workload").alias("middle"))
    )
    shown = ("workload", "request_part", "request_s", "formula")
    color = theme.entity_color("request_part", REQUEST_PARTS)
    bars = layers.stacked_bars(ordered, x, y, "place", shown, color=color)
    middle = alt.X("middle:Q", title=title("request_s"))
    numbers = layers.numbers(ordered, middle, y, "request_s", ".1f", dy=-17)
    ends = loop.with_columns((pl.col("decode_s") + pl.col("prefill_s")).alias("prefill_end"))
    prefill = (
        alt.Chart(ends)
        .mark_bar(
            color="transparent", stroke=theme.INK, strokeWidth=1.5, strokeDash=theme.ORIGIN_DASHES["derived"], size=12
        )
        .encode(
            x=alt.X("decode_s:Q", title=title("request_s")),
            x2="prefill_end:Q",
            y=y,
            tooltip=theme.tooltip(*names),
        )
    )
    first = loop.row(0, named=True)
    return alt.layer(
        bars,
        prefill,
        numbers,
        name="request_time_by_part",
        height=alt.Step(64),
        title=theme.headline(
            f"At {first['workload']} up to {first['other_s']:.1f} of the {first['request_s']:.1f} s of a request "
            "are not decoding",
            [subtitle, "Derived; dotted frame: prefill of one prompt of every request at the printed prefill rate"],
        ),
    )


def step_tokens_by_new_prompts(sizes: pl.DataFrame, ceilings: pl.DataFrame, *, subtitle: str) -> alt.LayerChart:
    """Tokens of a step by the prompts that start in it, against the ceilings of the CUDA graphs.

    Args:
        sizes: num_new_prompts, step_tokens, graph_cover (the smallest ceiling that covers the step, or "none"), origin,
            source, formula.
        ceilings: max_capture_tokens, covered_low_percent, covered_high_percent, origin, source.
        subtitle: hardware, model and sample.
    """
    require(
        sizes,
        ("num_new_prompts", "step_tokens", "graph_cover", "origin", "source", "formula"),
        "step_tokens_by_new_prompts sizes",
    )
    names = ("max_capture_tokens", "covered_low_percent", "covered_high_percent")
    require(ceilings, (*names, "origin", "source"), "step_tokens_by_new_prompts ceilings")
    covers = [f"{c:,}" for c in ceilings["max_capture_tokens"]]
    shades = [theme.SKY, theme.BLUE, theme.GREEN, theme.YELLOW, theme.PURPLE]
    domain = [c for c in (*covers, "none") if c in sizes["graph_cover"].to_list()]
    colors = [theme.GREY if c == "none" else shades[covers.index(c) % len(shades)] for c in domain]
    x = alt.X("num_new_prompts:O", title=title("num_new_prompts"), axis=alt.Axis(labelAngle=0))
    y = theme.y("step_tokens")
    bars = (
        alt.Chart(sizes)
        .mark_bar()
        .encode(
            x=x,
            y=y,
            color=alt.Color(
                "graph_cover:N",
                title=title("graph_cover"),
                scale=alt.Scale(domain=domain, range=colors),
                legend=alt.Legend(orient="bottom"),
            ),
            tooltip=theme.tooltip("num_new_prompts", "step_tokens", "graph_cover", "formula"),
        )
    )
    numbers = layers.numbers(sizes, x, y, "step_tokens", ",", dy=-7, font_size=10)
    rules = (
        alt.Chart(ceilings)
        .mark_rule(color=theme.VERMILLION, strokeWidth=1.5)
        .encode(y=alt.Y("max_capture_tokens:Q", title=title("step_tokens")), tooltip=theme.tooltip(*names))
    )
    words = (
        alt.Chart(ceilings)
        .mark_text(align="left", dx=6, color=theme.VERMILLION, fontSize=10)
        .transform_calculate(label="'graphs to ' + format(datum.max_capture_tokens, ',')")
        .encode(x=alt.value("width"), y=alt.Y("max_capture_tokens:Q", title=title("step_tokens")), text="label:N")
    )
    return alt.layer(
        bars,
        rules,
        words,
        numbers,
        name="step_tokens_by_new_prompts",
        width=alt.Step(52),
        title=theme.headline(
            _graph_finding(sizes, ceilings), [subtitle, "Modelled; every rank pads to the largest step"]
        ),
    )


def _graph_finding(sizes: pl.DataFrame, ceilings: pl.DataFrame) -> str:
    alone, mixed = sizes.sort("num_new_prompts")["step_tokens"][:2]
    for ceiling in ceilings["max_capture_tokens"].sort():
        if alone <= ceiling < mixed:
            return f"Graphs to {ceiling:,} tokens hold decoding alone; one prompt makes it {mixed:,}"
    return f"Decoding alone takes {alone:,} tokens of a step, with one prompt {mixed:,}"


def kv_bytes_by_figure(kv: pl.DataFrame, *, subtitle: str) -> alt.LayerChart:
    """Bytes of KV cache per token by where the figure comes from, with the range of its rounding.

    Args:
        kv: reading, kv_bytes_per_token, low, high, kv_cache_mtok, origin, source, formula.
        subtitle: model, and what the figures are.
    """
    names = ("reading", "kv_bytes_per_token", "low", "high", "kv_cache_mtok", "formula")
    require(kv, (*names, "origin", "source"), "kv_bytes_by_figure")
    y = alt.Y("reading:N", title=None, sort=kv["reading"].to_list(), axis=alt.Axis(labelLimit=320))
    x = theme.x("kv_bytes_per_token", scale=alt.Scale(domainMin=0))
    bars = alt.Chart(kv).mark_bar(color=theme.SKY, size=18).encode(x=x, y=y, tooltip=theme.tooltip(*names))
    ranges = (
        alt.Chart(kv)
        .mark_rule(color=theme.INK, strokeWidth=2)
        .encode(x=alt.X("low:Q", title=title("kv_bytes_per_token")), x2="high:Q", y=y)
    )
    marks = layers.origin_marks(kv, x, y, size=80)
    ends = alt.X("high:Q", title=title("kv_bytes_per_token"))
    numbers = layers.numbers(kv, ends, y, "kv_bytes_per_token", ",.0f", dx=9)
    least, most = kv["kv_bytes_per_token"].min(), kv["kv_bytes_per_token"].max()
    return alt.layer(
        bars,
        ranges,
        marks,
        numbers,
        name="kv_bytes_by_figure",
        height=alt.Step(40),
        title=theme.headline(
            f"The figures of KV bytes per token lie apart by up to {most / least:.1f} times",
            [subtitle, "Lines: what the rounding of the printed figures allows"],
        ),
    )
