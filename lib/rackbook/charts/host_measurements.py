"""Charts of host work that was measured: all-reduces, copies of a prompt, block tables, rows of KV cache, caps."""

from __future__ import annotations

from typing import TYPE_CHECKING

import altair as alt
import polars as pl

from rackbook.charts import theme
from rackbook.tables import require, title

if TYPE_CHECKING:
    from collections.abc import Iterable

_ALL_REDUCES = (
    "Gloo all-reduce", "ring over sockets", "doubling over Gloo", "doubling over sockets", "vLLM's all-reduce",
)  # fmt: skip
_OWN_CORE, _SHARED_CORE = "a core per rank", "more ranks than cores"
_COPIES = (
    "list → int32, new memory", "list → int32, reused memory", "list → list, new memory", "int32 → int32, new memory",
    "int32 → int32, reused memory", "int32 → int32 in chunks, reused memory",
)  # fmt: skip
_SENDS = ("row by row", "gathered", "packed, then sent", "one packed region")
_LOG_TICKS = [step * 10**power for power in range(-1, 6) for step in (1, 2, 5)]
_COSTS = ("before", "after", "given", "measured list", "measured int32")


def all_reduce_times(points: pl.DataFrame, growth: pl.DataFrame, *, subtitle: str) -> alt.LayerChart:
    """Time of each all-reduce by the number of ranks, median and P99, with the published synchronisation beside.

    Hollow marks were measured with more ranks than cores; lines join points of one regime only.

    Args:
        points: of :func:`rackbook.hostwork.measured.all_reduces`.
        growth: table with the published synchronisation, ``stage`` set and origin "published".
        subtitle: machine, day and vector.
    """
    require(
        points,
        ("all_reduce", "regime", "num_ranks", "num_cores", "sync_p50_ms", "sync_p99_ms", "num_samples", "origin",
         "source"),
        "all_reduce_times points",
    )  # fmt: skip
    require(growth, ("stage", "num_ranks", "dp_sync_ms", "origin", "source"), "all_reduce_times growth")
    published = growth.filter(pl.col("origin") == "published")
    names = theme.drawn(points["all_reduce"], _ALL_REDUCES)
    x, y = _ranks_axis(points, published), theme.y("sync_p50_ms", scale=alt.Scale(type="log", nice=False, padding=12))
    color = theme.entity_color("all_reduce", names)
    shape = theme.origin_shape(["published", "measured"])
    lines = alt.Chart(points).mark_line(strokeWidth=1.5).encode(x=x, y=y, color=color, detail="regime:N")
    tails = (
        alt.Chart(points.drop_nulls("sync_p99_ms"))
        .mark_rule(strokeWidth=1.5, opacity=0.45)
        .encode(x=x, y=y, y2="sync_p99_ms:Q", color=color)
    )
    dots = _dots(
        points, x, y, color, shape,
        ("all_reduce", "num_ranks", "num_cores", "regime", "sync_p50_ms", "sync_low_ms", "sync_high_ms", "sync_p99_ms",
         "num_samples"),
    )  # fmt: skip
    printed = (
        alt.Chart(published)
        .mark_point(filled=True, size=90, opacity=1, color=theme.INK)
        .encode(x=x, y=alt.Y("dp_sync_ms:Q"), shape=shape, tooltip=theme.tooltip("stage", "num_ranks", "dp_sync_ms"))
    )
    labels = (
        alt.Chart(published)
        .mark_text(dx=8, align="left", color=theme.INK)
        .encode(x=x, y=alt.Y("dp_sync_ms:Q"), text="stage:N")
    )
    return alt.layer(
        lines,
        tails,
        dots,
        printed,
        labels,
        name="all_reduce_times",
        title=theme.headline(_time_finding(points), f"{subtitle}; hollow: more ranks than cores; bar: median to P99"),
    )


def segments_by_ranks(points: pl.DataFrame, fitted: pl.DataFrame, *, subtitle: str) -> alt.HConcatChart:
    """How many TCP segments a rank sends in one all-reduce, and its CPU time: neither is the time that it takes.

    Args:
        points: of :func:`rackbook.hostwork.measured.all_reduces`.
        fitted: of :func:`rackbook.hostwork.measured.fitted_growth` for the segments.
        subtitle: machine, day and vector.
    """
    columns = (
        "all_reduce", "regime", "num_ranks", "segments_per_rank", "waits_per_rank", "cpu_us_per_rank", "origin",
        "source",
    )  # fmt: skip
    require(points, columns, "segments_by_ranks points")
    require(
        fitted,
        ("all_reduce", "regime", "growth_law", "num_ranks", "segments_per_rank", "origin", "source", "formula"),
        "segments_by_ranks fitted",
    )
    names = theme.drawn(points["all_reduce"], _ALL_REDUCES)
    color, shape = theme.entity_color("all_reduce", names), theme.origin_shape(["measured"])
    x = _ranks_axis(points)
    panels = []
    for quantity in ("segments_per_rank", "cpu_us_per_rank"):
        y = theme.y(quantity, scale=alt.Scale(type="log", nice=False, padding=10))
        layers = [_dots(points, x, y, color, shape, columns[:-2])]
        if quantity == "segments_per_rank" and fitted.height:
            layers.insert(
                0,
                alt.Chart(fitted)
                .mark_line(strokeWidth=1.5)
                .encode(
                    x=x,
                    y=y,
                    color=color,
                    detail="regime:N",
                    strokeDash=theme.origin_dash(["modelled"]),
                    tooltip=theme.tooltip("all_reduce", "regime", "growth_law", "num_ranks", quantity, "formula"),
                ),
            )
        panels.append(alt.layer(*layers).properties(width=300, height=260))
    return alt.hconcat(*panels, spacing=30).properties(
        name="segments_by_ranks", title=theme.headline(_law_finding(fitted), subtitle)
    )


def prompt_copy_times(copies: pl.DataFrame, published: pl.DataFrame, *, subtitle: str) -> alt.HConcatChart:
    """CPU time to copy a prompt by its length, with warm and with cold caches, and the published admission beside.

    Args:
        copies: of :func:`rackbook.hostwork.measured.copies`.
        published: of table ``cpu_overhead``; rows without a CPU time of an admission are left out.
        subtitle: machine and day.
    """
    require(
        copies,
        ("copy_method", "cache_state", "prompt_tokens", "copy_p50_ms", "copy_low_ms", "copy_high_ms", "num_repeats",
         "origin", "source"),
        "prompt_copy_times copies",
    )  # fmt: skip
    require(
        published, ("stage", "prompt_tokens", "admission_cpu_ms", "origin", "source"), "prompt_copy_times published"
    )
    printed = published.drop_nulls("admission_cpu_ms")
    methods = theme.drawn(copies["copy_method"], _COPIES)
    color, shape = theme.entity_color("copy_method", methods), theme.origin_shape(["published", "measured"])
    lengths = {*copies["prompt_tokens"], *printed["prompt_tokens"]}
    x = theme.x(
        "prompt_tokens",
        scale=alt.Scale(type="log", base=2, nice=False, padding=12),
        axis=_thousands(lengths),
    )
    low, high = copies["copy_p50_ms"].min(), max(copies["copy_p50_ms"].max(), printed["admission_cpu_ms"].max() or 0)
    y = theme.y("copy_p50_ms", scale=alt.Scale(type="log", nice=False, domain=[low / 1.5, high * 1.5]))
    panels = []
    for state in ("warm", "cold"):
        case = copies.filter(pl.col("cache_state") == state)
        base = alt.Chart(case).encode(x=x, y=y, color=color)
        layers = [
            base.mark_line(strokeWidth=1.5),
            base.mark_point(filled=True, size=55, opacity=1).encode(
                shape=shape,
                tooltip=theme.tooltip(
                    "copy_method", "cache_state", "prompt_tokens", "copy_p50_ms", "copy_low_ms", "copy_high_ms",
                    "num_repeats",
                ),
            ),
            alt.Chart(printed)
            .mark_point(filled=True, size=90, opacity=1, color=theme.INK)
            .encode(
                x=x, y=alt.Y("admission_cpu_ms:Q"), shape=shape,
                tooltip=theme.tooltip("stage", "prompt_tokens", "admission_cpu_ms"),
            ),
            alt.Chart(printed)
            .mark_text(dx=-9, align="right", color=theme.INK)
            .encode(x=x, y=alt.Y("admission_cpu_ms:Q"), text="stage:N"),
        ]  # fmt: skip
        panels.append(alt.layer(*layers).properties(width=300, height=280, title=theme.note(f"{state} caches")))
    return alt.hconcat(*panels, spacing=30).properties(
        name="prompt_copy_times", title=theme.headline(_copy_finding(copies), subtitle)
    )


def tables_and_rows(tables: pl.DataFrame, rows: pl.DataFrame, *, subtitle: str) -> alt.HConcatChart:
    """Two more pieces of host work: filling a block table by prompt length, and sending KV rows by their number.

    Args:
        tables: table_fill, prompt_tokens, fill_p50_us and its interval.
        rows: row_send, num_rows, row_bytes, sender_cpu_ms, transfer_p50_ms, gb_per_s.
        subtitle: machine and day.
    """
    require(
        tables,
        ("table_fill", "prompt_tokens", "num_blocks", "num_null_blocks", "fill_p50_us", "origin", "source"),
        "tables_and_rows tables",
    )
    require(
        rows,
        ("row_send", "num_rows", "row_bytes", "sender_cpu_ms", "transfer_p50_ms", "gb_per_s", "origin", "source"),
        "tables_and_rows rows",
    )
    shape = theme.origin_shape(["measured"])
    log = alt.Scale(type="log", nice=False, padding=12)
    left = alt.Chart(tables).encode(
        x=theme.x("prompt_tokens", scale=log, axis=_thousands(tables["prompt_tokens"])),
        y=theme.y("fill_p50_us", scale=log),
        color=theme.entity_color("table_fill", ["every block", "null blocks skipped"]),
    )
    right = alt.Chart(rows).encode(
        x=theme.x("num_rows", scale=log, axis=alt.Axis(values=sorted(rows["num_rows"].unique()), format=",d")),
        y=theme.y("sender_cpu_ms", scale=log),
        color=theme.entity_color("row_send", theme.drawn(rows["row_send"], _SENDS)),
    )
    panels = [
        _joined(
            left, shape, ("table_fill", "prompt_tokens", "num_blocks", "num_null_blocks", "fill_p50_us", "num_repeats")
        ),
        _joined(right, shape, ("row_send", "num_rows", "row_bytes", "sender_cpu_ms", "transfer_p50_ms", "gb_per_s")),
    ]
    return (
        alt.hconcat(*(panel.properties(width=280, height=240) for panel in panels), spacing=30)
        .resolve_scale(color="independent")
        .properties(name="tables_and_rows", title=theme.headline(_rows_finding(rows), subtitle))
    )


def cap_for_slo(sweep: pl.DataFrame, best: pl.DataFrame, *, subtitle: str) -> alt.FacetChart:
    """Longest step against the delay of an admission, one line per cost through all caps; ringed: the best cap.

    Args:
        sweep: arrivals, admission_cost, cap and the statistics of step and delay, from the smallest cap to none.
        best: of :func:`rackbook.hostwork.burst_costs.best_caps`.
        subtitle: engine, load and sample.
    """
    require(
        sweep,
        ("arrivals", "admission_cost", "cap", "step_max_ms", "delay_p99_ms", "origin", "source"),
        "cap_for_slo sweep",
    )
    require(best, ("arrivals", "admission_cost", "slo_step_ms", "best_cap"), "cap_for_slo best")
    chosen = best.select("arrivals", "admission_cost", "slo_step_ms", "best_cap")
    points = sweep.join(chosen, on=["arrivals", "admission_cost"], how="left", maintain_order="left")
    points = points.drop_nulls("delay_p99_ms")
    costs = theme.drawn(points["admission_cost"], _COSTS)
    x = theme.x("delay_p99_ms", scale=alt.Scale(type="log", nice=False, padding=22), axis=alt.Axis(values=_LOG_TICKS))
    y = theme.y("step_max_ms", scale=alt.Scale(type="log", nice=False, padding=14), axis=alt.Axis(values=_LOG_TICKS))
    base = alt.Chart().encode(x=x, y=y, color=theme.entity_color("admission_cost", costs))
    lines = base.mark_line(strokeWidth=1, opacity=0.6).encode(order="step_max_ms:Q")
    dots = base.mark_point(filled=True, size=45, opacity=1).encode(
        shape=theme.origin_shape(points["origin"].unique().to_list()),
        tooltip=theme.tooltip("arrivals", "admission_cost", "cap", "step_max_ms", "delay_p99_ms", "best_cap"),
    )
    rings = (
        base.transform_filter("datum.cap === datum.best_cap")
        .mark_point(filled=False, shape="circle", size=200, strokeWidth=1.6, opacity=1)
    )  # fmt: skip
    labels = (
        base.transform_filter("datum.cap === datum.best_cap && datum.cap !== 'none'")
        .mark_text(dx=-10, dy=-9, align="right", fontSize=10)
        .encode(text="cap:N", color=alt.value(theme.INK))
    )
    limit = (
        alt.Chart()
        .mark_rule(color=theme.MUTED, strokeDash=[1, 3])
        .encode(
            y=alt.Y("slo_step_ms:Q", title=f"{title('step_max_ms')}, log scale"), tooltip=theme.tooltip("slo_step_ms")
        )
    )
    kinds = points["arrivals"].unique(maintain_order=True).to_list()
    slo = best["slo_step_ms"][0]
    return (
        alt.layer(limit, lines, dots, rings, labels, data=points)
        .properties(width=290, height=260)
        .facet(column=alt.Column("arrivals:N", title=title("arrivals"), sort=kinds), spacing=24)
        .properties(
            name="cap_for_slo",
            title=theme.headline(
                f"Ringed: the soonest cap that keeps up, with no step above {slo:g} ms; without a number: no cap",
                subtitle,
            ),
        )
    )


def _dots(points, x, y, color, shape, names: tuple[str, ...]) -> alt.LayerChart:
    layers = []
    for regime, fill in ((_OWN_CORE, {"filled": True}), (_SHARED_CORE, {"filled": False, "fill": "white"})):
        case = points.filter(pl.col("regime") == regime)
        if case.height:
            layers.append(
                alt.Chart(case)
                .mark_point(size=60, opacity=1, strokeWidth=1.6, **fill)
                .encode(x=x, y=y, color=color, shape=shape, tooltip=theme.tooltip(*names))
            )
    return alt.layer(*layers)


def _joined(base: alt.Chart, shape: alt.Shape, names: tuple[str, ...]) -> alt.LayerChart:
    return base.mark_line(strokeWidth=1.5) + base.mark_point(filled=True, size=55, opacity=1).encode(
        shape=shape, tooltip=theme.tooltip(*names)
    )


def _ranks_axis(*frames: pl.DataFrame) -> alt.X:
    ticks = _powers_of_two(count for frame in frames for count in frame["num_ranks"])
    return theme.x(
        "num_ranks", scale=alt.Scale(type="log", base=2, nice=False, padding=14), axis=alt.Axis(values=ticks)
    )


def _time_finding(points: pl.DataFrame) -> str:
    pair = ("Gloo all-reduce", "doubling over Gloo")
    both = [set(points.filter(pl.col("all_reduce") == name)["num_ranks"]) for name in pair]
    if not (common := both[0] & both[1]):
        return "Time of an all-reduce of seven numbers per rank"
    most = max(common)
    at = points.filter(pl.col("num_ranks") == most)
    gloo, doubling = (at.filter(pl.col("all_reduce") == name)["sync_p50_ms"][0] for name in pair)
    where = f"On {most} ranks{' that share cores' if at['regime'][0] == _SHARED_CORE else ''}"
    return f"{where}, Gloo's all-reduce takes {gloo / doubling:.1f} times as long as doubling on its transport"


def _law_finding(fitted: pl.DataFrame) -> str:
    laws = [
        f"{name} {group['growth_law'][0]}"
        for (name,), group in fitted.group_by("all_reduce", maintain_order=True)
        if name in ("Gloo all-reduce", "doubling over Gloo", "vLLM's all-reduce")
    ]
    return (
        f"TCP segments of a rank: {', '.join(laws)}"
        if laws
        else "TCP segments of a rank: this run names no law of growth"
    )


def _copy_finding(copies: pl.DataFrame) -> str:
    longest = copies.filter(pl.col("prompt_tokens") == copies["prompt_tokens"].max(), pl.col("cache_state") == "cold")
    took = dict(longest.select("copy_method", "copy_p50_ms").iter_rows())
    slow, fast = took["list → int32, new memory"], took["int32 → int32, reused memory"]
    return f"Turning a list into int32 costs {slow / fast:.0f} times a copy of int32, at the longest prompt"


def _rows_finding(rows: pl.DataFrame) -> str:
    most = rows.filter(pl.col("num_rows") == rows["num_rows"].max())
    took = dict(most.select("row_send", "sender_cpu_ms").iter_rows())
    return f"A call per row costs the sender {took['row by row'] / took['one packed region']:.0f} times a packed region"


def _powers_of_two(values: Iterable[int]) -> list[int]:
    """What a logarithmic axis names: labels of the other values would run into these."""
    return sorted({value for value in values if value & (value - 1) == 0})


def _thousands(values: Iterable[int]) -> alt.Axis:
    """An axis of token counts, named at the powers of two, as so many times 1,024."""
    return alt.Axis(values=_powers_of_two(values), labelExpr="format(datum.value / 1024, ',d') + 'K'")
