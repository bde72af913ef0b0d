"""Charts of changes and the releases that hold them."""

from __future__ import annotations

import altair as alt
import polars as pl

from rackbook.charts import layers, theme
from rackbook.tables import require, title

WORDS = ("in", "not known", "not in")
EVIDENCE = ("by dates", "by content")
_SIGNS = "datum.contained == 'in' ? 'in' : datum.contained == 'not known' ? '?' : ''"


def changes_by_release(cells: pl.DataFrame, *, subtitle: str) -> alt.HConcatChart:
    """Which release has which change, by dates and by content side by side; disagreements are framed.

    Args:
        cells: change, version, evidence, contained, confidence, disagrees, locator, origin, source.
        subtitle: package, sources and sample.
    """
    names = ("change", "version", "evidence", "contained", "confidence", "disagrees", "locator", "origin", "source")
    require(cells, names, "changes_by_release")
    orders = {name: cells[name].unique(maintain_order=True).to_list() for name in ("change", "version")}
    panels = []
    for place, evidence in enumerate(EVIDENCE):
        chosen = cells.filter(pl.col("evidence") == evidence)
        origin = ", ".join(chosen["origin"].unique().sort())
        base = alt.Chart(chosen, title=alt.TitleParams(f"{evidence} ({origin})", fontSize=12, offset=4)).encode(
            x=alt.X(
                "version:N",
                title=title("version"),
                sort=orders["version"],
                axis=alt.Axis(labelAngle=0, orient="top", grid=False, domain=False, ticks=False),
            ),
            y=alt.Y(
                "change:N",
                title=None,
                sort=orders["change"],
                axis=None if place else alt.Axis(labelLimit=320, grid=False, domain=False, ticks=False),
            ),
        )
        cell = base.mark_rect(stroke="white", strokeWidth=2).encode(
            color=theme.entity_color("contained", WORDS),
            tooltip=theme.tooltip("change", "version", "evidence", "contained", "confidence", "locator"),
        )
        sign = (
            base.transform_calculate(sign=_SIGNS)
            .mark_text(fontSize=11)
            .encode(
                text="sign:N",
                color=alt.condition("datum.contained == 'in'", alt.value("white"), alt.value(theme.INK)),
            )
        )
        frame = base.transform_filter("datum.disagrees").mark_rect(fill=None, stroke=theme.VERMILLION, strokeWidth=2.5)
        panels.append(alt.layer(cell, sign, frame, width=alt.Step(52), height=alt.Step(22)))
    return alt.hconcat(*panels, spacing=16).properties(
        name="changes_by_release",
        title=theme.headline(_disagreement(cells), [subtitle, "Framed: dates and content disagree"]),
    )


def days_from_merge_to_release(lags: pl.DataFrame, *, subtitle: str) -> alt.LayerChart:
    """How long a merged change waited for its release, by dates and by content.

    Args:
        lags: change, evidence, merged_on, first_release, days_to_release, origin, source; rows without days are not
            drawn.
        subtitle: package, sources and sample.
    """
    names = ("change", "evidence", "merged_on", "first_release", "days_to_release", "origin", "source")
    require(lags, names, "days_from_merge_to_release")
    known = lags.filter(pl.col("days_to_release").is_not_null())
    spans = (
        known.group_by("change", maintain_order=True)
        .agg(pl.col("days_to_release").max().alias("max_days"), pl.col("days_to_release").min())
        .with_columns(pl.lit("derived").alias("origin"))
    )
    y = alt.Y(
        "change:N", title=None, sort=lags["change"].unique(maintain_order=True).to_list(), axis=alt.Axis(labelLimit=320)
    )
    longest = known["days_to_release"].max() or 1
    x = theme.x("days_to_release", scale=alt.Scale(domain=[0, 1.08 * longest]), axis=alt.Axis(tickMinStep=1))
    line = alt.Chart(spans).mark_rule(color=theme.MUTED, strokeWidth=1.5).encode(x=x, x2="max_days:Q", y=y)
    # the dates' points are smaller and on top, so that both are seen where they fall together
    dots = (
        alt.Chart(known.sort(pl.col("evidence") == "by dates", maintain_order=True))
        .mark_point(filled=True, opacity=1)
        .encode(
            x=x,
            y=y,
            size=alt.condition("datum.evidence == 'by dates'", alt.value(60), alt.value(170)),
            color=theme.entity_color("evidence", EVIDENCE),
            shape=theme.origin_shape(known["origin"]),
            tooltip=theme.tooltip("change", "evidence", "merged_on", "first_release", "days_to_release"),
        )
    )
    labels = (
        alt.Chart(known.unique(["change", "days_to_release", "first_release"], keep="first", maintain_order=True))
        .mark_text(dy=-13, fontSize=10, color=theme.INK)
        .encode(x=x, y=y, text="first_release:N")
    )
    return alt.layer(line, dots, labels).properties(
        name="days_from_merge_to_release",
        height=alt.Step(36),
        title=theme.headline(_waits(known), subtitle),
    )


def changes_held(counts: pl.DataFrame, places: pl.DataFrame, *, subtitle: str) -> alt.LayerChart:
    """How many changes of the list each release holds by content, and who runs which release.

    Args:
        counts: version, contained, num_prs, origin, source.
        places: user, version, releases_behind, looked_up_on, origin, source: the versions that are marked.
        subtitle: package, sources and sample.
    """
    require(counts, ("version", "contained", "num_prs", "origin", "source"), "changes_held counts")
    require(places, ("user", "version", "releases_behind", "looked_up_on", "origin", "source"), "changes_held places")
    versions = counts["version"].unique(maintain_order=True).to_list()
    total = counts.filter(pl.col("version") == versions[0])["num_prs"].sum()
    x = alt.X("version:N", title=title("version"), sort=versions, axis=alt.Axis(labelAngle=0))
    y = theme.y(
        "num_prs",
        scale=alt.Scale(domain=[0, total * 1.35], nice=False),
        axis=alt.Axis(values=[*range(0, total + 1, 4)]),
    )
    bars = (
        alt.Chart(counts.with_columns(layers.place("contained", WORDS).alias("place")))
        .mark_bar(width=46)
        .encode(
            x=x,
            y=y,
            color=theme.entity_color("contained", WORDS),
            order="place:O",
            tooltip=theme.tooltip("version", "contained", "num_prs"),
        )
    )
    on_map = places.filter(pl.col("version").is_in(versions))
    names = (
        on_map.with_columns(
            pl.format("{}:\n{} behind on {}", "user", "releases_behind", "looked_up_on").alias("label"),
            (total * (1.03 + 0.14 * pl.int_range(pl.len()).over("version"))).alias("num_prs"),
        )
        if on_map.height
        else on_map.with_columns(pl.lit("").alias("label"), pl.lit(0.0).alias("num_prs"))
    )
    marks = (
        alt.Chart(names)
        .mark_text(color=theme.VERMILLION, fontSize=10, lineBreak="\n", baseline="bottom", dy=-14)
        .encode(
            x=x,
            y="num_prs:Q",
            text="label:N",
            tooltip=theme.tooltip("user", "version", "releases_behind", "looked_up_on"),
        )
    )
    newest = dict(counts.filter(pl.col("version") == versions[-1]).select("contained", "num_prs").iter_rows())
    unknown = newest.get("not known", 0)
    return alt.layer(
        bars,
        marks,
        name="changes_held",
        width=alt.Step(130),
        title=theme.headline(
            f"{versions[-1]} holds {newest.get('in', 0)} of the {total} changes"
            + (f"; for {unknown} more its wheel cannot tell" if unknown else ""),
            [subtitle, f"{title('origin')} of the counts: {', '.join(counts['origin'].unique().sort())}"],
        ),
    )


def _disagreement(cells: pl.DataFrame) -> str:
    wrong = cells.filter((pl.col("evidence") == "by dates") & pl.col("disagrees"))
    if wrong.is_empty():
        return "Dates and wheels agree wherever both can tell"
    found = wrong["version"].value_counts(sort=True)
    version, number = found.sort("count", "version", descending=True).row(0)
    dated = cells.filter((pl.col("evidence") == "by dates") & (pl.col("version") == version))
    if dated.filter(pl.col("disagrees") & (pl.col("contained") != "in")).height:
        return f"Dates and wheel contradict each other about {version}, in {number} of {dated.height} changes"
    claimed = dated.filter(pl.col("contained") == "in").height
    return f"The dates put {claimed} changes into {version}; its wheel lacks {number} of them"


def _waits(known: pl.DataFrame) -> str:
    parts = []
    for evidence in EVIDENCE:
        days = known.filter(pl.col("evidence") == evidence)["days_to_release"]
        if days.len():
            span = f"{days.min()}" if days.min() == days.max() else f"{days.min()} to {days.max()}"
            parts.append(f"{span} {'day' if span == '1' else 'days'} {evidence}")
    return "From merge to release: " + ", ".join(parts) if parts else "No merged change is known to be released"
