"""Charts of host work in the decode step: fixes, synchronisation, admissions."""

from __future__ import annotations

import altair as alt
import polars as pl

from rackbook.charts import layers, theme
from rackbook.tables import require, title

_LADDER = {
    "total_tok_per_s_per_gpu": "higher is better",
    "interactivity_p90_tok_per_s": "higher is better",
    "dp_sync_ms": "lower is better",
    "step_ms": "lower is better",
    "admissions_per_step": "what the fix limits",
    "admission_cpu_ms": "lower is better",
}
_LOG_TICKS = [step * 10**power for power in range(-1, 7) for step in (1, 1.5, 2, 3, 5, 7)]
_STAGES = ["before", "after"]
_COSTS = ["before", "after", "given"]


def fixes_before_after(points: pl.DataFrame, *, subtitle: str) -> alt.VConcatChart:
    """Each fix before and after, one small chart per metric that the source gives, each on its own axis from 0.

    Args:
        points: table ``cpu_overhead``.
        subtitle: model and sample; hardware and setting of each fix stand in its own title.
    """
    require(points, ("cause", "fix", "pr", "stage", "origin", "source", *_LADDER), "fixes_before_after")
    rows = []
    for (pr,), group in points.group_by("pr", maintain_order=True):
        metrics = [name for name in _LADDER if group[name].null_count() == 0]
        rows.append(alt.hconcat(*(_metric(group, name) for name in metrics), spacing=24, title=_row_title(group, pr)))
    return alt.vconcat(
        *rows,
        spacing=18,
        name="fixes_before_after",
        title=theme.headline("The host-side fixes, each on its own metrics", subtitle),
    )


def sync_waited_for_and_hidden(split: pl.DataFrame, *, subtitle: str) -> alt.LayerChart:
    """The synchronisation before and after its fix, by what the fall of the step says about each part.

    Args:
        split: stage, sync_part, dp_sync_ms.
        subtitle: hardware, model and sample.
    """
    require(split, ("stage", "sync_part", "dp_sync_ms", "origin", "source", "formula"), "sync_waited_for_and_hidden")
    parts = ["waited for", "either", "hidden"]
    ordered = (
        split.with_columns(layers.place("sync_part", parts).alias("part_order"))
        .sort(layers.place("stage", _STAGES), "part_order")
        .with_columns(layers.middle("dp_sync_ms", over="stage").alias("middle_ms"))
    )
    y = alt.Y("stage:N", title=title("stage"), sort=_STAGES)
    bars = layers.stacked_bars(
        ordered,
        theme.x("dp_sync_ms", stack="zero"),
        y,
        "part_order",
        ("stage", "sync_part", "dp_sync_ms", "formula"),
        color=theme.entity_color("sync_part", parts),
    )
    dots = layers.origin_marks(ordered, "middle_ms:Q", y)
    numbers = layers.numbers(ordered, "middle_ms:Q", y, "dp_sync_ms", ".2f", dy=14)
    hidden = split.filter((pl.col("stage") == "before") & (pl.col("sync_part") == "hidden"))["dp_sync_ms"].sum()
    total = split.filter(pl.col("stage") == "before")["dp_sync_ms"].sum()
    return alt.layer(
        bars,
        dots,
        numbers,
        name="sync_waited_for_and_hidden",
        height=alt.Step(56),
        title=theme.headline(f"Of {total:.1f} ms of synchronisation, at least {hidden:.2f} ms were hidden", subtitle),
    )


def step_by_sync(curves: pl.DataFrame, points: pl.DataFrame, *, subtitle: str) -> alt.LayerChart:
    """The step over the length of the synchronisation: the published pair and two readings through it.

    Args:
        curves: reading, dp_sync_ms, step_ms, corner points.
        points: table ``cpu_overhead``; rows without both values are left out.
        subtitle: hardware, model and sample.
    """
    require(curves, ("reading", "dp_sync_ms", "step_ms", "origin", "source", "formula"), "step_by_sync curves")
    require(points, ("dp_sync_ms", "step_ms", "stage", "origin", "source"), "step_by_sync points")
    points = points.drop_nulls(["dp_sync_ms", "step_ms"])
    readings = curves["reading"].unique(maintain_order=True).to_list()
    x, y = theme.x("dp_sync_ms"), theme.y("step_ms", scale=alt.Scale(zero=False, padding=20))
    color = alt.Color(
        "reading:N", title=title("reading"), scale=alt.Scale(domain=readings, range=[theme.VERMILLION, theme.PURPLE])
    )
    lines = layers.lines(curves, x, y, ("reading", "dp_sync_ms", "step_ms", "formula"), color=color)
    dots = layers.points(points, x, y, ("stage", "dp_sync_ms", "step_ms", "fix"), color=theme.INK)
    labels = alt.Chart(points).mark_text(dy=-14, color=theme.INK).encode(x=x, y=y, text="stage:N")
    return alt.layer(
        lines,
        dots,
        labels,
        name="step_by_sync",
        title=theme.headline("Two readings fit the printed pair and differ everywhere else", subtitle),
    )


def sync_by_ranks(growth: pl.DataFrame, *, subtitle: str) -> alt.LayerChart:
    """The synchronisation over the number of ranks: growth laws, each through a published point.

    Args:
        growth: growth_law, num_ranks, num_hops, dp_sync_ms; rows without a law are the published points.
        subtitle: hardware, model and sample.
    """
    require(
        growth,
        ("growth_law", "num_ranks", "num_hops", "dp_sync_ms", "stage", "origin", "source", "formula"),
        "sync_by_ranks",
    )
    curves, points = growth.drop_nulls("growth_law"), growth.filter(pl.col("growth_law").is_null())
    laws = curves["growth_law"].unique(maintain_order=True).to_list()
    ticks = sorted(curves["num_ranks"].unique().to_list())
    x = theme.x("num_ranks", scale=alt.Scale(type="log", base=2), axis=alt.Axis(values=ticks))
    y = theme.y("dp_sync_ms", scale=alt.Scale(domainMin=0))
    shown = ("growth_law", "num_ranks", "dp_sync_ms", "num_hops", "formula")
    lines = layers.lines(curves, x, y, shown, color=theme.entity_color("growth_law", laws))
    dots = layers.points(points, x, y, ("stage", "num_ranks", "dp_sync_ms"), color=theme.INK)
    labels = layers.numbers(points, x, y, "dp_sync_ms", ".1f", dx=-6, dy=-12)
    return alt.layer(
        lines,
        dots,
        labels,
        name="sync_by_ranks",
        title=theme.headline("Twice the ranks: twice the time by a ring, one more hop by doubling", subtitle),
    )


def burst_trade(trade: pl.DataFrame, *, published_cap: int, subtitle: str) -> alt.LayerChart:
    """One burst under each cap: the longest step that it causes against the time until all of it is admitted.

    Args:
        trade: admission_cost, cap, step_max_ms, delay_max_ms, from the smallest cap to none.
        published_cap: the cap to mark.
        subtitle: what burst, on what engine.
    """
    require(
        trade,
        ("admission_cost", "cap", "step_max_ms", "delay_p50_ms", "delay_max_ms", "origin", "source"),
        "burst_trade",
    )
    costs = theme.drawn(trade["admission_cost"], _COSTS)
    x = theme.x("delay_max_ms", scale=alt.Scale(type="log", nice=False, padding=30), axis=alt.Axis(values=_LOG_TICKS))
    y = theme.y("step_max_ms", scale=alt.Scale(type="log", padding=12), axis=alt.Axis(values=_LOG_TICKS))
    base = alt.Chart(trade).encode(x=x, y=y, color=theme.entity_color("admission_cost", costs))
    lines = base.mark_line(strokeWidth=1, opacity=0.6).encode(order="step_max_ms:Q")
    dots = base.mark_point(filled=True, size=70, opacity=1).encode(
        shape=theme.origin_shape(trade["origin"]),
        tooltip=theme.tooltip("admission_cost", "cap", "step_max_ms", "delay_p50_ms", "delay_max_ms"),
    )
    labels = base.mark_text(dx=13, dy=-5, align="left", color=theme.INK, fontSize=10).encode(
        text="cap:N", color=alt.value(theme.INK)
    )
    marked = base.transform_filter(alt.datum.cap == str(published_cap)).mark_point(
        filled=False, shape="circle", size=260, strokeWidth=1.5, opacity=1
    ).encode(color=alt.value(theme.INK))  # fmt: skip
    return alt.layer(
        lines,
        dots,
        labels,
        marked,
        name="burst_trade",
        title=theme.headline(
            f"A cap turns one long step into many short ones; ring: the published cap of {published_cap}", subtitle
        ),
    )


def step_and_delay_by_cap(sweep: pl.DataFrame, *, published_cap: int, subtitle: str) -> alt.HConcatChart:
    """Under load, by cap: step time and admission delay, each from median to maximum with the P99 marked.

    Args:
        sweep: arrivals, admission_cost, cap and the statistics of step and delay, from the smallest cap to none.
            The title speaks of the first cost, and of the kind of arrivals whose longest step the cap shortens most.
        published_cap: the cap to mark; it must be among the caps.
        subtitle: engine, load and sample.
    """
    statistics = [f"{what}_{statistic}_ms" for what in ("step", "delay") for statistic in ("p50", "p99", "max")]
    require(sweep, ("arrivals", "admission_cost", "cap", "origin", "source", *statistics), "step_and_delay_by_cap")
    return alt.hconcat(
        _statistic_by_cap(sweep, "step", published_cap),
        _statistic_by_cap(sweep, "delay", published_cap),
        spacing=30,
        name="step_and_delay_by_cap",
        title=theme.headline(_cap_finding(sweep, published_cap), subtitle),
    )


def _cap_finding(sweep: pl.DataFrame, published_cap: int) -> str:
    cost = sweep["admission_cost"][0]
    longest = {}
    for (kind,), case in sweep.filter(pl.col("admission_cost") == cost).group_by("arrivals", maintain_order=True):
        by_cap = dict(case.select("cap", "step_max_ms").iter_rows())
        longest[kind] = by_cap[case["cap"][-1]], by_cap[str(published_cap)]
    kind, (uncapped, capped) = max(longest.items(), key=lambda case: case[1][0] / case[1][1])
    return (
        f"With arrivals {kind}, a cap of {published_cap} (dotted) takes the longest step from {uncapped:,.0f} to "
        f"{capped:,.0f} ms, {cost} the admission fixes"
    )


def _statistic_by_cap(sweep: pl.DataFrame, what: str, published_cap: int) -> alt.FacetChart:
    low, mid, high = (f"{what}_{statistic}_ms" for statistic in ("p50", "p99", "max"))
    caps = sweep["cap"].unique(maintain_order=True).to_list()
    costs = theme.drawn(sweep["admission_cost"], _COSTS)
    x = alt.X("cap:N", title=title("cap"), sort=caps, axis=alt.Axis(labelAngle=0))
    # One title for both layers: Vega-Lite joins the titles of a shared axis unless they are the same.
    axis_title = f"{title(mid)}, log scale"
    scale, axis = alt.Scale(type="log", nice=False, padding=8), alt.Axis(values=_LOG_TICKS)
    base = alt.Chart(sweep).encode(
        x=x, xOffset=alt.XOffset("admission_cost:N", sort=costs), color=theme.entity_color("admission_cost", costs)
    )
    marked = (
        alt.Chart(sweep)
        .transform_filter(alt.datum.cap == str(published_cap))
        .mark_rule(color=theme.MUTED, strokeDash=[1, 3])
        .encode(x=x)
    )
    spans = base.mark_rule(strokeWidth=2, opacity=0.6).encode(
        y=alt.Y(f"{low}:Q", title=axis_title, scale=scale, axis=axis), y2=f"{high}:Q"
    )
    tails = base.mark_point(filled=True, size=55, opacity=1).encode(
        y=alt.Y(f"{mid}:Q", title=axis_title, scale=scale, axis=axis),
        shape=theme.origin_shape(sweep["origin"]),
        tooltip=theme.tooltip(
            "arrivals", "admission_cost", "cap", low, mid, f"{what}_p99_low_ms", f"{what}_p99_high_ms", high
        ),
    )
    return (
        alt.layer(marked, spans, tails, data=sweep)
        .properties(width=300, height=220)
        .facet(
            row=alt.Row("arrivals:N", title=None, sort=sweep["arrivals"].unique(maintain_order=True).to_list()),
            spacing=14,
        )
        .properties(title=theme.note("bar: median to longest, mark: P99"))
    )


def _metric(group: pl.DataFrame, name: str) -> alt.LayerChart:
    x = theme.x(name, axis=alt.Axis(tickCount=4, format="~s"), scale=alt.Scale(domainMin=0))
    base = alt.Chart(group).encode(
        x=x, y=alt.Y("stage:N", title=None, sort=_STAGES), color=theme.entity_color("stage", _STAGES)
    )
    stems = base.mark_rule(strokeWidth=3, opacity=0.5).encode(x2=alt.datum(0))
    dots = base.mark_point(filled=True, size=90, opacity=1).encode(
        shape=theme.origin_shape(group["origin"]),
        tooltip=theme.tooltip("cause", "fix", "stage", name),
    )
    numbers = base.mark_text(dy=-11, align="center", color=theme.INK, fontSize=10).encode(
        text=alt.Text(f"{name}:Q", format=",.4~s" if group[name].max() >= 1e4 else ",.4~g"),
        color=alt.value(theme.INK),
    )
    return alt.layer(stems, dots, numbers, width=200, height=alt.Step(34), title=theme.note(_LADDER[name]))


def _row_title(group: pl.DataFrame, pr: int) -> alt.TitleParams:
    first = group.row(0, named=True)
    setting: list[str] = [first["hardware"] or "hardware not printed"]
    if first["num_prefill_engines"]:
        setting.append(
            f"{first['num_prefill_engines']}P{first['num_decode_engines']}D, {first['concurrency']:,} concurrent"
        )
    if first["ep_size"]:
        setting.append(f"DEP{first['ep_size']}")
    if first["prompt_tokens"]:
        setting.append(f"prompt of {first['prompt_tokens'] / 1024:g}K")
    return alt.TitleParams(
        text=f"{first['cause'][0].upper()}{first['cause'][1:]} → {first['fix']} (#{pr})",
        subtitle=", ".join(setting),
        fontSize=11,
        fontWeight="normal",
        offset=6,
    )
