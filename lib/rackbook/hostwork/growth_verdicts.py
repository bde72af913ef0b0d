"""What a recorded run says about the growth of all-reduces and of admissions, as findings."""

from __future__ import annotations

from typing import TYPE_CHECKING

import polars as pl

from rackbook.claims import Finding
from rackbook.hostwork import measured
from rackbook.models.growth_fit import LEAST_POINTS, LINEAR, Growth

if TYPE_CHECKING:
    from rackbook.runs import Run

TIME, SEGMENTS = "sync_p50_ms", "segments_per_rank"


def linear_growth(run: Run, all_reduce: str) -> Finding:
    """Whether the time of an all-reduce grows linearly with the ranks, by a run.

    Only times of ranks that each have a core decide. Ranks that share cores take turns, so that the time is that of all
    their work, and the number of messages is not the time: the note then says what it was.

    Args:
        run: the run.
        all_reduce: which.

    Returns:
        True or false, "measured"; nothing found, with the reason, where the run has doubts or cannot tell.
    """
    if run.flags:
        return _doubted(run)
    points = measured.all_reduces(run)
    mine = points.filter(pl.col("all_reduce") == all_reduce)
    if mine.is_empty():
        why = run.provenance.get("absent", {}).get(all_reduce, "it was not asked for")
        return Finding(None, note=f"run {run.id} has no {all_reduce}: {why}")
    with_cores = mine.filter(pl.col("regime") == measured.OWN_CORE)
    if (found := measured.growth(with_cores, TIME)) is not None:
        what = f"run {run.id}, {_fit(with_cores, 'time', found)}"
        if found.better is None:
            return Finding(None, note=what)
        return Finding(found.better == LINEAR and found.fits[LINEAR].slope > 0, "measured", what)
    return Finding(
        None,
        note=f"run {run.id}: it takes a core per rank at {LEAST_POINTS} powers of two, where the time itself decides; "
        f"{_segments(mine)}",
    )


def admission_growth(run: Run, printed_ns_per_token: float) -> Finding:
    """What copies of a prompt say about the growth of an admission: they may be parts of it, so nothing is found.

    Args:
        run: the run.
        printed_ns_per_token: CPU time per token that the source prints for a whole admission before the fixes.

    Returns:
        Nothing found, with what the copies cost.
    """
    if run.flags:
        return _doubted(run)
    costs = measured.copy_costs(measured.copies(run))
    told = [f"{copy[0]} {measured.cost_of(costs, copy):.2g} ns" for copy in (measured.BEFORE_COPY, measured.AFTER_COPY)]
    return Finding(
        None,
        note=f"run {run.id}: each further token costs a copy of the prompt CPU time, {', '.join(told)}, beside "
        f"{printed_ns_per_token:.2g} ns printed for a whole admission; which copies an admission makes, only an engine "
        "tells",
    )


def _doubted(run: Run) -> Finding:
    return Finding(None, note=f"run {run.id} measured it, but: {'; '.join(run.flags)}")


def _segments(mine: pl.DataFrame) -> str:
    sharing = mine.filter(pl.col("regime") == measured.SHARED_CORE)
    if (found := measured.growth(sharing, SEGMENTS)) is None:
        return f"the TCP segments were not counted at {LEAST_POINTS} of them either"
    return f"{_fit(sharing, 'TCP segments of a rank', found)}, which is not the time"


def _fit(points: pl.DataFrame, what: str, found: Growth) -> str:
    ranks = ", ".join(map(str, sorted(measured.powers_of_two(points)["num_ranks"].unique().to_list())))
    errors = ", ".join(f"{law} off by {fit.error_percent:.1f} %" for law, fit in found.fits.items())
    return f"{points['regime'][0]}, {ranks} ranks: {what} {found.verdict} ({found.evidence_ratio:.3g} : 1), {errors}"
