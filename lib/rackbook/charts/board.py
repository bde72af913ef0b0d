"""Charts of the score board."""

from __future__ import annotations

import altair as alt
import polars as pl

from rackbook.charts import layers, theme
from rackbook.tables import ORIGINS, require, title

_VERDICTS = ["reproduced", "consistent", "inconsistent", "refuted", "open"]


def verdicts_by_notebook(counts: pl.DataFrame) -> alt.LayerChart:
    """Claims per notebook, stacked by verdict.

    Args:
        counts: notebook, verdict, num_claims.
    """
    require(counts, ("notebook", "verdict", "num_claims"), "verdicts_by_notebook")
    total = int(counts["num_claims"].sum())
    is_open = int(counts.filter(pl.col("verdict") == "open")["num_claims"].sum())
    ordered = counts.with_columns(layers.place("verdict", _VERDICTS).alias("verdict_order"))
    base = alt.Chart(ordered).encode(
        x=alt.X("num_claims:Q", title=title("num_claims"), axis=alt.Axis(tickMinStep=1)),
        y=alt.Y("notebook:N", title=title("notebook"), sort="ascending"),
        order="verdict_order:O",
    )
    bars = base.mark_bar().encode(
        color=theme.entity_color("verdict", _VERDICTS),
        tooltip=[
            alt.Tooltip("notebook:N", title=title("notebook")),
            alt.Tooltip("verdict:N", title=title("verdict")),
            alt.Tooltip("num_claims:Q", title=title("num_claims")),
        ],
    )
    numbers = base.mark_text(color="white", fontSize=10, align="right", dx=-3).encode(
        x=alt.X("num_claims:Q", stack="zero"),
        detail="verdict:N",
        text=alt.condition("datum.num_claims > 1", "num_claims:Q", alt.value("")),
    )
    return alt.layer(
        bars,
        numbers,
        name="verdicts_by_notebook",
        width=460,
        height=alt.Step(22),
        title=theme.headline(
            f"{total - is_open} of {total} claims have a verdict, {is_open} are open",
            "Claims as published, judged here without a GPU; open claims need hardware or data that is missing",
        ),
    )


def found_against_claimed(ratios: pl.DataFrame) -> alt.LayerChart:
    """Relative difference between what was found and what was claimed, claim by claim.

    Args:
        ratios: claim, statement, notebook, verdict, basis, value, found, unit, difference_percent.
    """
    require(ratios, ("notebook", "verdict", "value", "found", "unit", "difference_percent"), "found_against_claimed")
    settled = theme.drawn(ratios["verdict"], _VERDICTS)
    present = theme.drawn(ratios["basis"], ORIGINS)
    zero = (
        alt.Chart(pl.DataFrame({"difference_percent": [0.0]}))
        .mark_rule(color=theme.MUTED)
        .encode(x="difference_percent:Q")
    )
    dots = (
        alt.Chart(ratios)
        .mark_point(filled=True, size=70, opacity=0.75)
        .encode(
            x=alt.X(
                "difference_percent:Q",
                title=title("difference_percent") + ", symlog scale",
                scale=alt.Scale(type="symlog", constant=1),
                axis=alt.Axis(values=[-100, -30, -10, -3, -1, 0, 1, 3, 10, 30, 100, 300], format="+d"),
            ),
            y=alt.Y("notebook:N", title=title("notebook"), sort="ascending"),
            color=theme.entity_color("verdict", settled),
            shape=alt.Shape(
                "basis:N",
                title=title("basis"),
                scale=alt.Scale(domain=present, range=[theme.ORIGIN_SHAPES[o] for o in present]),
            ),
            tooltip=[
                alt.Tooltip("statement:N", title=title("statement")),
                alt.Tooltip("value:Q", title=title("value"), format=",.5~g"),
                alt.Tooltip("found:Q", title=title("found"), format=",.5~g"),
                alt.Tooltip("unit:N", title=title("unit")),
                alt.Tooltip("difference_percent:Q", title=title("difference_percent"), format="+.3~g"),
                alt.Tooltip("verdict:N", title=title("verdict")),
                alt.Tooltip("basis:N", title=title("basis")),
            ],
        )
    )
    within = ratios.filter(pl.col("verdict").is_in(["reproduced", "consistent"])).height
    return alt.layer(
        zero,
        dots,
        name="found_against_claimed",
        width=460,
        height=alt.Step(22),
        title=theme.headline(
            f"{within} of {ratios.height} settled numbers lie within their tolerance",
            "Found here minus the published claim, relative to the claim; each against its own tolerance",
        ),
    )
