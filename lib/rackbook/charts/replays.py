"""Charts of measured mirror and lag replays: the loss and its controls, the work of each rank, the single prompts."""

from __future__ import annotations

import altair as alt
import polars as pl

from rackbook.charts import theme
from rackbook.tables import require, title

_KEYS = ("setting", "dp_size", "comparison")
LAGGED = "lag with mirror"


def loss_by_comparison(pairs: pl.DataFrame, losses: pl.DataFrame, *, control: str, subtitle: str) -> alt.LayerChart:
    """The loss of each pair of replays, and the mean with its interval, by what was compared on which servers.

    Args:
        pairs: setting, dp_size, comparison, pair, loss_percent, whole_run_loss_percent, origin, source; a pair without
            a loss is not drawn.
        losses: setting, dp_size, comparison, num_pairs, loss_percent, loss_from_percent, loss_to_percent, origin,
            source; the simulated loss among them.
        control: what the analysis finds of a known loss.
        subtitle: machine, load, sample.
    """
    pair_columns = (*_KEYS, "pair", "loss_percent", "whole_run_loss_percent")
    mean_columns = (*_KEYS, "num_pairs", "loss_percent", "loss_from_percent", "loss_to_percent")
    require(pairs, (*pair_columns, "origin", "source"), "loss_by_comparison pairs")
    require(losses, (*mean_columns, "origin", "source"), "loss_by_comparison losses")
    label = pl.format("{}, {} ranks: {}", "setting", "dp_size", "comparison").alias("label")
    drawn_pairs = pairs.drop_nulls("loss_percent").with_columns(label)
    means = losses.drop_nulls("loss_percent").with_columns(label)
    rows = means["label"].unique(maintain_order=True).to_list()
    y = alt.Y("label:N", title=None, sort=rows, axis=alt.Axis(labelLimit=380))
    x = theme.x("loss_percent", scale=alt.Scale(zero=True, nice=True))
    zero = alt.Chart(pl.DataFrame({"loss_percent": [0.0]})).mark_rule(color=theme.MUTED).encode(x=x)
    ticks = (
        alt.Chart(drawn_pairs)
        .mark_tick(thickness=2, size=14, color=theme.GREY, opacity=0.8)
        .encode(x=x, y=y, tooltip=theme.tooltip(*pair_columns))
    )
    bars = (
        alt.Chart(means.drop_nulls("loss_from_percent"))
        .mark_rule(strokeWidth=2, color=theme.BLUE)
        .encode(x=alt.X("loss_from_percent:Q", title=title("loss_percent")), x2="loss_to_percent:Q", y=y)
    )
    dots = (
        alt.Chart(means)
        .mark_point(filled=True, size=100, opacity=1, color=theme.BLUE)
        .encode(
            x=x, y=y, shape=theme.origin_shape(means["origin"].unique().to_list()),
            tooltip=theme.tooltip(*mean_columns, "pair_spread_points", "pairs_needed"),
        )
    )  # fmt: skip
    return alt.layer(
        zero,
        ticks,
        bars,
        dots,
        name="loss_by_comparison",
        width=440,
        height=alt.Step(34),
        title=theme.headline(_finding(losses), [control, subtitle]),
    )


def _finding(losses: pl.DataFrame) -> str:
    measured = losses.filter((pl.col("origin") == "measured") & (pl.col("comparison") == LAGGED))
    measured = measured.drop_nulls("loss_percent")
    if measured.is_empty():
        return "No usable pair of replays"
    first = measured.row(0, named=True)
    sure = f"{first['loss_percent']:.1f} %"
    if first["loss_from_percent"] is None:
        return f"Measured loss on {first['setting']}: {sure}, one pair"
    half = (first["loss_to_percent"] - first["loss_from_percent"]) / 2
    verdict = "a loss" if first["loss_from_percent"] > 0 else "no loss that these pairs could tell from none"
    as_wide = measured.filter(
        (pl.col("setting") != first["setting"]) & (pl.col("dp_size") == first["dp_size"])
        & pl.lit(first["loss_percent"]).is_between("loss_from_percent", "loss_to_percent")
    )  # fmt: skip
    doubt = f"; the bar of {as_wide['setting'][0]} holds it too" if as_wide.height else ""
    sure = f"{sure} ± {half:.1f} from {first['num_pairs']} pairs"
    return f"Measured on {first['setting']}: {sure}, {verdict}{doubt}".replace(": -", ": −")


def work_over_time(work: pl.DataFrame, *, subtitle: str) -> alt.FacetChart:
    """Prompt tokens that each rank has computed by when, in a mirror and in a lag replay; shaded: the common window.

    Args:
        work: schedule, rank, at_s, computed_tokens, from_s, to_s, origin, source.
        subtitle: machine, load.
    """
    columns = ("schedule", "rank", "at_s", "computed_tokens")
    require(work, (*columns, "from_s", "to_s", "origin", "source"), "work_over_time")
    x = theme.x("at_s", scale=alt.Scale(nice=False, zero=True))
    base = alt.Chart()
    band = (
        base.transform_aggregate(from_s="min(from_s)", to_s="max(to_s)", groupby=["schedule"])
        .mark_rect(opacity=0.12, color=theme.GREEN)
        .encode(x=alt.X("from_s:Q", title=title("at_s")), x2="to_s:Q")
    )
    lines = base.mark_line(strokeWidth=1.5).encode(
        x=x, y=theme.y("computed_tokens", axis=alt.Axis(format="~s")),
        color=alt.Color("rank:N", title=title("rank")),
        strokeDash=theme.origin_dash(["measured"]), tooltip=theme.tooltip(*columns),
    )  # fmt: skip
    lasted = {
        schedule: f"{end - begin:.0f} s of the {schedule} replay"
        for schedule, begin, end in work.select("schedule", "from_s", "to_s").unique().sort("schedule").iter_rows()
    }
    finding = (
        f"All ranks work for {' and '.join(lasted[name] for name in ('mirror', 'lag') if name in lasted)}"
        if lasted
        else "No work to show"
    )
    header = alt.Header(labelAnchor="start", labelFontWeight=600, labelOrient="top", labelPadding=3)
    return (
        (band + lines)
        .properties(width=320, height=220)
        .facet(column=alt.Column("schedule:N", title=None, sort=["mirror", "lag"], header=header), data=work)
        .properties(
            name="work_over_time",
            title=theme.headline(finding, subtitle),
        )
    )


def step_time_by_tokens(probes: pl.DataFrame, *, subtitle: str) -> alt.LayerChart:
    """Time of a step by the tokens of a single prompt, on all ranks or on one, and the function fitted to them.

    Args:
        probes: dp_size, num_busy, input_tokens, step_s, modelled_s, origin, source.
        subtitle: machine, sample.
    """
    columns = ("dp_size", "num_busy", "input_tokens", "step_s", "modelled_s")
    require(probes, (*columns, "origin", "source"), "step_time_by_tokens")
    every, one = "every rank busy", "one rank busy"
    all_busy = pl.col("num_busy") == pl.col("dp_size")
    named = probes.with_columns(pl.when(all_busy).then(pl.lit(every)).otherwise(pl.lit(one)).alias("setting"))
    x = theme.x("input_tokens", axis=alt.Axis(format=",d"))
    color = theme.entity_color("setting", [every, one])
    curve = (
        alt.Chart(named.with_columns(pl.lit("modelled").alias("origin")))
        .mark_line()
        .encode(
            x=x, y=alt.Y("modelled_s:Q", title=title("step_s")), color=color, detail="dp_size:N",
            strokeDash=theme.origin_dash(["modelled"]),
        )
    )  # fmt: skip
    dots = (
        alt.Chart(named)
        .mark_point(filled=True, size=80, opacity=1)
        .encode(
            x=x, y=alt.Y("step_s:Q", title=title("step_s")), color=color,
            shape=theme.origin_shape(probes["origin"].unique().to_list()), tooltip=theme.tooltip(*columns),
        )
    )  # fmt: skip
    worst = (probes["modelled_s"] / probes["step_s"] - 1).abs().max()
    finding = (
        "No single prompts were measured"
        if worst is None
        else f"The fitted step time is within {100 * worst:.0f} % of every single prompt"
    )
    return alt.layer(
        curve,
        dots,
        name="step_time_by_tokens",
        width=420,
        height=240,
        title=theme.headline(finding, subtitle),
    )
