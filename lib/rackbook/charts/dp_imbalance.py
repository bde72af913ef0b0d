"""Charts of DP imbalance: what the ranks do, what waiting costs, how it would grow with the ranks, and routing."""

from __future__ import annotations

import altair as alt
import polars as pl

from rackbook.charts import theme
from rackbook.tables import require, title

_ACTIVITIES = ("computing", "waiting", "no request")
_SMALL, _LARGE = "DEP2", "DEP4"


def ranks_over_time(spans: pl.DataFrame, *, name: str, headline: str, subtitle: str) -> alt.FacetChart:
    """What each rank does over time: one row of bars per rank, a mirror replay above a lag replay.

    Args:
        spans: schedule, rank, step, activity, from_s, to_s, num_prefill_tokens, mean_depth_tokens, origin, source.
        name: of the chart.
        headline: what it shows.
        subtitle: engine, requests, sample.
    """
    columns = ("schedule", "rank", "step", "activity", "from_s", "to_s", "num_prefill_tokens", "mean_depth_tokens")
    require(spans, (*columns, "origin", "source"), "ranks_over_time")
    drawn = [activity for activity in _ACTIVITIES if activity in spans["activity"].unique().to_list()]
    from_zero = spans["from_s"].min() == 0
    bars = (
        alt.Chart()
        .mark_bar(stroke="white", strokeWidth=0.3)
        .encode(
            x=theme.x("from_s", scale=alt.Scale(nice=False, zero=from_zero)),
            x2="to_s:Q",
            y=alt.Y("rank:O", title=title("rank"), scale=alt.Scale(paddingInner=0.15)),
            color=theme.entity_color("activity", drawn),
            tooltip=theme.tooltip(*columns),
        )
        .properties(width=720, height=alt.Step(24))
    )
    header = alt.Header(labelAnchor="start", labelFontWeight=600, labelOrient="top", labelPadding=3)
    return (
        bars.facet(row=alt.Row("schedule:N", title=None, sort=["mirror", "lag"], header=header), data=spans, spacing=6)
        .properties(name=name, title=theme.headline(headline, subtitle))
        .resolve_scale(x="independent")
    )


def loss_by_ranks(
    losses: pl.DataFrame, predictions: pl.DataFrame, sensitivity: pl.DataFrame, *, subtitle: str
) -> alt.LayerChart:
    """Throughput lost to imbalance by number of ranks: published, simulated, and the range of what is assumed.

    Args:
        losses: dp_size, loss_percent, origin, source: the published losses.
        predictions: setting, dp_size, loss_percent, loss_low_percent, loss_high_percent, origin, source; null losses
            are left out.
        sensitivity: dp_size, loss_percent: the losses under varied assumptions; null ones are left out.
        subtitle: what was simulated.
    """
    require(losses, ("dp_size", "loss_percent", "origin", "source"), "loss_by_ranks losses")
    columns = ("setting", "dp_size", "loss_percent", "loss_low_percent", "loss_high_percent")
    require(predictions, (*columns, "origin", "source"), "loss_by_ranks predictions")
    require(sensitivity, ("dp_size", "loss_percent"), "loss_by_ranks sensitivity")
    predictions = predictions.drop_nulls("loss_percent")
    printed = losses.with_columns(pl.lit("published").alias("setting"))
    settings = ["published", *predictions["setting"].unique(maintain_order=True).to_list()]
    sizes = sorted({*losses["dp_size"].to_list(), *predictions["dp_size"].to_list()})
    x = theme.x("dp_size", scale=alt.Scale(type="log", base=2, nice=False, padding=24), axis=alt.Axis(values=sizes))
    y = theme.y("loss_percent")
    color = alt.Color(
        "setting:N", title=title("setting"),
        scale=alt.Scale(domain=settings, range=[theme.INK, theme.BLUE, theme.ORANGE][: len(settings)]),
    )  # fmt: skip
    span = (
        sensitivity.drop_nulls("loss_percent")
        .group_by("dp_size", maintain_order=True)
        .agg(
            pl.col("loss_percent").min().alias("loss_low_percent"),
            pl.col("loss_percent").max().alias("loss_high_percent"),
        )
    )
    ranges = (
        alt.Chart(span)
        .mark_rule(strokeWidth=16, opacity=0.16, color=theme.BLUE)
        .encode(x=x, y=alt.Y("loss_low_percent:Q", title=title("loss_percent")), y2="loss_high_percent:Q")
    )
    lines = (
        alt.Chart(predictions).mark_line().encode(x=x, y=y, color=color, strokeDash=theme.origin_dash(["simulated"]))
    )
    spread = (
        alt.Chart(predictions)
        .mark_rule(strokeWidth=1.5)
        .encode(x=x, y=alt.Y("loss_low_percent:Q", title=title("loss_percent")), y2="loss_high_percent:Q", color=color)
    )
    origins = [*losses["origin"].unique().to_list(), "simulated"]
    dots = (
        alt.Chart(pl.concat([predictions, printed], how="diagonal"))
        .mark_point(filled=True, size=90, opacity=1)
        .encode(
            x=x, y=y, color=color, shape=theme.origin_shape(origins),
            tooltip=theme.tooltip(*columns, "whole_run_loss_percent", "formula"),
        )
    )  # fmt: skip
    return alt.layer(
        ranges,
        lines,
        spread,
        dots,
        name="loss_by_ranks",
        width=460,
        height=300,
        title=theme.headline(_loss_finding(losses, predictions), subtitle),
    )


def _loss_finding(losses: pl.DataFrame, predictions: pl.DataFrame) -> str:
    def shown(frame: pl.DataFrame) -> str:
        return " and ".join(f"{loss:.1f} %" for loss in frame.sort("dp_size")["loss_percent"].to_list())

    same = predictions.filter(pl.col("dp_size").is_in(losses["dp_size"].to_list()))
    first = same["setting"].first() or ""
    same = same.filter(pl.col("setting") == first)
    if same.height < losses.height:
        return "Throughput lost to DP imbalance by number of ranks"
    ranks = " and ".join(str(n) for n in losses["dp_size"].sort().to_list())
    return f"On {ranks} ranks: published {shown(losses)}, simulated with {first} {shown(same)}"


def loss_by_assumption(sensitivity: pl.DataFrame, losses: pl.DataFrame, *, subtitle: str) -> alt.LayerChart:
    """The simulated losses on two and on four ranks, one assumption varied at a time, beside the published ones.

    Args:
        sensitivity: varied, setting, dp_size, loss_percent, loss_low_percent, loss_high_percent, origin, source,
            missing_reason; what has no loss is named in the subtitle.
        losses: dp_size, loss_percent: the published losses, drawn as lines.
        subtitle: the defaults and the sample.
    """
    columns = ("varied", "setting", "dp_size", "loss_percent", "loss_low_percent", "loss_high_percent")
    require(sensitivity, (*columns, "origin", "source", "missing_reason"), "loss_by_assumption sensitivity")
    require(losses, ("dp_size", "loss_percent"), "loss_by_assumption losses")
    engine = pl.format("DEP{}", "dp_size").alias("engine")
    same = pl.col("varied") == pl.col("setting")
    label = pl.when(same).then("setting").otherwise(pl.format("{}: {}", "varied", "setting")).alias("label")
    labelled = sensitivity.with_columns(engine, label)
    drawn = labelled.drop_nulls("loss_percent")
    y = alt.Y(
        "label:N",
        title=None,
        sort=drawn["label"].unique(maintain_order=True).to_list(),
        axis=alt.Axis(labelLimit=260),
    )
    color = theme.entity_color("engine", [_SMALL, _LARGE])
    rules = (
        alt.Chart(losses.with_columns(engine))
        .mark_rule(strokeWidth=1.5, opacity=0.7)
        .encode(x=theme.x("loss_percent"), color=color)
    )
    base = alt.Chart(drawn).encode(y=y, color=color)
    bars = base.mark_rule(strokeWidth=2).encode(
        x=alt.X("loss_low_percent:Q", title=title("loss_percent")), x2="loss_high_percent:Q"
    )
    dots = base.mark_point(filled=True, size=70, opacity=1).encode(
        x=theme.x("loss_percent"),
        shape=theme.origin_shape(["simulated"]),
        tooltip=theme.tooltip(*columns, "excess_percent"),
    )
    return alt.layer(
        rules,
        bars,
        dots,
        name="loss_by_assumption",
        width=460,
        height=alt.Step(22),
        title=theme.headline(
            "What the simulated loss depends on; vertical lines: published losses", [subtitle, *_without_loss(labelled)]
        ),
    )


def _without_loss(labelled: pl.DataFrame) -> list[str]:
    missing = labelled.filter(pl.col("loss_percent").is_null())
    lines = []
    reason = pl.col("missing_reason").str.split(":").list.first()
    for (why,), rows in missing.group_by(reason, maintain_order=True):
        names = rows["label"].unique(maintain_order=True).to_list()
        shown = "; ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        lines.append(f"Without a loss ({why}): {shown}")
    return lines


def throughput_per_gpu_by_ranks(per_gpu: pl.DataFrame, *, subtitle: str) -> alt.LayerChart:
    """Prefill throughput per GPU on two and on four ranks: the two replays, and the AgentX run.

    Args:
        per_gpu: setting, dp_size, prefill_tok_per_s_per_gpu, origin, source, formula.
        subtitle: model and conditions.
    """
    require(
        per_gpu,
        ("setting", "dp_size", "prefill_tok_per_s_per_gpu", "origin", "source", "formula"),
        "throughput_per_gpu_by_ranks",
    )
    settings = per_gpu["setting"].unique(maintain_order=True).to_list()
    x = alt.X("dp_size:O", title=title("dp_size"), axis=alt.Axis(labelAngle=0), scale=alt.Scale(padding=0.6))
    y = theme.y("prefill_tok_per_s_per_gpu", axis=alt.Axis(format="~s"))
    base = alt.Chart(per_gpu).encode(x=x, y=y, color=theme.entity_color("setting", settings))
    lines = base.mark_line(strokeWidth=1.5, opacity=0.6)
    dots = base.mark_point(filled=True, size=90, opacity=1).encode(
        shape=theme.origin_shape(per_gpu["origin"].unique().to_list()),
        tooltip=theme.tooltip("setting", "dp_size", "prefill_tok_per_s_per_gpu", "formula"),
    )
    drop = {setting: _drop_percent(per_gpu.filter(pl.col("setting") == setting)) for setting in settings}
    labels = (
        alt.Chart(
            per_gpu.filter(pl.col("dp_size") == pl.col("dp_size").max()).with_columns(
                pl.col("setting").replace_strict({s: f"−{d:.1f} %" for s, d in drop.items()}).alias("label")
            )
        )
        .mark_text(align="left", dx=10)
        .encode(x=x, y=y, text="label:N", color=theme.entity_color("setting", settings))
    )
    worst = max(drop, key=drop.get)
    return alt.layer(
        lines,
        dots,
        labels,
        name="throughput_per_gpu_by_ranks",
        width=360,
        height=280,
        title=theme.headline(
            f"Per GPU, four ranks prefill less than two: {drop[worst]:.1f} % less in {worst}", subtitle
        ),
    )


def _drop_percent(rows: pl.DataFrame) -> float:
    small, large = rows.sort("dp_size")["prefill_tok_per_s_per_gpu"].to_list()
    return 100 * (1 - large / small)


def waiting_by_ranks(laws: pl.DataFrame, *, subtitle: str) -> alt.LayerChart:
    """How the cost of waiting grows with the ranks under laws of the step times, beside the published pair.

    Args:
        laws: law, num_ranks, excess_to_two_ranks, low, high, origin, source, formula; the published pair has the law
            "published".
        subtitle: what the laws assume.
    """
    columns = ("law", "num_ranks", "excess_to_two_ranks", "low", "high", "formula")
    require(laws, (*columns, "origin", "source"), "waiting_by_ranks")
    curves, pair = laws.filter(pl.col("law") != "published"), laws.filter(pl.col("law") == "published")
    names = curves["law"].unique(maintain_order=True).to_list()[::-1]
    ranks = curves["num_ranks"].unique().sort().to_list()
    x = theme.x("num_ranks", scale=alt.Scale(zero=False, nice=False, padding=12), axis=alt.Axis(values=ranks))
    y = theme.y("excess_to_two_ranks")
    base = alt.Chart(curves).encode(x=x, y=y, color=theme.entity_color("law", names))
    lines = base.mark_line(point=alt.OverlayMarkDef(size=22)).encode(
        strokeDash=theme.origin_dash(["modelled"]),
        tooltip=theme.tooltip("law", "num_ranks", "excess_to_two_ranks", "formula"),
    )
    bars = (
        alt.Chart(pair)
        .mark_rule(color=theme.INK, strokeWidth=2)
        .encode(x=x, y=alt.Y("low:Q", title=title("excess_to_two_ranks")), y2="high:Q")
    )
    dots = (
        alt.Chart(pair)
        .mark_point(filled=True, size=90, color=theme.INK, opacity=1)
        .encode(x=x, y=y, shape=theme.origin_shape(["derived"]), tooltip=theme.tooltip(*columns))
    )
    ratio = pair["excess_to_two_ranks"].max()
    return alt.layer(
        lines,
        bars,
        dots,
        name="waiting_by_ranks",
        width=480,
        height=300,
        title=theme.headline(f"Four ranks wait {ratio:.2f} times as much as two", subtitle),
    )


def ttft_by_load(policies: pl.DataFrame, *, subtitle: str) -> alt.LayerChart:
    """Tail of the time to first token by load and routing policy.

    Args:
        policies: policy, load_percent, num_ranks, ttft_p50_s, ttft_p99_s, ttft_p99_low_s, ttft_p99_high_s,
            wait_percent, origin, source.
        subtitle: engine, requests, sample.
    """
    columns = ("policy", "load_percent", "num_ranks", "ttft_p50_s", "ttft_p99_s", "ttft_p99_low_s", "ttft_p99_high_s")
    require(policies, (*columns, "wait_percent", "origin", "source"), "ttft_by_load")
    names = policies["policy"].unique(maintain_order=True).to_list()
    x = theme.x("load_percent", scale=alt.Scale(zero=False, padding=24))
    y = theme.y("ttft_p99_s")
    base = alt.Chart(policies).encode(x=x, color=theme.entity_color("policy", names))
    lines = base.mark_line().encode(y=y, strokeDash=theme.origin_dash(["simulated"]))
    bars = base.mark_rule(strokeWidth=1.5, opacity=0.6).encode(
        y=alt.Y("ttft_p99_low_s:Q", title=title("ttft_p99_s")), y2="ttft_p99_high_s:Q"
    )
    dots = base.mark_point(filled=True, size=80, opacity=1).encode(
        y=y, shape=theme.origin_shape(["simulated"]), tooltip=theme.tooltip(*columns, "wait_percent")
    )
    return alt.layer(
        lines,
        bars,
        dots,
        name="ttft_by_load",
        width=460,
        height=280,
        title=theme.headline(_policy_finding(policies), subtitle),
    )


def _policy_finding(policies: pl.DataFrame) -> str:
    highest = policies.filter(pl.col("load_percent") == pl.col("load_percent").max())
    tails = dict(highest.select("policy", "ttft_p99_s").iter_rows())
    shown = ", ".join(f"{policy} {tail:.2g} s" for policy, tail in tails.items())
    return f"P99 time to first token at {highest['load_percent'][0]:g} % load: {shown}"
