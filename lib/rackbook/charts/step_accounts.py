"""Where the time of an engine step goes, as waterfalls."""

from __future__ import annotations

import altair as alt
import polars as pl

from rackbook.charts import theme
from rackbook.tables import require, title


def step_accounts(accounts: pl.DataFrame, *, subtitle: str) -> alt.VConcatChart:
    """Where the time of a step goes: waterfalls from one step to another.

    Args:
        accounts: account, account_part, from_ms, to_ms, change_ms, in the order of reading.
        subtitle: model and sample.
    """
    require(
        accounts,
        ("account", "account_part", "from_ms", "to_ms", "change_ms", "origin", "source", "formula"),
        "step_accounts",
    )
    origins = accounts["origin"].unique().to_list()
    panels = [_waterfall(group, name, origins) for (name,), group in accounts.group_by("account", maintain_order=True)]
    return alt.vconcat(*panels, spacing=20).properties(
        name="step_accounts", title=theme.headline(_account_finding(accounts), subtitle)
    )


def _waterfall(group: pl.DataFrame, name: str, origins: list[str]) -> alt.LayerChart:
    kinds = (
        pl.when(pl.col("account_part").str.contains("hidden behind")).then(pl.lit("meanwhile"))
        .when(pl.col("from_ms") == 0).then(pl.lit("step"))
        .when(pl.col("change_ms") < 0).then(pl.lit("less"))
        .otherwise(pl.lit("more"))
    )  # fmt: skip
    rows = group.with_columns(
        kinds.alias("kind"),
        pl.max_horizontal("from_ms", "to_ms").alias("end_ms"),
        pl.when(pl.col("from_ms") == 0)
        .then(pl.format("{}", pl.col("to_ms").round(2)))
        .when(kinds == "meanwhile")
        .then(pl.format("{}", pl.col("change_ms").round(2)))
        .when(pl.col("change_ms") < 0)
        .then(pl.format("−{}", (-pl.col("change_ms")).round(2)))
        .otherwise(pl.format("+{}", pl.col("change_ms").round(2)))
        .alias("label"),
    )  # fmt: skip
    order = rows["account_part"].to_list()
    y = alt.Y("account_part:N", title=None, sort=order, axis=alt.Axis(labelLimit=220))
    base = alt.Chart(rows).encode(y=y)
    bars = base.mark_bar(height=16).encode(
        x=theme.x("from_ms", axis=alt.Axis(title=title("step_ms"))),
        x2="to_ms:Q",
        color=alt.Color(
            "kind:N",
            title="Bar",
            scale=alt.Scale(
                domain=["step", "less", "more", "meanwhile"],
                range=[theme.GREY, theme.BLUE, theme.VERMILLION, theme.SKY],
            ),
        ),
        tooltip=theme.tooltip("account_part", "from_ms", "to_ms", "change_ms", "formula"),
    )
    marks = base.mark_point(filled=True, size=45, color=theme.INK, opacity=1).encode(
        x="to_ms:Q", shape=theme.origin_shape(origins)
    )
    numbers = base.mark_text(dx=8, align="left", color=theme.INK, fontSize=10).encode(x="end_ms:Q", text="label:N")
    return alt.layer(bars, marks, numbers, width=460, height=alt.Step(26), title=theme.note(name))


def _account_finding(accounts: pl.DataFrame) -> str:
    rows = accounts.filter(pl.col("account_part") == "not GPU")
    if rows.height != 1:
        return "Where the time of a step goes"
    return f"From the narrower to the wider engine, {rows['change_ms'][0]:.2f} ms came from outside the GPU"
