"""What a recorded run says about the growth of all-reduces and of admissions, as findings."""

from __future__ import annotations

from typing import TYPE_CHECKING

import polars as pl

from rackbook.claims import Finding
from rackbook.hostwork import measured
from rackbook.models.growth_fit import LEAST_POINTS, LINEAR, LOGARITHMIC, Growth
from rackbook.tables import column

if TYPE_CHECKING:
    from rackbook.runs import Run

TIME = "sync_p50_ms"
STANDING_IN = ("segments_per_rank", "waits_per_rank", "cpu_us_per_rank")
"""Counts that may stand in for the time where ranks share cores."""

CONTROLS = {"ring over sockets": LINEAR, "doubling over sockets": LOGARITHMIC}
"""All-reduces of our own whose number of hops, and so the law of their time, is known."""


def linear_growth(run: Run, all_reduce: str) -> Finding:
    """Whether an all-reduce grows linearly with the ranks, by the evidence of a run.

    With a core for each rank the times decide. With fewer they do not: the ranks then take turns, and the time is that
    of all their work. A count then stands in for the time, but only one that names the law of both :data:`CONTROLS`
    in the same run; without such a count, or where two of them disagree, the run cannot tell.

    Args:
        run: the run.
        all_reduce: which.

    Returns:
        True or false, "measured"; nothing found, with the reason, where the run has doubts or cannot tell.
    """
    if run.flags:
        return Finding(None, note=f"run {run.id} measured it, but: {'; '.join(run.flags)}")
    points = measured.all_reduces(run)
    mine = points.filter(pl.col("all_reduce") == all_reduce)
    if mine.is_empty():
        why = run.provenance.get("absent", {}).get(all_reduce, "it was not asked for")
        return Finding(None, note=f"run {run.id} has no {all_reduce}: {why}")
    with_cores = mine.filter(pl.col("regime") == measured.OWN_CORE)
    if (found := measured.growth(with_cores, TIME)) is not None:
        what = f"run {run.id}, {measured.OWN_CORE}, {_ranks(with_cores)} ranks: {_fit(TIME, found)}"
        if found.better is None:
            return Finding(None, note=what)
        return Finding(_is_linear(found), "measured", what)
    sharing = points.filter(pl.col("regime") == measured.SHARED_CORE)
    return _by_counts(run, sharing, all_reduce)


def _by_counts(run: Run, sharing: pl.DataFrame, all_reduce: str) -> Finding:
    mine = sharing.filter(pl.col("all_reduce") == all_reduce)
    fits = {count: found for count in STANDING_IN if (found := measured.growth(mine, count)) is not None}
    if not fits:
        why = f"too few numbers of ranks, a law needs {LEAST_POINTS} powers of two"
        return Finding(None, note=f"run {run.id} has {why}")
    misread = {count: _misread_controls(sharing, count) for count in fits}
    head = f"run {run.id}, {measured.SHARED_CORE}, {_ranks(mine)} ranks: "
    what = head + "; ".join(
        f"{_fit(count, found)}, {'but ' + misread[count] if misread[count] else 'and names both controls'}"
        for count, found in fits.items()
    )
    says = {_is_linear(found) for count, found in fits.items() if not misread[count] and found.better is not None}
    if len(says) != 1:
        return Finding(None, note=f"{what}; it takes a core per rank, where the time itself decides")
    return Finding(says.pop(), "measured", what)


def _misread_controls(sharing: pl.DataFrame, count: str) -> str:
    """Which controls a count does not name correctly, and what it says of them; empty if it names both."""
    wrong = []
    for control, law in CONTROLS.items():
        found = measured.growth(sharing.filter(pl.col("all_reduce") == control), count)
        if found is None:
            wrong.append(f"{control} was not measured on enough ranks")
        elif found.better != law:
            wrong.append(f"{control}, known to be {law}, reads {_named(found)}")
    return " and ".join(wrong)


def _fit(quantity: str, found: Growth) -> str:
    errors = ", ".join(f"{law} off by {fit.error_percent:.1f} %" for law, fit in found.fits.items())
    return f"{column(quantity).label.lower()} {_named(found)}, {errors}"


def _named(found: Growth) -> str:
    return f"{found.better or 'cannot tell'} ({found.evidence_ratio:.3g} : 1)"


def _is_linear(found: Growth) -> bool:
    return found.better == LINEAR and found.fits[LINEAR].slope > 0


def _ranks(points: pl.DataFrame) -> str:
    return ", ".join(map(str, sorted(measured.powers_of_two(points)["num_ranks"].unique().to_list())))


def copies_grow(run: Run) -> Finding:
    """Whether copying a prompt takes longer the longer it is, for every method and cache state of a run.

    Returns:
        True or false, "measured"; nothing found, with the reason, where the run has doubts or no intervals.
    """
    if run.flags:
        return Finding(None, note=f"run {run.id} measured it, but: {'; '.join(run.flags)}")
    points = measured.copies(run)
    ends = longest_against_shortest(points)
    if ends.null_count().select(pl.sum_horizontal(pl.all())).item():
        return Finding(None, note=f"run {run.id} has copies without an interval: too few repeats")
    first, last = points["prompt_tokens"].min(), points["prompt_tokens"].max()
    growing = ends.filter(pl.col("low") > pl.col("high")).height
    return Finding(
        growing == ends.height,
        "measured",
        f"run {run.id}: {growing} of {ends.height} ways to copy a prompt take longer for {last:,} tokens than for "
        f"{first:,}, beyond their intervals; copies are a part of the admission",
    )


def longest_against_shortest(points: pl.DataFrame) -> pl.DataFrame:
    """Whether each copy of the longest prompt takes longer than that of the shortest, beyond the spread.

    Returns:
        copy_method, cache_state, low (least that the longest takes, ms), high (most that the shortest takes, ms); null
        where an interval is missing.
    """
    first, last = points["prompt_tokens"].min(), points["prompt_tokens"].max()
    shortest = points.filter(pl.col("prompt_tokens") == first).select("copy_method", "cache_state", high="copy_high_ms")
    longest = points.filter(pl.col("prompt_tokens") == last).select("copy_method", "cache_state", low="copy_low_ms")
    return longest.join(shortest, on=["copy_method", "cache_state"], how="left", maintain_order="left")
