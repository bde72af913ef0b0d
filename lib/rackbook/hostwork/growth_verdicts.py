"""What a recorded run says about the growth of all-reduces and of admissions, as findings."""

from __future__ import annotations

from typing import TYPE_CHECKING

import polars as pl

from rackbook.claims import Finding
from rackbook.hostwork import measured
from rackbook.models.growth_fit import LEAST_POINTS, LINEAR
from rackbook.tables import column

if TYPE_CHECKING:
    from rackbook.runs import Run


def linear_growth(run: Run, all_reduce: str) -> Finding:
    """Whether an all-reduce grows linearly with the ranks, by the evidence of a run.

    With a core for each rank the times decide. With fewer they do not: the ranks then take turns, and the time is that
    of all their work. What decides there is how often a rank waits for another: that belongs to the algorithm, and with
    a core for each rank those waits are what the time consists of.

    Args:
        run: the run.
        all_reduce: which.

    Returns:
        True or false, "measured"; nothing found, with the reason, where the run has doubts or cannot tell.
    """
    if run.flags:
        return Finding(None, note=f"run {run.id} measured it, but: {'; '.join(run.flags)}")
    mine = measured.all_reduces(run).filter(pl.col("all_reduce") == all_reduce)
    if mine.is_empty():
        why = run.provenance.get("absent", {}).get(all_reduce, "it was not asked for")
        return Finding(None, note=f"run {run.id} has no {all_reduce}: {why}")
    for regime, quantity in ((measured.OWN_CORE, "sync_p50_ms"), (measured.SHARED_CORE, "waits_per_rank")):
        group = mine.filter(pl.col("regime") == regime)
        found = measured.growth(group, quantity)
        if found is None:
            continue
        counts = ", ".join(map(str, sorted(measured.powers_of_two(group)["num_ranks"].unique().to_list())))
        what = f"run {run.id}, {regime}, {counts} ranks: {column(quantity).label.lower()}"
        errors = ", ".join(f"{law} off by {fit.error_percent:.1f} %" for law, fit in found.fits.items())
        if found.better is None:
            return Finding(None, note=f"{what}: cannot tell, {errors}, evidence {found.evidence_ratio:.1f} : 1")
        grows = found.better == LINEAR and found.fits[LINEAR].slope > 0
        return Finding(grows, "measured", f"{what}: {errors}, evidence {found.evidence_ratio:.3g} : 1")
    return Finding(None, note=f"run {run.id} has too few numbers of ranks, a law needs {LEAST_POINTS} powers of two")


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
